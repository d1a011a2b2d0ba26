"""The methods without a model, on real engines: the answers of no speculation, in fewer steps."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from model_runner.contract import SamplingParams, Speculation
from scheduler.interface import EngineRequest
from tests.engine.conftest import SMALL_VOCAB, Answer, Harness
from tests.engine.test_sameness import same
from tests.engine.tiny_heads import write_eagle3

METHODS = ["auto", "lookahead", "prediction", "suffix"]
MODELS = ["tiny", pytest.param("embedded", marks=pytest.mark.embedded)]


class Case:
    """A model, requests whose answers repeat themselves, and these answers without speculation."""

    def __init__(self, harness: Harness, requests: list[EngineRequest]) -> None:
        self.harness = harness
        self.requests = requests
        self.alone: dict[tuple[str, int], Answer] = {}
        for request in requests:
            self.alone |= harness.run(harness.engine(prefix_caching=False), [request])

    def speculating(self, method: str, num_tokens: int | None, salt: str = "") -> list[EngineRequest]:
        return [
            replace(
                request,
                cache_salt=salt,
                speculation=Speculation(method, num_tokens, prediction=self._prediction(request, method)),
            )
            for request in self.requests
        ]

    def _prediction(self, request: EngineRequest, method: str) -> tuple[int, ...]:
        """The answer, with a token left out and one changed."""
        if method != "prediction":
            return ()
        tokens = self.alone[request.request_id, 0].tokens
        return (*tokens[:5], *tokens[6:12], 5, *tokens[13:])


def make_requests(harness: Harness) -> list[EngineRequest]:
    """Prompts of one part, several times over; greedy and sampled in turn."""
    rng = np.random.default_rng(8)
    is_tiny = harness.runner.info.vocab_size == SMALL_VOCAB
    requests = []
    for index in range(6 if is_tiny else 4):
        part = rng.integers(3, harness.runner.info.vocab_size, size=12).tolist()
        sampling = SamplingParams(temperature=0.0 if index % 2 else 0.7, top_p=0.9, seed=index, logprobs=2)
        prompt = tuple(part * (3 + index))[: 30 + 5 * index]
        requests.append(EngineRequest(f"r{index}", prompt, sampling, max_tokens=40 if is_tiny else 24))
    return requests


@pytest.fixture(scope="module", params=MODELS)
def case(
    request: pytest.FixtureRequest, load: Callable[..., Harness], load_drafting: Callable[..., Harness]
) -> Iterator[Case]:
    harness = load_drafting(write_eagle3) if request.param == "tiny" else load("embedded", "int8")
    yield Case(harness, make_requests(harness))
    harness.forget()


@pytest.mark.parametrize("num_tokens", [1, 16, None])
@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_no_speculation(case: Case, method: str, num_tokens: int | None) -> None:
    requests = case.speculating(method, num_tokens)
    answers = case.harness.run(case.harness.engine(), requests)
    assert same(answers, case.alone)
    if num_tokens is not None:
        assert sum(answer.num_accepted for answer in answers.values()) > 0


@pytest.mark.parametrize("method", METHODS)
def test_under_preemption(case: Case, method: str) -> None:
    longest = max(len(request.prompt) + request.max_tokens for request in case.requests)
    num_blocks = longest // case.harness.runner.info.block_size + 1
    engine = case.harness.engine(chunk=40, num_blocks=num_blocks)
    assert same(case.harness.run(engine, case.speculating(method, 8)), case.alone)
    assert engine.stats().preemptions > 0


def steps_of(case: Case, request: EngineRequest) -> int:
    """How many steps of generation an answer took."""
    (answer,) = case.harness.run(case.harness.engine(), [request]).values()
    assert same({(request.request_id, 0): answer}, case.alone)
    return len(answer.tokens) - answer.num_accepted


def test_suffix_knows_an_answer_that_it_has_seen_with_the_same_salt_only(case: Case) -> None:
    request = case.speculating("suffix", 16, salt="new")[0]
    first = steps_of(case, request)
    again = steps_of(case, request)
    other = steps_of(case, replace(request, cache_salt="other"))
    assert again <= -(-request.max_tokens // 16) + 2 < first
    assert other == first


def test_a_prediction_with_two_mistakes_saves_most_steps(case: Case) -> None:
    for request in case.speculating("prediction", 16):
        assert steps_of(case, request) < request.max_tokens / 3


def test_what_auto_does_counts_for_its_members(case: Case) -> None:
    def drafted() -> dict[str, int]:
        return {entry.method: entry.drafted for entry in case.harness.runner.speculation_stats()}

    before = drafted()
    case.harness.run(case.harness.engine(), case.speculating("auto", 4))
    after = drafted()
    assert after["suffix"] > before.get("suffix", 0)
    assert "auto" not in after


def test_methods_share_a_batch(case: Case) -> None:
    mixed = [
        case.speculating(METHODS[index % len(METHODS)], 6)[index] if index else case.requests[0]
        for index in range(len(case.requests))
    ]
    assert same(case.harness.run(case.harness.engine(), mixed), case.alone)


@pytest.mark.parametrize("method", METHODS)
def test_histories_tell_whose_drafts_they_were(case: Case, method: str):
    def verified() -> Counter[str]:
        return Counter({stats.method: stats.drafted for stats in case.harness.runner.speculation_stats()})

    before = verified()
    engine = case.harness.engine(prefix_caching=False)
    answers = case.harness.run(engine, case.speculating(method, 4, salt=f"{method} told"))
    told: Counter[str] = Counter()
    for answer in answers.values():
        drafts = answer.history.drafts
        assert sum(of.accepted for of in drafts) == answer.num_accepted
        assert sum(of.rejected for of in drafts) == answer.num_rejected
        told.update({of.method: of.accepted + of.rejected for of in drafts})
    assert told.total() > 0
    assert told == verified() - before
