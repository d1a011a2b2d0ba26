"""Attention where the rows of an image see each other, by both backends of the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from model_runner.attention.cpu import NativeAttention
from model_runner.kernels.library import Kernels
from tests.model_runner.oracles.attention import ReferenceAttention
from tests.model_runner.sequences import BLOCK, Sequences, Sizes, Storage
from tests.model_runner.spans import OPTIONS, attend, definition

SPANS = {0: [(3, 9), (12, 40), (60, 61)], 1: [(0, 20)]}
LENGTHS = [70, 33]
WHOLE = [[(0, 0, 70), (1, 0, 33)]]
PARTS = [[(0, 0, 3)], [(1, 0, 20), (0, 3, 11)], [(0, 11, 41), (1, 20, 33)], *([(0, p, p + 1)] for p in range(41, 70))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("window", [None, 7, 30])
@pytest.mark.parametrize("is_native", [False, True])
def test_rows_of_a_span_see_its_end(kernels: Kernels, is_native: bool, window: int | None, dtype: torch.dtype) -> None:
    def make(cache):
        return NativeAttention(kernels, cache) if is_native else ReferenceAttention(cache)

    options, sequences = replace(OPTIONS, window=window), Sequences.random(LENGTHS, Sizes(6, 2))
    whole = attend(make, sequences, SPANS, WHOLE, options, Storage(dtype))
    parts = attend(make, sequences, SPANS, PARTS, options, Storage(dtype, BLOCK, seed=1))
    causal = attend(make, sequences, SPANS, WHOLE, replace(options, sees_spans=False), Storage(dtype))
    for index in range(2):
        expected = definition(sequences, SPANS, index, options, dtype)
        np.testing.assert_allclose(whole[index].numpy(), expected, atol=4e-6)
        assert torch.equal(whole[index], parts[index])
    assert (whole[0] != causal[0]).any(-1).any(-1).sum() == 5 + 27  # all rows of spans except their last
