"""Numbers from hidden states, against their definition in float64; parts in any sizes, and values that are none."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from model_runner.batch import NO_TOKENS, PooledRows
from model_runner.contract import Pooling, SamplingParams
from model_runner.features import LAST
from model_runner.sampling.rows import EarlySamplingPlan
from model_runner.scoring.pooler import NOT_FINITE, ClassificationHead, Pooler
from model_runner.scoring.transforms import RawStep
from model_runner.speculative.verify import Verdict
from model_runner.state import RunningChoice

NUM_TOKENS, WIDTH = 700, 24


def pooled(
    hidden: torch.Tensor, pooling: Pooling, ends: Sequence[int], head: ClassificationHead | None = None
) -> Verdict:
    """The verdict on a choice that is computed in steps with these ends, together with another plain choice."""
    pool, sampling = Pooler(head), SamplingParams(pooling=pooling)
    assert pool.needs([SamplingParams(), sampling]) == {LAST}
    choice = RunningChoice(0, [0] * len(hidden), len(hidden), 0, sampling, blocks=array("i"))
    verdicts: dict[int, Verdict] = {}
    for end in ends:
        assert not verdicts
        start = choice.num_computed
        rows = PooledRows(1, pooling, slice(2, 2 + end - start), len(hidden), end == len(hidden))
        beside = torch.full((2, WIDTH), 1e9)
        features = {LAST: torch.cat([beside, hidden[start:end]])}
        batch = replace(NO_TOKENS, pooled=[rows])
        step = RawStep(batch, [SamplingParams(), sampling], torch.empty(0, 3), features, EarlySamplingPlan.greedy(0))
        verdicts = pool(step, [choice, choice])
        choice.num_computed = min(end, len(hidden) - 1)
    return verdicts[1]


def numbers(verdict: Verdict) -> np.ndarray:
    assert verdict.error is None
    return np.frombuffer(verdict.pooled, "<f4")


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, WIDTH)


def test_a_mean_is_the_same_in_any_parts(hidden: torch.Tensor) -> None:
    whole = pooled(hidden, Pooling("mean"), [NUM_TOKENS])
    np.testing.assert_allclose(numbers(whole), hidden.double().mean(0).numpy(), rtol=1e-6, atol=1e-8)
    rng = np.random.default_rng(1)
    for _ in range(20):
        ends = sorted(rng.choice(np.arange(1, NUM_TOKENS), size=rng.integers(1, 30), replace=False).tolist())
        assert pooled(hidden, Pooling("mean"), [*ends, NUM_TOKENS]).pooled == whole.pooled
    assert pooled(hidden[:-1], Pooling("mean"), [NUM_TOKENS - 1]).pooled != whole.pooled


def test_the_last_state_cut_and_normalised(hidden: torch.Tensor) -> None:
    assert numbers(pooled(hidden, Pooling("last"), [5, NUM_TOKENS])).tolist() == hidden[-1].tolist()
    cut = numbers(pooled(hidden, Pooling("last", dimensions=9, normalizes=True), [NUM_TOKENS]))
    expected = hidden[-1, :9].double() / hidden[-1, :9].double().norm()
    np.testing.assert_allclose(cut, expected.numpy(), rtol=1e-7)
    zero = torch.zeros(1, WIDTH)
    assert numbers(pooled(zero, Pooling("last", normalizes=True), [1])).tolist() == [0.0] * WIDTH


def test_a_classification_head(hidden: torch.Tensor) -> None:
    head = torch.nn.Linear(WIDTH, 3).double()
    scores = numbers(
        pooled(hidden, Pooling("classes"), [NUM_TOKENS], ClassificationHead(head.weight.data, head.bias.data))
    )
    np.testing.assert_allclose(scores, head(hidden[-1].double()).detach().numpy(), rtol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [0, 300, NUM_TOKENS - 1])
def test_what_is_not_finite_has_no_mean(hidden: torch.Tensor, bad: float, at: int) -> None:
    hidden[at, 3] = bad
    for ends in ([NUM_TOKENS], [200, 400, NUM_TOKENS]):
        assert pooled(hidden, Pooling("mean"), ends).error == NOT_FINITE
    assert (pooled(hidden, Pooling("last"), [NUM_TOKENS]).error == NOT_FINITE) == (at == NUM_TOKENS - 1)


def test_values_beyond_all_reason_do_not_wrap_round() -> None:
    large = numbers(pooled(torch.full((NUM_TOKENS, WIDTH), 1e30), Pooling("mean"), [NUM_TOKENS]))
    assert (large > 1e5).all()
