"""The content of a model's folder: its files, the weights of its checkpoint, its vocabulary."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from model_runner.gguf.checkpoint import GgufCheckpoint
from model_runner.gguf.header import parts_of
from model_runner.hub.repository import hash_listing
from model_runner.refusal import classifies
from model_runner.weights.checkpoint import Checkpoint
from model_runner.weights.interleaved_experts import deinterleave_experts
from model_runner.weights.quantized_linears import LinearReader, as_weights
from model_runner.weights.safetensors_files import SafetensorsCheckpoint
from model_runner.weights.safetensors_head import weight_files

_PREDICTION = "mtp."
"""Begins the names of Qwen's modules for multi-token prediction (`heads/mtp.py`)."""
HEAD_NAMES = ("score.weight", "score.bias")
"""Names of the classification head's weights in transformers' decoder-only models."""


def open_checkpoint(folder: Path, reader: LinearReader | None = None) -> Checkpoint | None:
    """The weights of a folder, of which only the names are read; None if it has neither a GGUF file nor safetensors.

    `reader` reads linears that are stored quantised.

    Raises:
        UnsupportedModelError: if a file is damaged.
    """
    if (file := gguf_file_of(folder)) is not None:
        return GgufCheckpoint(file)
    checkpoint = SafetensorsCheckpoint(folder)
    if not checkpoint.shapes:
        return None
    return deinterleave_experts(checkpoint) if reader is None else as_weights(checkpoint, reader)


def gguf_file_of(folder: Path) -> Path | None:
    """The GGUF file that has a folder's weights; None if they are safetensors, also with a GGUF file next to them."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".gguf", ".safetensors"))
    return files[0] if files and all(path.suffix.lower() == ".gguf" for path in files) else None


def checkpoint_files(folder: Path) -> list[Path]:
    """The files of a folder with its weights, as `open_checkpoint` reads them, and with its configuration."""
    file = gguf_file_of(folder)
    return [*sorted(folder.glob("*.json")), *(weight_files(folder) if file is None else parts_of(file))]


@dataclass(frozen=True, slots=True)
class Listing:
    """The files that decide what a model's weights are, as they were at some moment."""

    model: Path
    """The model's folder."""
    digest: str | None
    """SHA-256 of their places, sizes and times; None if one is missing."""

    @classmethod
    def of(cls, model: Path) -> "Listing":
        """As they are now."""
        with suppress(OSError, ValueError, LookupError, TypeError):  # damage, which the checkpoint's reader describes
            return cls(model, hash_listing([path.resolve() for path in checkpoint_files(model)]))
        return cls(model, None)


def check_tokenizers(model: Path, other: Path, role: str) -> None:
    """Raises ValueError if the models in two folders have different vocabularies; `role` describes the second model."""
    if _vocabulary(model) != _vocabulary(other):
        raise ValueError(f"the {role} model {other} has another vocabulary than {model}; use one with the same")


def _vocabulary(folder: Path) -> dict[str, int] | None:
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)).get_vocab() if path.exists() else None


def is_unused_head(name: str, config: Any) -> bool:
    """Whether a weight belongs to multi-token prediction heads or to a classification head."""
    text = config.get_text_config()
    if name.startswith(_PREDICTION):
        return True
    layer = re.search(r"\blayers\.(\d{1,9})\.", name)
    num_modules = getattr(text, "num_nextn_predict_layers", None) or 0
    if layer is not None and 0 <= int(layer[1]) - text.num_hidden_layers < num_modules:
        return True
    return name in HEAD_NAMES and classifies(config.architectures)
