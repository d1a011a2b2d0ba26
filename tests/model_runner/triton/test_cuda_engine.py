"""Whole engines on the CUDA path: what a request gets is the same whatever else happens, and by the definition."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from model_runner.batch import Batch
from model_runner.contract import (
    AdmittedRequest,
    ChoiceResult,
    Pooling,
    SamplingParams,
    ScheduledRequest,
    Speculation,
    StepPlan,
)
from model_runner.sampling.rows import EarlySamplingPlan
from model_runner.sampling.sampler import NOT_FINITE, Sampler
from scheduler.interface import ChoiceState, EngineRequest
from tests.engine.conftest import Answer, Harness
from tests.engine.drafting import KnowingProposer
from tests.engine.test_sameness import same
from tests.model_runner.oracles.draw import TorchDraw
from tests.model_runner.sampling.harness import CPU
from tests.model_runner.triton.tiny_engines import BLOCK, VOCAB, CudaHarness, TinyEngines

Answers = dict[tuple[str, int], Answer]

PREFIX = (9, 31, 4, 17, 22, 3, 40, 40, 8, 29, 13, 6, 45, 2, 11, 37)  # a block
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
DRAWN = SamplingParams(temperature=0.8, seed=5)
PENALISED = SamplingParams(
    top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=2, logprobs=1, prompt_logprobs=1
)
REQUESTS = [
    EngineRequest("greedy", PREFIX[:11], GREEDY, 7),
    EngineRequest("drawn", PREFIX[2:14], DRAWN, 6),
    EngineRequest("penalised", (*PREFIX, 5), PENALISED, 5),
    EngineRequest("two", (*PREFIX, 7, 7), replace(DRAWN, seed=6, logprobs=0), 4, (ChoiceState(0), ChoiceState(1))),
]


@pytest.fixture
def harness(tiny_engines: TinyEngines) -> CudaHarness:
    return tiny_engines.cuda("llama")


_alone: dict[int, Answers] = {}


@pytest.fixture
def alone(harness: CudaHarness) -> Answers:
    """Answers of each request when it runs alone, computed once: fixtures of a module could not run the interpreter."""
    if id(harness) not in _alone:
        _alone[id(harness)] = answers_alone(harness, REQUESTS)
    return _alone[id(harness)]


def answers_alone(harness: Harness, requests: Sequence[EngineRequest]) -> Answers:
    """Answers of each request when it runs alone."""
    engines = ((request, harness.engine(prefix_caching=False)) for request in requests)
    answers = [harness.run(engine, [request]) for request, engine in engines]
    return {key: answer for of_request in answers for key, answer in of_request.items()}


def test_layers_with_windows_have_blocks_of_their_own(tiny_engines: TinyEngines) -> None:
    """In the crowd, a choice's blocks of the windows have other numbers than its blocks of the whole text."""
    harness = tiny_engines.cuda("gemma3", (2,))
    requests = [replace(request, max_tokens=3) for request in REQUESTS[1:3]]
    assert same(harness.run(harness.engine(chunk=7), requests), answers_alone(harness, requests))


