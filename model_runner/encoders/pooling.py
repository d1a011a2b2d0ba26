"""Embeddings of texts from their hidden states, by sentence-transformers' modules.

A text's numbers depend on its own hidden states only. Sums over tokens are computed for each text by itself in float64;
linear layers multiply the vectors of a batch with an exact product.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model_runner.encoders.folder import SentenceModule
from model_runner.modules.activations import EXACT, gelu
from model_runner.modules.linears import OneDNNPacker
from model_runner.refusal import UnsupportedModelError
from model_runner.scoring.pooler import SHORTEST_NORM
from model_runner.weights.packed_weight import Product
from model_runner.weights.safetensors_files import SafetensorsCheckpoint

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "GELU": gelu,
    **{kind.__name__: function for kind, function in EXACT.items() if kind.__module__.startswith("torch.nn")},
}
"""Exact activations by the names of torch's classes."""


class SentencePooling:
    """Applies the modules of an encoder's folder."""

    def __init__(self, modules: Sequence[SentenceModule], hidden_size: int) -> None:
        """Reads the weights of modules; raises UnsupportedModelError if they are not there or do not fit."""
        self._modes = [mode for module in modules for mode in module.modes]
        self._steps: list[Callable[[Tensor], Tensor]] = []
        self.size = hidden_size * len(self._modes)
        """Numbers in a vector."""
        packer = OneDNNPacker()
        for module in modules:
            if module.kind == "Dense":
                dense = _Dense(module, self.size, packer)
                self._steps.append(dense)
                self.size = dense.outputs
            elif module.kind == "LayerNorm":
                self._steps.append(_layer_norm(module, self.size))
            elif module is not modules[-1] and module.kind == "Normalize":  # each request normalises its final vector
                self._steps.append(_normalize)

    @torch.inference_mode()
    def __call__(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        """The vectors [size] float64 of texts with the hidden states [tokens, hidden]; the last norm is left out."""
        pooled = [torch.cat([_pool(states.double(), mode) for mode in self._modes]) for states in hidden]
        if not self._steps:
            return pooled
        vectors = torch.stack(pooled).float()
        for step in self._steps:
            vectors = step(vectors)
        return list(vectors.double())


def _pool(states: Tensor, mode: str) -> Tensor:
    """One vector [hidden] of the hidden states [tokens, hidden] of a text."""
    if mode == "cls":
        return states[0]
    if mode == "lasttoken":
        return states[-1]
    if mode == "max":
        return states.amax(0)
    if mode == "weightedmean":
        weights = torch.arange(1, len(states) + 1, dtype=states.dtype)
        return (states * weights[:, None]).cumsum(0)[-1] / weights.sum()
    total = states.cumsum(0)[-1]
    return total / (len(states) if mode == "mean" else len(states) ** 0.5)


def _normalize(vectors: Tensor) -> Tensor:
    """Each row [n, size] divided by its Euclidean norm."""
    return vectors / vectors.square().cumsum(-1)[:, -1:].sqrt().clamp(min=SHORTEST_NORM)


class _Dense:
    """A linear layer with an activation and perhaps a residual connection."""

    def __init__(self, module: SentenceModule, inputs: int, packer: OneDNNPacker) -> None:
        checkpoint = _open(module.folder)
        weight = _tensor(checkpoint, module.folder, "linear.weight")
        if weight is None or weight.dim() != 2 or weight.shape[1] != inputs:
            raise UnsupportedModelError(f"{module.folder} has no weight linear.weight of [outputs, {inputs}]")
        if module.activation not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"{module.folder} has the activation {module.activation[:80]!r}; supported are "
                f"{', '.join(sorted(_ACTIVATIONS))}"
            )
        self.outputs = len(weight)
        self._product = packer(weight)
        self._bias = _tensor(checkpoint, module.folder, "linear.bias")
        self._activate = _ACTIVATIONS[module.activation]
        self._adds_input = module.adds_input
        residual = _tensor(checkpoint, module.folder, "residual.weight")
        self._residual: Product | None = None if residual is None else packer(residual)

    def __call__(self, vectors: Tensor) -> Tensor:
        output = self._activate(self._product(vectors, self._bias))
        if not self._adds_input:
            return output
        return output + (vectors if self._residual is None else self._residual(vectors, None))


def _layer_norm(module: SentenceModule, size: int) -> Callable[[Tensor], Tensor]:
    """A layer norm of each vector [n, size]."""
    checkpoint = _open(module.folder)
    weight, bias = (_tensor(checkpoint, module.folder, f"norm.{name}") for name in ("weight", "bias"))
    if any(one is None or one.shape != (size,) for one in (weight, bias)):
        raise UnsupportedModelError(f"{module.folder} has no weights norm.weight and norm.bias of [{size}]")
    return lambda vectors: F.layer_norm(vectors, (size,), weight, bias)


def _open(folder: Path) -> SafetensorsCheckpoint:
    if not (folder / "model.safetensors").is_file():
        raise UnsupportedModelError(
            f"{folder} has no model.safetensors; save the model with a current version of sentence-transformers"
        )
    return SafetensorsCheckpoint(folder)


def _tensor(checkpoint: SafetensorsCheckpoint, folder: Path, name: str) -> Tensor | None:
    return checkpoint.tensor(name).float().contiguous() if name in checkpoint.shapes else None
