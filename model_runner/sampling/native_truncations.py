"""Truncations by the native kernels, on CPU."""

from typing import Final

from torch import Tensor

from model_runner.contract import SAMPLER_ORDER
from model_runner.kernels.library import Kernels
from model_runner.sampling.rows import SamplingRows

_KINDS: Final = {name: kind for kind, name in enumerate(SAMPLER_ORDER)}
"""As SwTruncationKind in kernels/cpu/samewise.h."""


class NativeTruncations:
    """See truncations.truncate: keeps the same tokens, unless a bound is met to the last bit of a double."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """The logits [rows, vocab] that are drawn from: a copy, or the argument itself if nothing changes them."""
        if not rows.truncations:
            return logits
        steps: list[list[tuple[int, float]]] = [[] for _ in range(len(logits))]
        for used in rows.truncations:
            kind = _KINDS[used.name]
            for row, value in zip(used.rows.tolist(), used.values.flatten().tolist(), strict=True):
                steps[row].append((kind, value))
        return self._kernels.truncate(logits.contiguous(), steps)
