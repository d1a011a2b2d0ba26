"""The model that the server speaks for: its name, its defaults, and the fingerprint of what determines its answers."""

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from model_runner.models.repository import ModelFolder
from server import __version__
from server.config import Settings
from server.engine.client import EngineInfo
from server.tokenization import Tokenizer, read_json

_HEAD_BYTES = 1 << 16
_UNUSED_DEFAULTS = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "penalty_alpha"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id"),
    *("forced_eos_token_id", "sequence_bias", "guidance_scale", "top_h"),
)
"""Settings that would change answers and are not defaults of any field here."""

logger = logging.getLogger("samewise.model")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What generation_config.json sets; None where it says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the output; the file may name one or several."""

    def without_truncations(self) -> "GenerationDefaults":
        """For requests whose own truncation replaces all others."""
        return replace(self, top_k=None, top_p=None, min_p=None, typical_p=None, epsilon_cutoff=None, eta_cutoff=None)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model under one name."""

    name: str
    defaults: GenerationDefaults = GenerationDefaults()
    digest: str = ""
    """Of the model's files, and of the auxiliary model's."""
    aux_model: str | None = None
    """Name of the auxiliary model."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time in seconds."""

    @classmethod
    def from_folder(
        cls, folder: Path, tokenizer: Tokenizer, name: str, aux: ModelFolder | None = None
    ) -> "ServedModel":
        """Raises OSError or ValueError if a file is missing or not what it should be."""
        digest, defaults = digest_folder(folder), load_defaults(folder, tokenizer)
        if aux is None:
            return cls(name, defaults, digest)
        return cls(name, defaults, f"{digest}\n{digest_folder(aux.path)}", aux.name)

    def fingerprint(self, info: EngineInfo, settings: Settings) -> str:
        """Changes whenever the answer to the same request may.

        How the server speculates is no part of it: drafts that are verified by `match` never change an answer, and
        the other ways, which a request must ask for, promise no answer that could be told again.
        """
        runs = (info.device, info.dtype, info.kv_dtype, info.kernels, str(info.block_size), str(info.max_model_len))
        parts = (__version__, self.digest, *runs, settings.logprobs)
        return "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def load_defaults(folder: Path, tokenizer: Tokenizer) -> GenerationDefaults:
    """The defaults of a model folder.

    The tokens that end the output come from generation_config.json, else from config.json, else from the tokenizer.
    Raises ValueError if a value is not a number.
    """
    generation = read_json(folder / "generation_config.json")
    unused = sorted(key for key in _UNUSED_DEFAULTS if generation.get(key))
    if unused:
        logger.warning("generation_config.json sets %s, which this server does not take from there", ", ".join(unused))
    config = read_json(folder / "config.json")
    eos = _token_ids(generation.get("eos_token_id")) or _token_ids(config.get("eos_token_id"))
    if not eos:
        token = tokenizer.token_id(tokenizer.special_tokens.get("eos_token", ""))
        eos = () if token is None else (token,)
    return GenerationDefaults(
        temperature=_number(generation, "temperature"),
        top_k=_integer(generation, "top_k"),
        top_p=_number(generation, "top_p"),
        min_p=_number(generation, "min_p"),
        typical_p=_number(generation, "typical_p"),
        repetition_penalty=_number(generation, "repetition_penalty"),
        no_repeat_ngram_size=_integer(generation, "no_repeat_ngram_size"),
        epsilon_cutoff=_number(generation, "epsilon_cutoff"),
        eta_cutoff=_number(generation, "eta_cutoff"),
        exponential_decay_length_penalty=_start_and_factor(generation, "exponential_decay_length_penalty"),
        eos_token_ids=eos,
    )


def digest_folder(folder: Path) -> str:
    """A hash of the folder's files: their names, sizes and beginnings, which hold the headers of weight files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as file:
            digest.update(f"{path.name}\n{path.stat().st_size}\n".encode())
            digest.update(file.read(_HEAD_BYTES))
    return digest.hexdigest()


def _token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _number(config: Mapping[str, Any], key: str) -> float | None:
    value = config.get(key)
    return None if value is None else float(value)


def _start_and_factor(config: Mapping[str, Any], key: str) -> tuple[int, float] | None:
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"generation_config.json: {key} is {value!r}, not [start, factor].")
    return int(value[0]), float(value[1])


def _integer(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return None if value is None else int(value)
