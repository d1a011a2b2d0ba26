"""Configurations of known families, read without transformers, whose import takes longer than all of a small model's
start.

Only what a file says is taken from it. Transformers knows defaults for each family; an entry that is absent here raises
MissingEntryError, and then transformers reads the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_runner.json_files import read_object
from model_runner.refusal import other_task
from model_runner.spec.families import FAMILIES, ConfigFile, Family

_NONE_IF_ABSENT = frozenset({"architectures", "num_nextn_predict_layers", "quantization_config"})


class MissingEntryError(Exception):
    """The file lacks an entry that transformers has a default for."""


class KnownConfig:
    """The entries of a config.json as attributes."""

    def __init__(self, entries: Mapping[str, Any], folder: Path) -> None:
        self._entries = entries
        self.name_or_path = str(folder)

    def __getattr__(self, name: str) -> Any:
        """Raises MissingEntryError, which `getattr` with a default does not hide."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._entries:
            if name in _NONE_IF_ABSENT:
                return None
            raise MissingEntryError(name)
        return self._entries[name]

    def get_text_config(self) -> "KnownConfig":
        """The configuration itself, as transformers' configurations of language models return it."""
        return self


def read_known_config(folder: Path) -> KnownConfig | None:
    """Read config.json of a language model of a known family.

    Returns:
        None if transformers has to read it: another family; a model with other inputs, whose towers need transformers
        anyway; a head that is not served; entries in a form of older versions.
    """
    try:
        entries = read_object(folder / "config.json", object_hook=_read_number)
    except (OSError, ValueError):
        return None
    if not isinstance(entries, dict) or other_task(entries.get("architectures")) is not None:
        return None
    family = FAMILIES.get(str(entries.get("model_type")))
    if family is None or "text_config" in entries or (folder / "hf_quant_config.json").exists():
        return None
    if any(entries.get(name) for name in family.file.refused):
        return None
    return _read_text(entries, family, folder)


def _read_text(entries: Mapping[str, Any], family: Family, folder: Path) -> KnownConfig | None:
    """The configuration of a language model; None if transformers has to read it."""
    entries = _with_usual_names(entries, family.file)
    make_rope = _rope_by_kind if family.model.rotary_by_kind else _rope_parameters
    rope = make_rope(entries, family.file)
    if (rope is None and family.model.has_rotary) or entries.get("mamba_d_head") == "auto":
        return None
    own: dict[str, Any] = {"rope_parameters": rope or {}}
    hidden, heads = entries.get("hidden_size"), entries.get("num_attention_heads")
    if entries.get("head_dim") is None and family.file.divides_hidden and hidden and heads:
        own["head_dim"] = hidden // heads
    if family.file.window_needs_flag and not entries.get("use_sliding_window"):
        own["sliding_window"] = None
    if family.layer.recurrent is None and {**entries, **own}.get("sliding_window", 0) is None:
        own["layer_types"] = entries.get("layer_types") or ["full_attention"] * entries.get("num_hidden_layers", 0)
    return KnownConfig({**entries, **own}, folder)


def _with_usual_names(entries: Mapping[str, Any], file: ConfigFile) -> dict[str, Any]:
    """The entries by transformers' names, with its defaults for those that files lack."""
    names = file.other_names
    usual = {**file.defaults, **{name: entries[name] for name in entries if name not in names}}
    usual |= {names[name]: entries[name] for name in entries if name in names}
    if usual.get("layer_types", ()) is None:  # then transformers computes them
        del usual["layer_types"]
    num_layers = usual.get("num_hidden_layers")
    if file.window_period is not None and num_layers and not usual.get("layer_types"):
        period = usual.get("sliding_window_pattern", file.window_period)
        usual["layer_types"] = [
            "sliding_attention" if number % period else "full_attention" for number in range(1, num_layers + 1)
        ]
    if file.layer_letters:
        pattern, layers = entries.get("hybrid_override_pattern", ""), usual.pop("layer_types", None)
        if layers is None and set(pattern) <= file.layer_letters.keys():
            layers = [file.layer_letters[letter] for letter in pattern]
        usual |= {"layer_types": layers, "num_hidden_layers": len(layers)} if layers else {}
    return usual


def _read_number(entries: dict[str, Any]) -> Any:
    """An object of the file; a number where transformers stores one that JSON lacks, such as infinity, as an object."""
    return float(entries["__float__"]) if entries.keys() == {"__float__"} else entries


def _rope_by_kind(entries: Mapping[str, Any], file: ConfigFile) -> dict[str, Any] | None:
    """Rotary parameters by kinds of layers; None if an entry is missing. Gemma 3's older files have two bases."""
    rope: dict[str, Any] | None = entries.get("rope_parameters")
    if rope is not None or "rope_local_base_freq" not in entries or (full := _rope_parameters(entries, file)) is None:
        return rope
    local = {"rope_type": "default", "rope_theta": entries["rope_local_base_freq"]}
    return {"full_attention": full, "sliding_attention": local}


def _rope_parameters(entries: Mapping[str, Any], file: ConfigFile) -> dict[str, Any] | None:
    """Rotary parameters in the form of transformers 5; None if an entry is missing."""
    rope = dict(entries.get("rope_parameters") or entries.get("rope_scaling") or {})
    old_type = rope.pop("type", None)
    name = rope.get("rope_type") or old_type or "default"
    rope["rope_type"] = file.rope_names.get(name, name) if isinstance(name, str) else name
    needed, optional = {"rope_theta"}, {"partial_rotary_factor"}
    if rope["rope_type"] in ("llama3", "yarn"):
        needed |= {"factor", "original_max_position_embeddings"}
    if rope["rope_type"] == "longrope":
        needed |= {"short_factor", "long_factor", "original_max_position_embeddings"}
        if "original_max_position_embeddings" in entries:  # takes precedence
            rope["original_max_position_embeddings"] = entries["original_max_position_embeddings"]
    for name in needed | optional:
        if name not in rope and name in entries:
            rope[name] = entries[name]
    return rope if needed <= rope.keys() else None
