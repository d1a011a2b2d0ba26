"""The int8 linear with rotated rows in numpy, with the rotation matrix itself in float64."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tests.model_runner.kernels.int8_oracle import Floats

LEVELS = 127
"""The largest integer of a row and of a weight."""
SMALLEST_BLOCK = 64
_SMALLEST = 1e-30  # a row that has only smaller numbers when it is rotated counts as zero
_ROTATING = 2e-6  # of the largest number: how far off each is when it is rotated in float32


def blocks(inputs: int) -> list[int]:
    """The largest powers of two that add up to the inputs, which are padded to a multiple of the smallest."""
    padded = -(-inputs // SMALLEST_BLOCK) * SMALLEST_BLOCK
    return [1 << bit for bit in reversed(range(padded.bit_length())) if padded >> bit & 1]


def hadamard(size: int) -> Floats:
    """Sylvester's matrix [size, size] of 1 and -1; its rows are orthogonal."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron([[1.0, 1.0], [1.0, -1.0]], matrix)
    return matrix


def rotation(inputs: int) -> Floats:
    """The matrix [padded inputs, inputs]: orthogonal except for a factor that keeps numbers small."""
    sizes = blocks(inputs)
    matrix, start = np.zeros((sum(sizes), sum(sizes))), 0
    for size in sizes:
        matrix[start : start + size, start : start + size] = hadamard(size) / np.sqrt(size * sizes[0])
        start += size
    return matrix[:, :inputs]


@dataclass(frozen=True, slots=True)
class Rotated:
    """Quantised rows or weights [n, padded inputs]."""

    integers: Floats
    doubtful: Floats
    """By how much an integer may differ: 1 where float32 may fall to the other side of a half."""
    scales: Floats  # [n, 1]


def quantise(vectors: Tensor) -> Rotated:
    """Each row's largest magnitude becomes LEVELS."""
    rotated: npt.NDArray[np.float64] = vectors.double().numpy() @ rotation(vectors.shape[1]).T
    highest = np.abs(rotated).max(axis=1, keepdims=True)
    highest[highest < _SMALLEST] = 0
    scaled = np.divide(rotated * LEVELS, highest, out=np.zeros_like(rotated), where=highest > 0)
    to_half = np.abs(scaled - np.floor(scaled) - 0.5)
    return Rotated(np.rint(scaled), (to_half < LEVELS * _ROTATING).astype(np.float64), highest / LEVELS)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Floats, Floats]:
    """The product [n, outputs] of rotated and quantised rows [n, inputs] and weight [outputs, inputs].

    And how far off float32 may be.
    """
    x, w = quantise(rows), quantise(weight)
    scales = x.scales * w.scales.T * blocks(rows.shape[1])[0]  # the factor of the matrix is taken out again
    product = x.integers @ w.integers.T * scales
    either = x.doubtful @ np.abs(w.integers).T + np.abs(x.integers) @ w.doubtful.T + x.doubtful @ w.doubtful.T
    added = np.zeros(1) if bias is None else bias.double().numpy()
    error = either * scales + 3 * _ROTATING * (np.abs(product) + np.abs(added))
    return product + added, error + np.finfo(np.float32).smallest_subnormal
