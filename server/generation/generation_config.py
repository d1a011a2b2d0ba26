"""What a model's generation_config.json sets for requests that say nothing."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from server.text.tokenizer import Tokenizer, read_json

_FILE = "generation_config.json"
_TAKEN = frozenset(
    {
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "no_repeat_ngram_size", "exponential_decay_length_penalty"),
        *("max_new_tokens", "stop_strings", "eos_token_id"),
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        *("_commit_hash", "_from_model_config", "transformers_version"),
        *("bos_token_id", "decoder_start_token_id", "pad_token_id"),  # the tokenizer and its template begin a prompt
        *("cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile"),
        *("low_memory", "max_cache_len", "prefill_chunk_size", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
        *(
            "assistant_confidence_threshold",
            "assistant_early_exit",
            "assistant_ensemble_weight",
            "assistant_lookbehind",
        ),
        *("is_assistant", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("prompt_lookup_num_tokens", "speculation_type", "target_lookbehind", "use_mtp"),
    }
)
"""What can change no answer here: memory, speed, what else `generate` returns, how transformers guesses ahead."""
_NEUTRAL: Mapping[str, object] = {
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
}
"""The defaults of transformers for all other keys, where they are not null, false or empty."""

logger = logging.getLogger("samewise.model")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the file sets, by the names of the request's fields; None where it says nothing."""

    temperature: float | None = None
    """0 for a model that is not to be sampled from."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the output; the file may name one or several."""

    def without_truncations(self) -> "GenerationDefaults":
        """For requests whose own truncation replaces all others."""
        return replace(self, top_k=None, top_p=None, min_p=None, typical_p=None, epsilon_cutoff=None, eta_cutoff=None)


def load_defaults(folder: Path, tokenizer: Tokenizer) -> GenerationDefaults:
    """The defaults of a model folder; a warning names what else the file sets that would change answers.

    The tokens that end the output come from generation_config.json, else from config.json, else from the tokenizer.
    Raises ValueError if a value is not what it should be.
    """
    generation = read_json(folder / _FILE)
    if unused := not_taken(generation):
        logger.warning("%s sets %s, which this server does not take from there", _FILE, ", ".join(unused))
    eos = _token_ids(generation) or _token_ids(read_json(folder / "config.json"))
    if not eos:
        token = tokenizer.token_id(tokenizer.special_tokens.get("eos_token", ""))
        eos = () if token is None else (token,)
    return GenerationDefaults(
        temperature=0.0 if generation.get("do_sample") is False else _number(generation, "temperature"),
        top_k=_integer(generation, "top_k"),
        top_p=_number(generation, "top_p"),
        min_p=_number(generation, "min_p"),
        typical_p=_number(generation, "typical_p"),
        repetition_penalty=_number(generation, "repetition_penalty"),
        no_repeat_ngram_size=_integer(generation, "no_repeat_ngram_size"),
        epsilon_cutoff=_number(generation, "epsilon_cutoff"),
        eta_cutoff=_number(generation, "eta_cutoff"),
        exponential_decay_length_penalty=_start_and_factor(generation, "exponential_decay_length_penalty"),
        max_tokens=_integer(generation, "max_new_tokens", least=1),
        stop=_strings(generation, "stop_strings"),
        eos_token_ids=eos,
    )


def not_taken(generation: Mapping[str, Any]) -> list[str]:
    """The keys that are not taken and ask for something, as `generate` of transformers reads them."""
    return sorted(
        key
        for key, value in generation.items()
        if key not in _TAKEN | _WITHOUT_EFFECT
        and not (value is None or value is False or value in ([], {}) or value == _NEUTRAL.get(key))
    )


def _token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _number(config: Mapping[str, Any], key: str) -> float | None:
    value = config.get(key)
    if value is not None and not isinstance(value, int | float):
        raise _wrong(key, value, "a number")
    return None if value is None else float(value)


def _integer(config: Mapping[str, Any], key: str, least: int | None = None) -> int | None:
    value = _number(config, key)
    if value is not None and not value.is_integer():
        raise _wrong(key, value, "an integer")
    if value is not None and least is not None and value < least:
        raise _wrong(key, value, f"at least {least}")
    return None if value is None else int(value)


def _start_and_factor(config: Mapping[str, Any], key: str) -> tuple[int, float] | None:
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise _wrong(key, value, "[start, factor]")
    return int(value[0]), float(value[1])


def _strings(config: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    value = config.get(key)
    strings = [value] if isinstance(value, str) else value
    if strings is None:
        return None
    if not isinstance(strings, list) or not all(isinstance(string, str) and string for string in strings):
        raise _wrong(key, value, "one or several strings")
    return tuple(strings)


def _wrong(key: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{_FILE}: {key} is {value!r}, not {expected}.")
