"""On the CUDA path, in exact mode: the logits of a token are the same, bit for bit, in whatever step they come."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from model_runner.kv_cache import KVCache
from tests.engine.conftest import Harness
from tests.model_runner.batches import Chunk, make_batch
from tests.model_runner.triton.tiny_engines import BLOCK, VOCAB, CudaHarness, TinyEngines

LONG = [7, 3, 19, 44, 3, 19, 8, 30, 30, 5, 11, 2, 40, 23, 9, 17, 6, 33, 21]
SHORT = [12, 3, 19, 44, 41]
PLACES = [[3, 0], [5, 1]]
OTHER_PLACES = [[2, 7], [6, 3]]
TREE = [9, 14, 9, 30, 7]
PARENTS = [-1, 0, 0, 1, -1]

Step = Sequence[tuple[int, int, int]]
"""Each (sequence, start, end)."""


@dataclass
class Model:
    """A model on the CUDA path, and what it says of each sequence when it is alone, whole, and no graph is used."""

    harness: CudaHarness
    long: Tensor
    short: Tensor

    @property
    def cache(self) -> KVCache:
        """The model's own."""
        return cache_of(self.harness)

    def run(self, steps: Sequence[Step], places: list[list[int]] = PLACES) -> list[Tensor]:
        """Logits of both sequences, computed in these steps."""
        logits = [torch.full((len(tokens), VOCAB), torch.nan) for tokens in (LONG, SHORT)]
        for step in steps:
            chunks = [Chunk((LONG, SHORT)[s][start:end], start, places[s]) for s, start, end in step]
            rows = forward(self.harness, chunks).split([end - start for _, start, end in step])
            for (s, start, end), of_chunk in zip(step, rows, strict=True):
                logits[s][start:end] = of_chunk
        return logits

    def check(self, steps: Sequence[Step], num_replays: int, places: list[list[int]] = PLACES) -> None:
        """The steps give what each sequence gets alone, so many of them by graphs; the cache holds NaN before."""
        fill(self.cache, torch.nan)
        before = self.harness.platform.num_replays
        long, short = self.run(steps, places)
        assert torch.equal(long, self.long)
        assert torch.equal(short, self.short)
        assert self.harness.platform.num_replays - before == num_replays


def cache_of(harness: Harness) -> KVCache:
    cache = harness.runner._caches[0]
    assert isinstance(cache, KVCache)
    return cache


def fill(cache: KVCache, value: float) -> None:
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(value)


def forward(harness: Harness, chunks: Sequence[Chunk]) -> Tensor:
    return harness.runner._target.forward(make_batch(chunks, BLOCK)).clone()


