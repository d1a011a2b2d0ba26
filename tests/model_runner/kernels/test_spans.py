"""Attention where the rows of an image see each other, also later ones, by both backends of the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from model_runner.attention.backend import AttentionOptions
from model_runner.attention.cpu import NativeAttention
from model_runner.attention.reference import ReferenceAttention
from model_runner.kernels.library import Kernels
from tests.model_runner.batches import Chunk, make_batch
from tests.model_runner.sequences import BLOCK, Sequences, Sizes, Storage, stored_as

SPANS = {0: [(3, 9), (12, 40), (60, 61)], 1: [(0, 20)]}
"""First place and end of the spans of two sequences."""
LENGTHS = [70, 33]
WHOLE = [[(0, 0, 70), (1, 0, 33)]]
PARTS = [[(0, 0, 3)], [(1, 0, 20), (0, 3, 11)], [(0, 11, 41), (1, 20, 33)], *([(0, p, p + 1)] for p in range(41, 70))]
OPTIONS = AttentionOptions(0.25, sees_spans=True)


def last_of(sequence: int, place: int) -> int:
    """The last position that a row sees."""
    return next((end - 1 for first, end in SPANS.get(sequence, ()) if first <= place < end), place)


def attend(make, sequences, steps, options, storage):
    """Outputs of all rows when the steps run one after the other."""
    attention = make(storage.cache(sequences.shape))
    tables = storage.tables(LENGTHS)
    outputs = [q.new_full((*q.shape[:2], sequences.shape.value_dim), torch.nan) for q in sequences.query]
    for step in steps:
        batch = make_batch([Chunk(range(a, b), a, tables[s]) for s, a, b in step], storage.block_size)
        last = np.array([last_of(s, place) for s, a, b in step for place in range(a, b)])
        rows = (Sequences._rows(t, step) for t in (sequences.query, sequences.key, sequences.value))
        output = attention.forward(0, *rows, options, attention.prepare(replace(batch, span_last=last)))
        for (s, a, b), part in zip(step, output.split([b - a for _, a, b in step]), strict=True):
            outputs[s][a:b] = part
    return outputs


def definition(sequences, sequence, options, dtype):
    """In float64, over the positions from the window's first to the span's last."""
    q = sequences.query[sequence].double().numpy()
    k, v = (stored_as(t[sequence], dtype) for t in (sequences.key, sequences.value))
    group = q.shape[1] // k.shape[1]
    result = np.zeros((*q.shape[:2], v.shape[2]))
    for position, head in np.ndindex(*q.shape[:2]):
        last = last_of(sequence, position) if options.sees_spans else position
        seen = slice(max(0, position - options.window + 1) if options.window else 0, last + 1)
        scores = k[seen, head // group] @ q[position, head] * options.scale
        weights = np.exp(scores - scores.max())
        result[position, head] = weights @ v[seen, head // group] / weights.sum()
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("window", [None, 7, 30])
@pytest.mark.parametrize("is_native", [False, True])
def test_rows_of_a_span_see_its_end(kernels: Kernels, is_native: bool, window: int | None, dtype: torch.dtype) -> None:
    def make(cache):
        return NativeAttention(kernels, cache) if is_native else ReferenceAttention(cache)

    options, sequences = replace(OPTIONS, window=window), Sequences.random(LENGTHS, Sizes(6, 2))
    whole = attend(make, sequences, WHOLE, options, Storage(dtype))
    parts = attend(make, sequences, PARTS, options, Storage(dtype, BLOCK, seed=1))
    causal = attend(make, sequences, WHOLE, replace(options, sees_spans=False), Storage(dtype))
    for index in range(2):
        np.testing.assert_allclose(whole[index].numpy(), definition(sequences, index, options, dtype), atol=4e-6)
        assert torch.equal(whole[index], parts[index])
    assert (whole[0] != causal[0]).any(-1).any(-1).sum() == 5 + 27  # all rows of spans except their last
