"""The head of a checkpoint that was trained to classify, beside which the model is loaded as one that generates."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

from model_runner.models.refusal import UnsupportedModelError

FloatArray = npt.NDArray[np.float64]

CLASSIFIES = "ForSequenceClassification"
"""How classes of such models are named."""
HEAD_NAMES = ("score.weight", "score.bias")
"""As transformers calls them for decoder-only models."""


class ClassificationHead:
    """Scores of classes from the hidden state of a last token."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Weight [classes, hidden], and bias [classes] if there is one."""
        self._weight: FloatArray = weight.double().numpy()
        self._bias: FloatArray = np.zeros(len(weight)) if bias is None else bias.double().numpy()

    def __call__(self, hidden: FloatArray) -> FloatArray:
        """[classes] of [hidden]."""
        scores: FloatArray = (self._weight * hidden).cumsum(-1)[:, -1] + self._bias
        return scores


def load_classification_head(folder: Path, config: PretrainedConfig) -> ClassificationHead | None:
    """None for a model of another kind. Raises UnsupportedModelError if the checkpoint has no such head."""
    if not str((config.architectures or [""])[0]).endswith(CLASSIFIES):
        return None
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in HEAD_NAMES if name in file.keys()}  # noqa: SIM118
    weight, bias = (tensors.get(name) for name in HEAD_NAMES)
    hidden = config.get_text_config().hidden_size
    if weight is None or weight.dim() != 2 or weight.shape[1] != hidden:
        raise UnsupportedModelError(f"{folder} is to classify, and has no weight score.weight of [classes, {hidden}]")
    return ClassificationHead(weight, bias)