@pytest.fixture(params=["llama", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tiny_engines: TinyEngines) -> Iterator[Model]:
    harness = tiny_engines.cuda(request.param)
    yield Model(harness, *alone(harness))
    fill(cache_of(harness), 0)


_alone: dict[int, list[Tensor]] = {}


def alone(harness: CudaHarness) -> list[Tensor]:
    """Logits of each sequence alone, computed once."""
    if id(harness) not in _alone:
        with harness.without_graphs():
            _alone[id(harness)] = [forward(harness, [Chunk(tokens, 0, [0, 1])]) for tokens in (LONG, SHORT)]
    return _alone[id(harness)]


def test_the_comparison_can_fail(model: Model) -> None:
    assert model.long.isfinite().all()
    assert not torch.equal(model.long[1:3], model.short[1:3])  # the same tokens after others
    assert len({tuple(row.tolist()) for row in (*model.long, *model.short)}) == len(LONG) + len(SHORT)


STEPS = {
    "both whole": ([[(0, 0, 19), (1, 0, 5)]], 0),
    "chunks by graphs of every size": (
        [
            [(1, 0, 1), (0, 0, 7)],
            [(0, 7, 8)],
            [(0, 8, 9), (1, 1, 2)],
            [(1, 2, 3), (0, 9, 12)],
            [(1, 3, 4), (0, 12, 19)],
            [(1, 4, 5)],
        ],
        6,
    ),
    "chunks with and without graphs": ([[(0, 0, 10)], [(0, 10, 13)], [(1, 0, 5), (0, 13, 19)]], 1),
    "token by token": (
        [[(0, 0, 14), (1, 0, 1)], *([(0, 14 + i, 15 + i), (1, 1 + i, 2 + i)] for i in range(4)), [(0, 18, 19)]],
        5,
    ),
}


@pytest.mark.parametrize("steps", STEPS)
def test_in_any_step(model: Model, steps: str) -> None:
    model.check(*STEPS[steps], OTHER_PLACES if steps == "both whole" else PLACES)


def test_a_tree_is_computed_as_the_chains_that_it_stands_for(model: Model) -> None:
    """In the largest graph, which another choice fills up."""
    tree = Chunk(TREE, len(SHORT), PLACES[1], PARENTS)
    paths = tree.paths()
    fill(model.cache, torch.nan)
    forward(model.harness, [Chunk(SHORT, 0, PLACES[1])])
    before = model.harness.platform.num_replays
    rows = forward(model.harness, [Chunk(LONG[:3], 0, PLACES[0]), tree])
    assert model.harness.platform.num_replays == before + 1
    assert torch.equal(rows[:3], model.long[:3])
    for node in (2, 3):
        chain = [*SHORT, *(TREE[token] for token in paths[node])]
        alone = forward(model.harness, [Chunk(chain, 0, OTHER_PLACES[0])])
        assert torch.equal(rows[[3 + token for token in paths[node]]], alone[len(SHORT) :])


def test_rows_that_fill_up_a_graph_leave_no_trace_in_the_cache(model: Model) -> None:
    fill(model.cache, 7.0)
    forward(model.harness, [Chunk(LONG[:5], 0, PLACES[0])])  # more rows in the same graph
    fill(model.cache, 7.0)
    forward(model.harness, [Chunk(LONG[:3], 0, PLACES[0]), Chunk(SHORT[:2], 0, PLACES[1])])
    assert model.harness.platform.num_replays
    for keys, values in zip(model.cache.keys, model.cache.values, strict=True):
        changed = (values != 7).any(-1)  # [blocks, heads, places]
        assert torch.equal(changed, (keys != 7).any(-2))
        assert changed.nonzero().tolist() == [[3, 0, 0], [3, 0, 1], [3, 0, 2], [5, 0, 0], [5, 0, 1]]


def test_nothing_is_left_of_a_larger_step_before(model: Model) -> None:
    """Nor of NaN in it: all rows of a graph have failed before it is used for fewer."""
    for size, count in ((8, 5), (4, 3)):
        fill(model.cache, torch.nan)
        assert forward(model.harness, [Chunk(LONG[:size], BLOCK, PLACES[0])]).isnan().all()  # after a block of NaN
        rows = forward(model.harness, [Chunk(SHORT[:count], 0, PLACES[1])])
        assert torch.equal(rows, model.short[:count])


def test_after_a_prefix_that_takes_several_splits(tiny_engines: TinyEngines) -> None:
    """With keys and values that somebody else has computed."""
    harness = tiny_engines.cuda("llama")
    generator = torch.Generator().manual_seed(0)
    blocks, start = list(range(33)), 32 * BLOCK - 3
    for tensor in (*cache_of(harness).keys, *cache_of(harness).values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    with harness.without_graphs():
        whole = forward(harness, [Chunk(SHORT, start, blocks)])
        beside = forward(harness, [Chunk(SHORT[:2], 0, [40]), Chunk(SHORT, start, blocks), Chunk(LONG[:9], 0, [41])])
    pieces = [forward(harness, [Chunk(LONG[:1], 0, [40]), Chunk(SHORT[:2], start, blocks)])[1:]]
    pieces += [forward(harness, [Chunk(SHORT[i : i + 1], start + i, blocks)]) for i in range(2, 5)]
    assert torch.equal(beside[2:7], whole)
    assert torch.equal(torch.cat(pieces), whole)
    fill(cache_of(harness), 0)
