"""Which steps are replayed from graphs, and what is read of them, with a model that only names its inputs."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_runner.attention.triton import TritonAttention
from model_runner.batch import Batch
from model_runner.cuda.graphs import GraphedTarget, graph_sizes
from model_runner.features import LAST, Feature
from model_runner.kv_cache import KVCache, KVShape
from model_runner.modules.target import TokenRows
from model_runner.sampling.rows import NO_EARLY_TOKENS, EarlySamplingPlan, EarlyTokens
from tests.model_runner.batches import Chunk, make_batch
from tests.model_runner.triton.recorded_graphs import RecordedGraphs

SIZES = (2, 4, 8)
EAGER = EarlyTokens((77,), frozenset({0}))
CPU = torch.device("cpu")


class NamingModel:
    """Logits (token, position, slot), features (token) and picks (key + temperature) of rows, not a model's own."""

    def __init__(self) -> None:
        self.eager: list[tuple[Batch, Collection[Feature], EarlySamplingPlan | None]] = []
        self.is_settled = False
        self.picked = torch.zeros(8, dtype=torch.int64)
        self._taken: dict[Feature, Tensor] = {}

    def settle(self) -> None:
        self.is_settled = True

    def run(self, rows: TokenRows, metadata: Any) -> Tensor:
        self._taken = {LAST: rows.tokens.unsqueeze(1) * 1}
        chosen = rows.logits_index
        return torch.stack(
            [rows.tokens[chosen], rows.positions[chosen], metadata.slots[: len(rows.tokens)][chosen]], 1
        ).float()

    def pick(self, logits: Tensor, keys: Tensor, temperatures: Tensor) -> Tensor:
        return keys + temperatures.long()

    def features(self) -> dict[Feature, Tensor]:
        taken, self._taken = self._taken, {}
        return taken

    def picks(self) -> Callable[[], EarlyTokens]:
        return lambda: EAGER

    def forward(
        self, batch: Batch, also: Collection[Feature] = (), picks: EarlySamplingPlan | None = None, follows: None = None
    ) -> Tensor:
        self.eager.append((batch, also, picks))
        self._taken = dict.fromkeys(also, torch.zeros(1, 1))
        return torch.zeros(len(batch.logits_index), 3)


class Graphed:
    """A target with graphs, and what it consists of."""

    def __init__(self, *, exact: bool = True, is_settled: bool = True) -> None:
        self.model, self.graphs = NamingModel(), RecordedGraphs()
        cache = KVCache([KVShape(1, 16, 16)], 16, 16, torch.float32, CPU, whole_keys=True)
        attention = TritonAttention(cache, exact=exact, num_heads=2, num_programs=2)
        self.target = GraphedTarget(self.model, attention, SIZES, self.graphs, 128)  # type: ignore[arg-type]
        if is_settled:
            self.target.settle()


def batch_of(*tokens: Sequence[int]) -> Batch:
    """Choices with these tokens, each in a block of its own."""
    return make_batch([Chunk(of_one, 0, [3 + index]) for index, of_one in enumerate(tokens)], 16)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 100, 256, 500, 512])
def test_every_count_up_to_the_most_has_a_graph_and_few_rows_are_wasted(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert len(sizes) == 1 or sizes[-2] < most <= sizes[-1]
    for count in range(1, most + 1):
        size = min(size for size in sizes if size >= count)
        assert size - count < 8 if count <= 64 else size - count < count / 4


def test_there_is_a_largest_graph() -> None:
    assert graph_sizes(10_000) == graph_sizes(512)


def test_logits_features_and_picks_are_those_of_the_step_whatever_came_before() -> None:
    graphed = Graphed()
    assert graphed.model.is_settled
    everyone = frozenset({0, 1})
    for tokens in ([[9, 8, 7], [6, 5, 4, 3, 2]], [[11, 12], [13]], [[5], [21]], [[31]], [[1, 2, 3, 4, 5, 6]]):
        batch = batch_of(*tokens)
        count = len(batch.tokens)
        plan = EarlySamplingPlan(np.arange(count, dtype=np.uint64) + 50, np.full(count, 100.0), everyone)
        logits = graphed.target.forward(batch, (), plan)
        slots = batch.block_of * 16 + batch.offset_of
        assert logits.T.tolist() == [batch.tokens.tolist(), batch.positions.tolist(), slots.tolist()]
        assert graphed.target.features()[LAST].squeeze(1).tolist() == batch.tokens.tolist()
        assert graphed.target.picks()() == EarlyTokens([150 + row for row in range(count)], everyone)
        graphed.target.forward(batch)
        assert graphed.target.picks()() == NO_EARLY_TOKENS  # without a plan, though the graph finds some
    assert graphed.graphs.num_replays == 10
    assert not graphed.model.eager


def test_logits_of_some_rows() -> None:
    graphed = Graphed()
    some = replace(batch_of([9, 8, 7], [6, 5]), logits_index=np.array([2, 4]))
    assert graphed.target.forward(some)[:, 0].tolist() == [7, 5]
    assert graphed.target.features()[LAST].shape == (5, 1)


UNUSUAL = {
    "more rows than the largest graph": (Graphed, batch_of(list(range(9))), ()),
    "no rows": (Graphed, batch_of(), ()),
    "features of one step": (Graphed, batch_of([1, 2]), ("layers.0",)),
    "before the capture": (lambda: Graphed(is_settled=False), batch_of([1]), ()),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_has_no_graph_runs_as_it_is(name: str) -> None:
    make, batch, also = UNUSUAL[name]
    graphed = make()
    if graphed.model.is_settled:
        graphed.target.forward(batch_of([1]))
    num_replays = graphed.graphs.num_replays
    plan = EarlySamplingPlan.greedy(len(batch.tokens))
    graphed.target.forward(batch, also, plan)
    assert graphed.graphs.num_replays == num_replays
    assert graphed.model.eager == [(batch, also, plan)]
    assert graphed.target.picks()() == EAGER
    assert set(graphed.target.features()) == set(also)


def test_plans_with_other_tiles_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in fast mode, where a prompt has larger ones."""
    monkeypatch.setattr("model_runner.attention.triton._DECODED_TOKENS", 3)
    graphed = Graphed(exact=False)
    graphed.target.forward(batch_of([1, 2, 3], [4]))
    assert (graphed.graphs.num_replays, len(graphed.model.eager)) == (1, 0)
    graphed.target.forward(batch_of([1, 2, 3, 5]))
    assert (graphed.graphs.num_replays, len(graphed.model.eager)) == (1, 1)
