"""Recurrent layers and indexers with the rest of the engine: drafts, beams, candidates, guides, pages that are gone."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from bench.speculation_matrix import FEATURES, Matrix
from model_runner.contract import SamplingParams
from scheduler.interface import BeamSearch, ChoiceState, EngineRequest
from tests.engine.conftest import GREEDY, INDEXED, RECURRENT, Answer, Harness

METHODS = ["lookahead", "prediction", "suffix"]
WITH_DRAFTS = ["greedy", "sampling, top-p", "mirostat, preemption", "n = 3", "prefix hit", "mixed batch"]


WITH_STATES = [*(family for family in RECURRENT if family != "kimi_linear"), "qwen4_exp_text"]
"""KDA is slow by its modules; tests of its kernels have drafts, too."""
FAMILIES = [*WITH_STATES, *(family for family in INDEXED if family not in WITH_STATES)]


NATIVE = {"falcon_h1", "lfm2_moe", "qwen3_5_text"}
"""Families that one native call runs, with packed weights."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def harness(family: str, load: Callable[..., Harness]) -> Harness:
    return load(family, "int8" if family in NATIVE else "none")


@pytest.fixture(scope="module", params=WITH_STATES)
def with_states(request: pytest.FixtureRequest, load: Callable[..., Harness]) -> Harness:
    return load(request.param, "none")


@pytest.fixture(scope="module")
def matrix(harness: Harness) -> Matrix:
    return harness.matrix({name: FEATURES[name] for name in WITH_DRAFTS})


def make_request(name: str, num_prompt: int = 100, sampling: SamplingParams = GREEDY, start: int = 3) -> EngineRequest:
    prompt = tuple((start + 7 * index * index) % 300 + 3 for index in range(num_prompt))
    return EngineRequest(name, prompt, sampling, 40)


@pytest.mark.parametrize("feature", WITH_DRAFTS)
def test_drafts_change_nothing(family: str, matrix: Matrix, feature: str) -> None:
    """Every feature meets every method in some family."""
    method = METHODS[(FAMILIES.index(family) + WITH_DRAFTS.index(feature)) % len(METHODS)]
    cell = matrix.cell(method, feature)
    assert cell.is_equal
    assert cell.num_drafted > 0
    assert cell.num_preempted > 0 or not FEATURES[feature].is_short_of_blocks


def test_a_prompt_is_the_same_from_every_boundary_at_which_it_is_cached(harness: Harness) -> None:
    request = make_request("a", 131)
    alone = harness.run(harness.engine(prefix_caching=False), [request])["a", 0]
    for length in (20, 33, 64, 65, 97, 128, 131):
        engine = harness.engine(chunk=48)
        harness.run(engine, [replace(request, request_id="before", prompt=request.prompt[:length], max_tokens=1)])
        again = harness.run(engine, [request])["a", 0]
        assert again.tokens == alone.tokens
        assert again.num_cached == min(length, 130) // 32 * 32


def test_prompts_that_part_find_a_state_where_they_met_others(with_states: Harness) -> None:
    """The first has a page only at its end; the second computes again up to where they part, and leaves one there."""
    first = make_request("first", 200)
    others = [
        replace(first, request_id=f"{start}", prompt=first.prompt[:100] + make_request("", 60, start=start).prompt)
        for start in (11, 12)
    ]
    alone = with_states.run(with_states.engine(prefix_caching=False), [first, *others])
    engine = with_states.engine(chunk=200)
    answers: dict[tuple[str, int], Answer] = {}
    for request in (first, *others):
        answers |= with_states.run(engine, [request])
    assert {key: answer.tokens for key, answer in answers.items()} == {key: one.tokens for key, one in alone.items()}
    assert [answer.num_cached for answer in answers.values()] == [0, 0, 96]


def test_a_prompt_is_computed_again_where_only_the_pages_are_gone(with_states: Harness) -> None:
    engine = with_states.engine(chunk=64)
    first = make_request("first", 150)
    alone = with_states.run(engine, [first])["first", 0]
    pages = engine.scheduler._blocks.groups[-1].pool
    pages.release(pages.allocate(pages.num_blocks))  # evicts all
    for name, num_cached in (("again", 0), ("third", 128)):
        answer = with_states.run(engine, [replace(first, request_id=name)])[name, 0]
        assert (answer.tokens, answer.num_cached) == (alone.tokens, num_cached)


@pytest.mark.parametrize(
    "kind",
    [
        {"beam_search": BeamSearch(4), "choices": (ChoiceState(0), ChoiceState(1))},
        {"sampling": SamplingParams(temperature=0.0, penalty_alpha=0.6, top_k=5)},
        {"sampling": SamplingParams(seed=4, guidance=1.5), "guide": (5, 6, 7)},
    ],
    ids=["beams", "contrastive search", "guidance"],
)
def test_other_ways_to_decode_are_the_same_in_a_crowd(harness: Harness, kind: dict[str, object]) -> None:
    request = replace(make_request("a", 70), **kind)  # type: ignore[arg-type]
    others = [make_request(f"other {index}", 20 + index) for index in range(5)]
    alone = harness.run(harness.engine(prefix_caching=False), [request])
    crowd = harness.run(harness.engine(chunk=40), [*others, request])
    assert all(crowd[key].tokens == answer.tokens and answer.tokens for key, answer in alone.items())
