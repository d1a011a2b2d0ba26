"""The matrix: every method with every feature gives the tokens and logprobs of no speculation."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from bench.speculation_matrix import FEATURES, Feature, Matrix
from model_runner.contract import Contrastive, DoLa, SamplingParams
from tests.engine.conftest import Harness
from tests.engine.tiny_heads import write_eagle, write_eagle3

METHODS = [
    "auto", "draft_model", "eagle", "early_exit", "hydra", "lookahead", "medusa", "ngram", "prediction", "suffix"
]  # fmt: skip
_DOLA = SamplingParams(temperature=0.8, logprobs=1, seed=5, dola=DoLa((0, 1, 2)))
_CONTRASTIVE = SamplingParams(temperature=0.8, logprobs=1, seed=5, contrastive=Contrastive())
ALL_FEATURES = FEATURES | {
    "DoLa": Feature(_DOLA),
    "contrastive": Feature(_CONTRASTIVE),
    "contrastive, greedy, preemption": Feature(
        replace(_CONTRASTIVE, temperature=0.0), chunk=64, is_short_of_blocks=True
    ),
    "contrastive, n = 3, prefix hit": Feature(_CONTRASTIVE, num_choices=3, is_warm=True, chunk=32),
}
"""The amateur is the draft model."""


@pytest.fixture(scope="module")
def drafting(load_drafting: Callable[..., Harness]) -> Iterator[Harness]:
    harness = load_drafting(write_eagle3)
    yield harness
    harness.forget()


@pytest.fixture(scope="module")
def matrix(drafting: Harness) -> Matrix:
    return drafting.matrix(ALL_FEATURES)


def test_all_methods_are_here(drafting: Harness) -> None:
    assert sorted(drafting.runner.info.speculation_methods) == METHODS


@pytest.mark.parametrize("feature", ALL_FEATURES)
@pytest.mark.parametrize("method", METHODS)
def test_equal_to_no_speculation(matrix: Matrix, method: str, feature: str) -> None:
    cell = matrix.cell(method, feature)
    assert cell.is_equal
    assert cell.num_drafted > 0
    assert cell.num_preempted > 0 or not ALL_FEATURES[feature].is_short_of_blocks


def test_eagle_of_the_first_kind(load_drafting: Callable[..., Harness]) -> None:
    harness = load_drafting(write_eagle)
    matrix = harness.matrix()
    for feature in ("greedy", "sampling, top-p", "prefix hit", "preemption"):
        cell = matrix.cell("eagle", feature)
        assert cell.is_equal
        assert cell.num_drafted > 0
