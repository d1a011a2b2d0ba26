"""Speculation changes nothing: every method with every setting gives the tokens and logprobs of no speculation."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from model_runner.contract import Speculation, Verification
from scheduler.interface import ChoiceState, EngineRequest
from tests.engine.conftest import Answer, Harness
from tests.engine.drafting import KnowingProposer
from tests.engine.test_sameness import make_requests, same

FAMILIES = [("llama", "int8"), ("gemma3", "int8"), ("qwen2_moe", "none")]


@pytest.fixture(scope="module", params=FAMILIES, ids="-".join)
def drafted(request: pytest.FixtureRequest, load: Callable[..., Harness]) -> Iterator["Drafted"]:
    harness = load(*request.param)
    requests = make_requests(harness, 12, 24, 200)
    requests[3] = replace(requests[3], choices=tuple(ChoiceState(index) for index in range(3)))
    alone: dict[tuple[str, int], Answer] = {}
    for one in requests:
        alone |= harness.run(harness.engine(prefix_caching=False), [one])
    yield Drafted(harness, requests, alone)
    harness.forget()


class Drafted:
    """A model, requests with drafts that a proposer makes who knows the answers, and these answers."""

    def __init__(self, harness: Harness, requests: list[EngineRequest], alone: dict[tuple[str, int], Answer]) -> None:
        self.harness = harness
        self.proposer = KnowingProposer(harness.runner.info.vocab_size)
        by_name = {request.request_id: request for request in requests}
        self.proposer.learn({(by_name[name].prompt, choice): a.tokens for (name, choice), a in alone.items()})
        harness.add_proposer("knowing", self.proposer)
        self.requests = [replace(r, speculation=Speculation("knowing", 5 + i)) for i, r in enumerate(requests)]
        self.alone = alone


def test_drafts_of_every_shape_change_nothing(drafted: Drafted) -> None:
    answers = drafted.harness.run(drafted.harness.engine(), drafted.requests)
    assert sum(answer.num_accepted for answer in answers.values()) > 50
    assert sum(answer.num_rejected for answer in answers.values()) > 50
    assert same(answers, drafted.alone)


def test_in_small_chunks(drafted: Drafted) -> None:
    answers = drafted.harness.run(drafted.harness.engine(chunk=8), drafted.requests)
    assert sum(answer.num_accepted for answer in answers.values()) > 10
    assert same(answers, drafted.alone)


def test_under_preemption(drafted: Drafted) -> None:
    longest = max(len(request.prompt) + request.max_tokens for request in drafted.requests)
    num_blocks = longest // drafted.harness.runner.info.block_size + 2
    engine = drafted.harness.engine(chunk=40, num_blocks=num_blocks)
    answers = drafted.harness.run(engine, drafted.requests)
    assert engine.stats().preemptions > 0
    assert sum(answer.num_accepted for answer in answers.values()) > 10
    assert same(answers, drafted.alone)


def test_the_cache_that_drafts_leave_behind_is_that_of_the_tokens(drafted: Drafted) -> None:
    engine = drafted.harness.engine(chunk=64)
    drafted.harness.run(engine, drafted.requests)
    longer = [
        replace(
            request,
            request_id=f"{request.request_id}+",
            prompt=request.prompt + tuple(drafted.alone[request.request_id, 0].tokens[:-1]) + (5,),
            choices=(ChoiceState(0),),
            sampling=replace(request.sampling, prompt_logprobs=None),
            speculation=None,
        )
        for request in drafted.requests
    ]
    answers = drafted.harness.run(engine, longer)
    assert sum(answer.num_cached for answer in answers.values()) > 200
    fresh = drafted.harness.run(drafted.harness.engine(prefix_caching=False), longer)
    assert same(answers, fresh)


def test_a_wrong_walk_would_be_noticed(drafted: Drafted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(drafted.harness.runner._caches[0]), "move", lambda self, moves: None)
    assert not same(drafted.harness.run(drafted.harness.engine(), drafted.requests), drafted.alone)


def test_stop_tokens_end_the_answer_within_a_draft(drafted: Drafted) -> None:
    request = drafted.requests[1]
    answer = drafted.alone[request.request_id, 0].tokens
    stop = answer[10]
    sampling = replace(request.sampling, stop_token_ids=(stop,))
    plain = replace(request, sampling=sampling, speculation=None)
    (expected,) = drafted.harness.run(drafted.harness.engine(), [plain]).values()
    assert expected.tokens[-1] == stop
    (got,) = drafted.harness.run(drafted.harness.engine(), [replace(request, sampling=sampling)]).values()
    assert (got.tokens, got.logprobs, got.finish_reason) == (expected.tokens, expected.logprobs, expected.finish_reason)


def test_the_proposer_is_told_of_every_beginning_and_end(drafted: Drafted) -> None:
    drafted.harness.run(drafted.harness.engine(), drafted.requests)
    drafted.harness.forget()
    assert not drafted.proposer.running


def test_lengths_are_kept_to_the_token(drafted: Drafted) -> None:
    for max_tokens in range(1, 8):
        request = replace(drafted.requests[0], max_tokens=max_tokens)
        (answer,) = drafted.harness.run(drafted.harness.engine(), [request]).values()
        assert answer.tokens == drafted.alone[request.request_id, 0].tokens[:max_tokens]


@pytest.mark.parametrize("mode", ["rejection", "typical"])
def test_other_modes_are_greedy_where_the_request_is_and_else_report_what_the_model_says(
    drafted: Drafted, mode: Verification
) -> None:
    requests = [
        replace(request, speculation=Speculation("knowing", 8, mode), choices=(ChoiceState(0),))
        for request in drafted.requests
    ]
    answers = drafted.harness.run(drafted.harness.engine(chunk=64), requests)
    assert sum(answer.num_accepted for answer in answers.values()) > 15
    greedy = {(request.request_id, 0) for request in requests if request.sampling.temperature == 0}
    assert greedy
    assert same({key: answers[key] for key in greedy}, {key: drafted.alone[key] for key in greedy})
    again = [
        replace(
            request,
            prompt=request.prompt + tuple(answers[request.request_id, 0].tokens),
            sampling=replace(request.sampling, prompt_logprobs=0),
            max_tokens=1,
            speculation=None,
        )
        for request in requests
    ]
    fresh = drafted.harness.run(drafted.harness.engine(prefix_caching=False), again)
    for key, answer in answers.items():
        of_answer = fresh[key].prompt_logprobs[-len(answer.tokens) :]
        assert [token.token_id for token in of_answer] == answer.tokens
        if answer.logprobs:
            assert [token.logprob for token in of_answer] == [token.logprob for token in answer.logprobs]
