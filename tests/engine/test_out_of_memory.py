"""Memory that runs out in a step changes no answer, wherever in the step it does."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from model_runner.batch import Batch
from model_runner.contract import Contrastive, DoLa, Mirostat, SamplingParams, Speculation
from model_runner.kernels.library import Kernels
from model_runner.runner import ModelRunner
from model_runner.state import RunnerState
from scheduler import step_size
from scheduler.interface import BeamSearch, ChoiceState, EngineRequest, FinishReason
from scheduler.step_size import OUT_OF_MEMORY
from tests.engine.conftest import GREEDY, SMALL_VOCAB, Answer, Harness
from tests.engine.tiny_heads import write_eagle3

PLACES = {
    "the forward pass": ("_target", "forward"),
    "the scores": ("_scoring", "__call__"),
    "contrastive search": ("_search", "decide"),
    "verification": ("_verify", "__call__"),
    "drafting": ("_speculator", "propose"),
}
"""Attributes of the runner, and their methods."""
SETTINGS = [
    GREEDY,
    replace(GREEDY, prompt_logprobs=1),
    SamplingParams(seed=1, logprobs=1, frequency_penalty=0.4, no_repeat_ngram_size=3),
    SamplingParams(seed=2, logprobs=1, temperature=1.2, mirostat=Mirostat(tau=3.0)),
    SamplingParams(seed=3, logprobs=1, top_p=0.9, contrastive=Contrastive()),
    SamplingParams(seed=4, logprobs=1, dola=DoLa("low")),
    SamplingParams(seed=5, logprobs=1, top_p=0.9, guidance=2.0),
]
SMALL_STEP = 8
"""Rows that every one of the requests gets on with."""
SHORTAGES: Sequence[Callable[[], object]] = (
    lambda: throw(torch.OutOfMemoryError("tried to allocate 2 GiB")),
    lambda: throw(MemoryError("out of memory in sw_decoder_layer")),
    lambda: torch.empty(1 << 60, dtype=torch.int8),
    lambda: np.empty(1 << 60, dtype=np.int8),
    lambda: throw(MemoryError()),
)
"""Out-of-memory errors of the device, a CPU kernel, torch and numpy on the host, and Python."""
METHODS = ["auto", "draft_model", "eagle", "hydra", "lookahead"]


def throw(error: Exception) -> None:
    raise error


def make_requests() -> list[EngineRequest]:
    """Every setting without drafts and with them; several choices; a contrastive search; a search for beams."""
    pick = random.Random(1)
    part = [pick.randrange(3, SMALL_VOCAB) for _ in range(12)]

    def make(name: str, sampling: SamplingParams, **changes: Any) -> EngineRequest:
        prompt = tuple((part * 4)[: pick.randint(5, 40)])
        guide = tuple(part[:7]) if sampling.guidance is not None else ()
        return EngineRequest(name, prompt, sampling, 12, guide=guide, **changes)

    two = (ChoiceState(0), ChoiceState(1))
    plain = [make(f"plain-{index}", sampling) for index, sampling in enumerate(SETTINGS)]
    several = make("several", SETTINGS[2], choices=two)
    drafting = [
        make(f"{method}-{index}", replace(sampling, prompt_logprobs=None), speculation=Speculation(method, 4))
        for index, (sampling, method) in enumerate(zip(SETTINGS, itertools.cycle(METHODS), strict=False))
    ]
    search = make("contrastive search", replace(GREEDY, top_k=4, penalty_alpha=0.6))
    beams = make("beams", replace(GREEDY, stop_token_ids=()), beam_search=BeamSearch(3), choices=two)
    return [*plain, several, *drafting, search, beams]


class Case:
    """A model with all its drafters, requests, and their answers in steps that all go well."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.requests = make_requests()
        self.expected = self.run().answers

    def run(self) -> "Outcome":
        engine = self.harness.engine(chunk=64)
        return Outcome(self.harness.run(engine, self.requests), engine.stats().out_of_memory)


class Outcome:
    """Results of the requests."""

    def __init__(self, answers: dict[tuple[str, int], Answer], num_failed: int) -> None:
        self.num_failed = num_failed
        self.num_accepted = sum(answer.num_accepted for answer in answers.values())
        self.answers = {
            key: (answer.tokens, answer.logprobs, answer.prompt_logprobs, answer.finish_reason)
            for key, answer in answers.items()
        }


