"""From processed logits to the tokens of all rows that are not greedy."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from model_runner.kernels.library import Kernels
from model_runner.sampling.noise import GumbelMax
from model_runner.sampling.picks import MaskedRows
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
        drawn = (*rows.whole, *rows.truncated)
        keys = np.array([rows.key(row) for row in drawn], dtype=np.uint64)
        temperatures = np.ones(len(drawn))
        if self.divides:
            temperatures[: len(rows.whole)] = [rows.sampling[row].temperature for row in rows.whole]
        tokens = self._kernels.pick(scores.contiguous(), keys, temperatures, drawn).tolist()
        return dict(zip(drawn, tokens, strict=True))


def pick(kernels: Kernels, logits: Tensor, keys: Tensor, temperatures: Tensor) -> Tensor:
    """By the native kernels: see models.target.Pick."""
    return kernels.pick(logits.contiguous(), keys.numpy().view(np.uint64), temperatures.numpy())


def pick_allowed(kernels: Kernels, logits: Tensor, masked: MaskedRows) -> list[int]:
    """By the native kernels: see picks.PickAllowed."""
    tokens: list[int] = kernels.pick(
        logits.contiguous(), masked.keys, masked.temperatures, masked.rows, masked.masks
    ).tolist()
    return tokens


def take(scores: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows, in ascending order; not a copy if they are all."""
    return scores if len(rows) == len(scores) else scores.index_select(0, torch.tensor(rows, device=scores.device))
