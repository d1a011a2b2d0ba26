"""The content of a model's folder: the weights of its checkpoint, their sizes, the classification head."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from torch import Tensor

from model_runner.gguf.checkpoint import GgufCheckpoint
from model_runner.gguf.header import parts_of
from model_runner.kernels.library import INT4_BITS, ROTATED_BLOCK, WeightKind
from model_runner.kv_cache import KVShape
from model_runner.recurrence.backend import ConvShape, RecurrentShape, ScanShape
from model_runner.refusal import UnsupportedModelError
from model_runner.weights.checkpoint import Checkpoint
from model_runner.weights.interleaved_experts import deinterleave_experts
from model_runner.weights.quantized_linears import LinearReader, as_weights
from model_runner.weights.safetensors_files import SafetensorsCheckpoint
from model_runner.weights.safetensors_head import weight_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from model_runner.models.model_spec import ModelSpec
    from model_runner.models.packed_cache import Listing

FloatArray = npt.NDArray[np.float64]

CLASSIFIES = "ForSequenceClassification"
"""Suffix of the class names of classification models."""
_PREDICTION = "mtp."
"""Begins the names of Qwen's modules for multi-token prediction (`heads/mtp.py`)."""
HEAD_NAMES = ("score.weight", "score.bias")
"""Names of the classification head's weights in transformers' decoder-only models."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that decide how much memory the model needs."""

    kv: tuple[KVShape, ...]
    """Shape of the KV of each call of the attention in a pass: of each layer, in most models."""
    num_layers: int
    """Decoder layers."""
    num_parameters: int
    """Distinct weights; a head shared with the embedding counts once."""
    num_shared: int
    """Parameters of the head if it is shared with the embedding, otherwise 0."""
    num_multiplied: int
    """Weights that every token is multiplied with: linears, experts and the head, even if it is shared."""
    num_rotated: int
    """`num_multiplied` with inputs padded for the rotation."""
    num_inner: int
    """`num_multiplied` without the head."""
    num_groupable: int
    """Weights that int4 can hold: those in `num_inner` with whole groups of inputs."""
    hidden: int
    vocab_size: int
    max_model_len: int
    recurrences: tuple[RecurrentShape, ...] = ()
    """Shape of each recurrence, in the order of a pass."""
    scans: tuple[ScanShape, ...] = ()
    """Shape of each selective scan, in the order of a pass."""
    convolutions: tuple[ConvShape, ...] = ()
    """Shape of each causal convolution, in the order of a pass."""
    spec: "ModelSpec | None" = field(default=None, compare=False, repr=False)
    """The model as plain data, if its weights are packed as they are read."""
    listing: "Listing | None" = field(default=None, compare=False, repr=False)
    """The model's files, from before `spec` was read."""
    unused: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Names of the parts of transformers' modules that text does not use, which need not be loaded."""

    @property
    def has_states(self) -> bool:
        """Whether some layers are recurrent."""
        return bool(self.recurrences or self.scans or self.convolutions)

    def packed_bytes(self, kind: WeightKind) -> int:
        """Memory of the multiplied weights when packed; weights that int4 cannot hold are int8."""
        if kind == "int8_rotated":
            return self.num_rotated
        num_int4 = self.num_groupable if kind == "int4" else 0
        return self.num_multiplied - num_int4 + num_int4 * INT4_BITS // 8


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


def check_tokenizers(model: Path, other: Path, role: str) -> None:
    """Raises ValueError if the models in two folders have different vocabularies; `role` describes the second model."""
    if _vocabulary(model) != _vocabulary(other):
        raise ValueError(f"the {role} model {other} has another vocabulary than {model}; use one with the same")


def _vocabulary(folder: Path) -> dict[str, int] | None:
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)).get_vocab() if path.exists() else None


def rotated(weights: int, inputs: int) -> int:
    """Size of a matrix, which has so many weights, after its inputs are padded for the rotation."""
    return weights // inputs * -(-inputs // ROTATED_BLOCK) * ROTATED_BLOCK


def is_unused_head(name: str, config: Any) -> bool:
    """Whether a weight belongs to multi-token prediction heads or to a classification head."""
    text = config.get_text_config()
    if name.startswith(_PREDICTION):
        return True
    layer = re.search(r"\blayers\.(\d{1,9})\.", name)
    num_modules = getattr(text, "num_nextn_predict_layers", None) or 0
    if layer is not None and 0 <= int(layer[1]) - text.num_hidden_layers < num_modules:
        return True
    classifies = str((config.architectures or [""])[0]).endswith(CLASSIFIES)
    return classifies and name in HEAD_NAMES


def is_bare(config: "PretrainedConfig") -> bool:
    """Whether a checkpoint is for embeddings or classification, and may lack the head that makes logits."""
    architecture = str((config.architectures or [""])[0])
    is_decoder = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    return is_decoder or architecture.endswith(CLASSIFIES)


class ClassificationHead:
    """Scores of the classes, from the last token's hidden state."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Weight [classes, hidden], and bias [classes] or None."""
        self._weight: FloatArray = weight.double().numpy()
        self._bias: FloatArray = np.zeros(len(weight)) if bias is None else bias.double().numpy()

    def __call__(self, hidden: FloatArray) -> FloatArray:
        """Hidden state [hidden] -> scores [classes]."""
        scores: FloatArray = (self._weight * hidden).cumsum(-1)[:, -1] + self._bias
        return scores


def load_classification_head(folder: Path, config: "PretrainedConfig") -> ClassificationHead | None:
    """None for other kinds of models. Raises UnsupportedModelError if a classifier's checkpoint has no such head."""
    if not str((config.architectures or [""])[0]).endswith(CLASSIFIES):
        return None
    checkpoint = open_checkpoint(folder)
    names = () if checkpoint is None else checkpoint.shapes
    weight, bias = (checkpoint.tensor(name) if checkpoint and name in names else None for name in HEAD_NAMES)
    hidden = config.get_text_config().hidden_size
    if weight is None or weight.dim() != 2 or weight.shape[1] != hidden:
        raise UnsupportedModelError(f"{folder} is a classifier, but has no weight score.weight of [classes, {hidden}]")
    return ClassificationHead(weight, bias)