def test_in_a_crowd_by_the_definition(harness: CudaHarness, alone: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token and report is what the CPU's sampler makes of the same logits."""
    verify, defined, num_checked = harness.runner._verify, Sampler(TorchDraw(VOCAB, CPU)), 0

    def check(scores, samples, slots, raw, picks):  # type: ignore[no-untyped-def]
        nonlocal num_checked
        rows = harness.runner._state._sampling.rows(slots)
        expected = defined(scores[[sample.first for sample in samples]], rows)
        verdicts = verify(scores, samples, slots, raw, picks)
        assert [verdict.tokens for verdict in verdicts] == [[token] for token in expected.tokens]
        reports = [[report] if report else [] for report in expected.logprobs]
        assert [verdict.logprobs for verdict in verdicts] == reports
        num_checked += len(samples)
        return verdicts

    monkeypatch.setattr(harness.runner, "_verify", check)
    assert same(harness.run(harness.engine(), REQUESTS), alone)
    assert num_checked == sum(len(answer.tokens) for answer in alone.values())
    assert alone["two", 0].tokens != alone["two", 1].tokens


def test_without_graphs_and_with_no_token_found_beforehand(
    harness: CudaHarness, alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_none(batch: Batch, *_: object) -> EarlySamplingPlan:
        return EarlySamplingPlan.greedy(len(batch.logits_index))

    monkeypatch.setattr(harness.runner._state, "plan_early_sampling", plan_none)
    with harness.without_graphs():
        assert same(harness.run(harness.engine(), REQUESTS), alone)


def test_in_chunks_preempted_and_from_the_prefix_cache(harness: CudaHarness, alone: Answers) -> None:
    engine = harness.engine(chunk=9, num_blocks=6)
    answers = harness.run(engine, REQUESTS)
    assert engine.stats().preemptions > 0
    assert same(answers, alone)
    again = harness.run(
        engine, [replace(request, request_id=f"again {request.request_id}") for request in REQUESTS[2:]]
    )
    assert max(answer.num_cached for answer in again.values()) == BLOCK
    assert same({(name.removeprefix("again "), choice): a for (name, choice), a in again.items()}, alone)


def test_numbers_in_place_of_tokens(harness: CudaHarness, alone: Answers) -> None:
    """A step that needs hidden states runs between graph replays, and other requests' tokens do not change."""
    ways = (Pooling("logits", tokens=(3, 5)), Pooling("mean"))
    asking = [EngineRequest(way.by, PREFIX[:9], SamplingParams(pooling=way), 0) for way in ways]
    engine = harness.engine(prefix_caching=False)
    expected = alone | harness.run(engine, asking[:1]) | harness.run(engine, asking[1:])
    answers = harness.run(harness.engine(chunk=7), [replace(REQUESTS[1], max_tokens=3), *asking])
    assert all(answers[way.by, 0].pooled == expected[way.by, 0].pooled for way in ways)
    assert [len(answers[way.by, 0].pooled) for way in ways] == [8, 4 * 32]
    assert answers["drawn", 0].tokens == alone["drawn", 0].tokens[:3]


def test_drafts_change_nothing(harness: CudaHarness, alone: Answers) -> None:
    proposer = KnowingProposer(VOCAB)
    proposer.learn({(r.prompt, c.index): alone[r.request_id, c.index].tokens for r in REQUESTS for c in r.choices})
    harness.add_proposer("knowing", proposer)
    drafting = Speculation("knowing", 3)
    before = harness.platform.num_replays
    answers = harness.run(harness.engine(), [replace(request, speculation=drafting) for request in REQUESTS])
    assert same(answers, alone)
    assert harness.platform.num_replays > before
    assert sum(answer.num_accepted for answer in answers.values()) > 0


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.0), DRAWN, PENALISED], ids=["greedy", "drawn", "penalised"]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the interpreter meets NaN
def test_a_request_whose_logits_are_not_finite_fails_alone(harness: CudaHarness, sampling: SamplingParams) -> None:
    good, hit = two_steps(harness, sampling, poison=False)
    assert good.error is hit.error is None
    beside, failed = two_steps(harness, sampling, poison=True)
    assert failed.error == NOT_FINITE
    assert failed.tokens == ()
    assert beside == good


def two_steps(harness: CudaHarness, sampling: SamplingParams, *, poison: bool) -> tuple[ChoiceResult, ...]:
    """Results of a prompt's second token and of another's, whose keys and values may have become NaN."""
    harness.forget()
    admitted = [AdmittedRequest(f"{i}", PREFIX[i : i + 5], 5, 0, (3 + i,), sampling) for i in range(2)]
    harness.known |= {"0", "1"}
    harness.runner.execute(StepPlan((), (), tuple(admitted), tuple(ScheduledRequest(f"{i}", 5, ()) for i in range(2))))
    if poison:
        harness.runner._caches[0].values[0][4, :, :5] = torch.nan
    results = harness.runner.execute(
        StepPlan((), (), (), tuple(ScheduledRequest(f"{i}", 1, ()) for i in range(2)))
    ).choices
    harness.forget()
    return results
