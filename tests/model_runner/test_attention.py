"""Paged attention against a float64 definition, and its independence from everything that must not matter."""

import numpy as np
import pytest
import torch

from model_runner.attention.backend import AttentionOptions
from model_runner.attention.reference import ReferenceAttention
from model_runner.kv_cache import KVCache, KVShape
from tests.model_runner.batches import Chunk, make_batch

BLOCK = 16
CPU = torch.device("cpu")


class Sequences:
    """Random queries, keys and values of a few sequences, and ways to compute their attention."""

    def __init__(self, lengths: list[int], heads: int, kv_heads: int, dim: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = KVShape(kv_heads, dim, dim + 8)
        self.query = [torch.randn(n, heads, dim, generator=generator) for n in lengths]
        self.key = [torch.randn(n, kv_heads, dim, generator=generator) for n in lengths]
        self.value = [torch.randn(n, kv_heads, dim + 8, generator=generator) for n in lengths]

    def attend(
        self, steps: list[list[tuple[int, int, int]]], options: AttentionOptions, seed: int = 0
    ) -> list[torch.Tensor]:
        """Outputs of all rows when the steps, lists of (sequence, start, end), run one after the other.

        Blocks are dealt out in a random order.
        """
        cache = KVCache([self.shape], 256, BLOCK, torch.float32, CPU)
        attention = ReferenceAttention(cache)
        free = np.random.default_rng(seed).permutation(256).tolist()
        tables = [[free.pop() for _ in range(-(-len(q) // BLOCK))] for q in self.query]
        outputs = [torch.full((*q.shape[:2], self.shape.value_dim), torch.nan) for q in self.query]
        for step in steps:
            batch = make_batch([Chunk(range(start, end), start, tables[s]) for s, start, end in step], BLOCK)
            rows = attention.forward(
                0,
                torch.cat([self.query[s][a:b] for s, a, b in step]),
                torch.cat([self.key[s][a:b] for s, a, b in step]),
                torch.cat([self.value[s][a:b] for s, a, b in step]),
                options,
                attention.prepare(batch),
            )
            for (s, a, b), part in zip(step, rows.split([b - a for _, a, b in step]), strict=True):
                outputs[s][a:b] = part
        return outputs

    def definition(self, sequence: int, options: AttentionOptions) -> np.ndarray:
        """softmax(cap(scale q k)) v in float64 over the visible positions."""
        q, k, v = (t[sequence].double().numpy() for t in (self.query, self.key, self.value))
        group = q.shape[1] // k.shape[1]
        result = np.zeros((*q.shape[:2], v.shape[2]))
        for position in range(len(q)):
            low = 0 if options.window is None else max(0, position - options.window + 1)
            for head in range(q.shape[1]):
                scores = k[low : position + 1, head // group] @ q[position, head] * options.scale
                if options.softcap is not None:
                    scores = options.softcap * np.tanh(scores / options.softcap)
                weights = np.exp(scores - scores.max())
                result[position, head] = weights @ v[low : position + 1, head // group] / weights.sum()
        return result


OPTIONS = [
    AttentionOptions(0.25),
    AttentionOptions(0.25, window=5),
    AttentionOptions(0.25, window=16),
    AttentionOptions(0.25, window=40, softcap=2.0),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1), (1, 1)])
def test_equals_the_definition(options: AttentionOptions, heads: int, kv_heads: int) -> None:
    sequences = Sequences([1, 70, 16], heads, kv_heads, dim=24)
    outputs = sequences.attend([[(0, 0, 1), (1, 0, 70), (2, 0, 16)]], options)
    for index, output in enumerate(outputs):
        np.testing.assert_allclose(output.numpy(), sequences.definition(index, options), atol=2e-6)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (7, 1), (1, 1)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_do_not_depend_on_chunks_neighbours_or_blocks(
    options: AttentionOptions, heads: int, kv_heads: int, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sequences = Sequences([83, 40, 1, 17], heads, kv_heads, dim=24)
        alone = [sequences.attend([[(s, 0, len(sequences.query[s]))]], options)[s] for s in range(4)]
        crowd = sequences.attend(
            [
                [(0, 0, 7), (3, 0, 1)],
                [(0, 7, 50), (1, 0, 16), (2, 0, 1)],
                [(1, 16, 40), (0, 50, 51)],
                *([(0, p, p + 1)] for p in range(51, 60)),
                *([(0, p, p + 1), (3, p - 59, p - 58)] for p in range(60, 76)),
                [(0, 76, 83)],
            ],
            options,
            seed=1,
        )
        for one, other in zip(alone, crowd, strict=True):
            assert torch.equal(one, other)
    finally:
        torch.set_num_threads(before)


def test_long_rows_are_cut_into_bounded_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences([90], 2, 1, dim=8)
    whole = sequences.attend([[(0, 0, 90)]], OPTIONS[0])[0]
    monkeypatch.setattr("model_runner.attention.reference._PAIRS_AT_ONCE", 3)
    assert torch.equal(whole, sequences.attend([[(0, 0, 90)]], OPTIONS[0])[0])
