"""Norms of any transformers model whose result for a row does not depend on the other rows, on CUDA.

A model's own RMS norm takes a mean with torch, whose reduction on CUDA shares out a row among more threads the fewer
rows there are: its last bit varies with the batch. (nn.LayerNorm and nn.RMSNorm do not: their kernels give every row a
block of its own, of a fixed size.)
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model_runner.kernels.triton.norm import rms_norm

_TOLERANCE = 1e-4
"""Of float32 arithmetic; what is computed in half precision, or in another way, differs by more."""
_INVARIANT = (nn.LayerNorm, nn.RMSNorm)


class CudaNorm(nn.Module):
    """Stands in for a norm of the last dimension."""

    def __init__(self, factor: Tensor, eps: float, *, is_centred: bool) -> None:
        super().__init__()
        self._factor = factor
        self._eps = eps
        self._is_centred = is_centred

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., width] -> the same shape and type."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return rms_norm(rows, self._factor, self._eps, is_centred=self._is_centred).view(hidden_states.shape)


@dataclass(frozen=True, slots=True)
class ReplacedNorms:
    """What `replace_norms` did."""

    replaced: int
    varying: frozenset[str]
    """Classes of the norms that stay and may vary with the batch."""


def replace_norms(model: nn.Module) -> ReplacedNorms:
    """Replace every norm that is found to compute x / sqrt(mean(x²) + eps) * factor.

    Candidates are modules of a class whose name ends in "Norm", with a one-dimensional weight and an eps. The factor
    can be the weight or 1 + weight (Gemma), and x can be taken without its mean (Cohere): which of these it is, a trial
    on random rows in float32 tells.
    """
    replaced, varying = 0, set()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not type(child).__name__.endswith("Norm") or isinstance(child, (CudaNorm, *_INVARIANT)):
                continue
            if (norm := _recognised(child)) is None:
                varying.add(type(child).__name__)
            else:
                setattr(parent, name, norm)
                replaced += 1
    return ReplacedNorms(replaced, frozenset(varying))


def _recognised(module: nn.Module) -> CudaNorm | None:
    """What computes the same as the module, or None."""
    weight = module._parameters.get("weight")
    eps = next(
        (own for name in ("eps", "variance_epsilon") if isinstance(own := getattr(module, name, None), float)), None
    )
    if weight is None or weight.dim() != 1 or eps is None or set(module._parameters) != {"weight"}:
        return None
    generator = torch.Generator().manual_seed(0)
    # Off centre, and rows of very different sizes, so that the mean and eps show.
    rows = torch.randn(4, len(weight), generator=generator) + 0.5
    rows = (rows * torch.tensor([[1e-3], [0.1], [1.0], [30.0]])).to(weight.device)
    try:
        answer = copy.deepcopy(module).float()(rows)
    except (TypeError, ValueError, RuntimeError):
        return None  # it takes something else
    own = weight.detach().float()
    for factor in (own, 1 + own):
        for is_centred in (False, True):
            if _is_near(answer, _norm(rows, factor, eps, is_centred=is_centred)):
                return CudaNorm(factor, eps, is_centred=is_centred)
    return None


def _norm(rows: Tensor, factor: Tensor, eps: float, *, is_centred: bool) -> Tensor:
    """What CudaNorm is to compute, in float64."""
    x = rows.double()
    if is_centred:
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * factor.double()


def _is_near(answer: object, expected: Tensor) -> bool:
    if not isinstance(answer, Tensor) or answer.shape != expected.shape:
        return False
    return torch.allclose(answer.double(), expected, rtol=_TOLERANCE, atol=_TOLERANCE)
