"""From processed logits to the tokens of all rows that are not greedy."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from model_runner.kernels.library import Kernels
from model_runner.sampling.noise import GumbelMax
from model_runner.sampling.rows import SamplingRows
from model_runner.sampling.truncations import compact


class Draw(Protocol):
    """Draws tokens. Which implementation runs is a matter of speed only: on CPU all draw the same, bit for bit."""

    divides: bool
    """Whether the rows of `rows.whole` are to come without their temperature: the draw divides by it."""

    def __call__(self, scores: Tensor, rows: SamplingRows) -> dict[int, int]:
        """The token of each row in `rows.whole` and `rows.truncated`.

        Each of these rows in `scores`, [rows, vocab] float32, has at least one finite entry and none above.
        """
        ...


class TorchDraw:
    """On any device."""

    divides = False

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._noise = GumbelMax(vocab_size, device)

    def __call__(self, scores: Tensor, rows: SamplingRows) -> dict[int, int]:
        tokens: dict[int, int] = {}
        if rows.whole:
            keys = [rows.key(row) for row in rows.whole]
            tokens.update(zip(rows.whole, self._noise(take(scores, rows.whole), keys), strict=True))
        if rows.truncated:
            keys = [rows.key(row) for row in rows.truncated]
            left = take(scores, rows.truncated)
            columns, real = compact(left > -math.inf)
            left = left.gather(1, columns).masked_fill(~real, -math.inf)
            tokens.update(zip(rows.truncated, self._noise(left, keys, columns), strict=True))
        return tokens


class NativeDraw:
    """By the native kernels, on CPU. What a truncation has removed costs next to nothing there, so nothing is cut."""

    def __init__(self, kernels: Kernels, divides: bool) -> None:
        self.divides = divides
        self._kernels = kernels

    def __call__(self, scores: Tensor, rows: SamplingRows) -> dict[int, int]:
        draws = [
            (row, rows.key(row), rows.sampling[row].temperature if self.divides else 1.0) for row in rows.whole
        ] + [(row, rows.key(row), 1.0) for row in rows.truncated]
        tokens = self._kernels.gumbel_max(scores.contiguous(), draws)
        return dict(zip((*rows.whole, *rows.truncated), tokens, strict=True))


def take(scores: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows, in ascending order; not a copy if they are all."""
    return scores if len(rows) == len(scores) else scores.index_select(0, torch.tensor(rows, device=scores.device))