class Fails:
    """Stands in for a part of the runner: does its work, and then runs out of memory in one large step of `every`."""

    def __init__(self, runner: ModelRunner, place: str, every: int, least: int) -> None:
        """`least` is how many rows a large step has."""
        attribute, self._method = PLACES[place]
        self._part = getattr(runner, attribute)
        self._state = runner._state
        self._every = every
        self._least = least
        self._shortages = itertools.cycle(SHORTAGES)
        self.num_calls = 0
        self.is_due = False
        """Whether this call is to run out."""

    def gather(self, *arguments: Any) -> Batch:
        """Stands in for RunnerState.gather."""
        batch = RunnerState.gather(self._state, *arguments)
        self._is_large = len(batch.tokens) >= self._least
        return batch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        return self._call if name == self._method else found

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._call(*arguments, **keywords)

    def _call(self, *arguments: Any, **keywords: Any) -> Any:
        self.num_calls += self._is_large
        self.is_due = self._is_large and self.num_calls % self._every == 0
        result = getattr(self._part, self._method)(*arguments, **keywords)
        if self.is_due:
            next(self._shortages)()
        return result


def break_runner(
    runner: ModelRunner, place: str, every: int, patch: pytest.MonkeyPatch, least: int = SMALL_STEP + 1
) -> Fails:
    part = Fails(runner, place, every, least)
    patch.setattr(runner, PLACES[place][0], part)
    patch.setattr(runner._state, "gather", part.gather)
    return part


@pytest.fixture(scope="module")
def case(load_drafting: Callable[..., Harness]) -> Iterator[Case]:
    harness = load_drafting(write_eagle3)
    yield Case(harness)
    harness.forget()


@pytest.mark.parametrize("place", PLACES)
def test_answers_are_those_of_steps_that_go_well(case: Case, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_size, "_PATIENCE", 4)  # so that there are large steps again
    part = break_runner(case.harness.runner, place, 4, monkeypatch)
    outcome = case.run()
    assert outcome.answers == case.expected
    assert part.num_calls > (3 if place == "drafting" else 8)  # after a shortage nobody drafts any more
    assert (outcome.num_failed > 0) == (place != "drafting")
    assert outcome.num_accepted > 0 or place == "drafting"  # which ends soon


def test_a_kernel_that_gets_no_memory_costs_its_step_and_nobody(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    part = break_runner(case.harness.runner, "the forward pass", 4, monkeypatch)
    call = Kernels.call

    def lacking(kernels: Kernels, name: str, *arguments: object) -> None:
        """The library returns what it does where an allocation fails."""
        if part.is_due:
            kernels = SimpleNamespace(_functions=SimpleNamespace(**{name: lambda *_: 1}), _context=None)  # type: ignore[assignment]
        call(kernels, name, *arguments)

    monkeypatch.setattr(Kernels, "call", lacking)
    outcome = case.run()
    assert outcome.answers == case.expected
    assert outcome.num_failed > 0
    assert caplog.text.count("out of memory in sw_") == outcome.num_failed


def test_another_error_is_not_taken_for_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = case.harness.engine()
    with monkeypatch.context() as patch:
        patch.setattr(case.harness.runner._target, "forward", lambda *_: throw(RuntimeError("shapes do not match")))
        engine.add(case.requests[0])
        with pytest.raises(RuntimeError, match="shapes do not match"):
            engine.step()
    engine.abort(case.requests[0].request_id)
    engine.add(replace(case.requests[1], request_id="after"))
    while engine.has_work:
        engine.step()


def test_a_history_that_is_not_rewound_would_be_noticed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = case.harness.runner
    break_runner(runner, "verification", 5, monkeypatch)
    monkeypatch.setattr(runner._state, "rewind", lambda choices: None)
    assert case.run().answers != case.expected


def test_a_model_that_never_fits_fails_its_requests_and_not_the_engine(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, engine = case.harness.runner, case.harness.engine()
    with monkeypatch.context() as patch:
        break_runner(runner, "the forward pass", 1, patch, least=1)
        for request in case.requests:
            engine.add(request)
        ends = []
        while engine.has_work:
            ends += [(output.finish_reason, output.error) for output in engine.step()]
            engine.check_integrity()
    assert ends == [(FinishReason.ERROR, OUT_OF_MEMORY)] * sum(len(request.choices) for request in case.requests)
    assert case.run().answers == case.expected
