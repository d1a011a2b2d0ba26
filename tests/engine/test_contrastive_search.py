"""Contrastive search: against a recomputation by transformers, and the same whatever else the engine does."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_runner.contract import SamplingParams
from scheduler.interface import ChoiceState, EngineRequest
from tests.engine.conftest import Answer, Harness
from tests.engine.test_oracle import prompts
from tests.engine.test_sameness import make_requests, same

SEARCH = SamplingParams(temperature=0.0, penalty_alpha=0.6, top_k=4, logprobs=2, stop_token_ids=(2,))
SETTINGS = {
    "usual": SEARCH,
    "mild": replace(SEARCH, penalty_alpha=0.2, top_k=8),
    "strict": replace(SEARCH, penalty_alpha=1.0, top_k=3),
    "one candidate": replace(SEARCH, top_k=1),
    "penalties": replace(SEARCH, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.4),
    "bans": replace(SEARCH, allowed_token_ids=(7, 9, 30, 31), bad_words=((7,), (9, 30)), top_k=6),
    "bias": replace(SEARCH, logit_bias=((5, 4.0), (6, -3.0)), min_tokens=6, no_repeat_ngram_size=2),
}
"""All that a search can be combined with."""


def processed(logits: Tensor, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams) -> Tensor:
    """Logits [vocab] after bias, bans and penalties, one after the other."""
    scores = logits.double().clone()
    for token, value in sampling.logit_bias:
        scores[token] += value
    if sampling.allowed_token_ids is not None:
        others = [token for token in range(len(scores)) if token not in sampling.allowed_token_ids]
        scores[others] = -torch.inf
    text = [*prompt, *output]
    for *head, last in sampling.bad_words:
        if text[len(text) - len(head) :] == head:
            scores[last] = -torch.inf
    if len(output) < sampling.min_tokens:
        scores[list(sampling.stop_token_ids)] = -torch.inf
    if size := sampling.no_repeat_ngram_size:
        seen = [text[i : i + size] for i in range(len(text) - size + 1)]
        scores[[gram[-1] for gram in seen if gram[:-1] == text[len(text) - size + 1 :]]] = -torch.inf
    for token in set(text):
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= output.count(token) * sampling.frequency_penalty + sampling.presence_penalty
    return scores


@torch.inference_mode()
def search(model: torch.nn.Module, prompt: Sequence[int], sampling: SamplingParams, length: int) -> list[int]:
    """The formula, computed anew for each token and its candidates, without a cache."""

    def run(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        result = model(torch.tensor(texts), output_hidden_states=True)
        return result.logits[0, -1], torch.nn.functional.normalize(result.hidden_states[-1].double(), dim=-1)

    output: list[int] = []
    while len(output) < length and output[-1:] not in [[token] for token in sampling.stop_token_ids]:
        text = [*prompt, *output]
        logits, _ = run([text])
        probs = torch.softmax(processed(logits, prompt, output, sampling), -1)
        best = probs.argsort(descending=True, stable=True)[: sampling.top_k]
        best = best[probs[best] > 0]
        _, hidden = run([[*text, token] for token in best.tolist()])
        closest = (hidden[:, :-1] @ hidden[:, -1:].mT).amax((1, 2))
        scores = (1 - sampling.penalty_alpha) * probs[best] - sampling.penalty_alpha * closest
        output.append(int(best[scores.argmax()]))
    return output


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("llama", name) for name in SETTINGS), *((family, "mild") for family in ("qwen3", "gemma3", "mixtral"))],
)
def test_tokens_are_those_of_the_formula(
    family: str, name: str, load: Callable[..., Harness], tiny_model: Callable[[str], Path]
) -> None:
    harness, sampling = load(family, "none"), SETTINGS[name]
    requests = [
        EngineRequest(str(index), prompt, sampling, max_tokens=8)
        for index, prompt in enumerate(prompts(2, 320, (1, 40), seed=len(name)))
    ]
    answers = harness.run(harness.engine(chunk=32), requests)
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32).eval()
    for request in requests:
        assert answers[request.request_id, 0].tokens == search(model, request.prompt, sampling, 8)


def test_the_search_is_not_greedy_and_each_of_its_settings_matters(load: Callable[..., Harness]) -> None:
    harness = load("llama", "none")
    prompt = prompts(1, 320, (50, 51), seed=3)[0]
    settings = [*SETTINGS.values(), replace(SEARCH, penalty_alpha=0.0)]
    outputs = [answer_of(harness, EngineRequest("a", prompt, sampling, max_tokens=20)).tokens for sampling in settings]
    assert len({tuple(tokens) for tokens in outputs}) == len(settings) - 1  # one candidate is greedy


@pytest.mark.parametrize("sampling", [replace(SEARCH, penalty_alpha=1e-12), replace(SEARCH, top_k=1)])
def test_without_a_penalty_or_a_choice_it_is_greedy(sampling: SamplingParams, load: Callable[..., Harness]) -> None:
    harness = load("qwen3", "none")
    for prompt in prompts(2, 320, (1, 90), seed=9):
        greedy = EngineRequest("a", prompt, replace(SEARCH, penalty_alpha=0.0, top_k=0), max_tokens=15)
        found, expected = answer_of(harness, replace(greedy, sampling=sampling)), answer_of(harness, greedy)
        assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


def test_more_candidates_than_tokens_of_the_vocabulary(load: Callable[..., Harness]) -> None:
    harness = load("llama", "none")
    allowed = replace(SEARCH, top_k=60, allowed_token_ids=(11, 12, 13))
    exactly = replace(allowed, top_k=3)
    answers = [
        answer_of(harness, EngineRequest("a", (5, 6), sampling, max_tokens=12)).tokens
        for sampling in (allowed, exactly)
    ]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1


def answer_of(harness: Harness, request: EngineRequest) -> Answer:
    (answer,) = harness.run(harness.engine(prefix_caching=False), [request]).values()
    return answer


# -- speed never changes the answer ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[("llama", "int8"), ("gemma3", "none")], ids="-".join)
def case(request: pytest.FixtureRequest, load: Callable[..., Harness]) -> "Case":
    return Case(load(*request.param))


class Case:
    """Every other request of a crowd searches. With the answers of the searching ones alone."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        settings = list(SETTINGS.values())
        self.crowd = [
            replace(request, sampling=replace(settings[index // 2 % len(settings)], prompt_logprobs=index % 3 or None))
            if index % 2
            else request
            for index, request in enumerate(make_requests(harness, 10, 12, 60))
        ]
        self.searching = self.crowd[1::2]
        self.alone: dict[tuple[str, int], Answer] = {}
        for request in self.searching:
            self.alone |= harness.run(harness.engine(prefix_caching=False), [request])

    def check(self, answers: dict[tuple[str, int], Answer]) -> None:
        assert same({key: answers[key] for key in self.alone}, self.alone)


@pytest.mark.parametrize("chunk", [9, 512])
def test_in_a_crowd_at_every_chunk_size(case: Case, chunk: int) -> None:
    engine = case.harness.engine(chunk=chunk)
    case.check(case.harness.run(engine, case.crowd))
    assert engine.stats().kv_usage == 0.0


def test_with_a_warm_prefix_cache_to_which_it_adds(case: Case) -> None:
    engine = case.harness.engine(chunk=64)
    case.check(case.harness.run(engine, case.crowd))
    case.check(case.harness.run(engine, case.crowd))
    plain = [replace(r, request_id="p" + r.request_id, sampling=SamplingParams(seed=3)) for r in case.searching]
    answers = case.harness.run(engine, plain)
    assert sum(answer.num_cached for answer in answers.values()) > 0
    assert same(answers, case.harness.run(case.harness.engine(prefix_caching=False), plain))


def test_under_forced_preemption(case: Case) -> None:
    longest = max(len(request.prompt) + request.max_tokens for request in case.crowd)
    engine = case.harness.engine(chunk=64, num_blocks=longest // case.harness.runner.info.block_size + 3)
    answers = case.harness.run(engine, case.crowd)
    assert engine.stats().preemptions > 0
    assert engine.stats().kv_usage == 0.0
    case.check(answers)


def test_resumed_after_a_restart(case: Case) -> None:
    resumed = [
        replace(request, choices=(ChoiceState(0, tuple(case.alone[request.request_id, 0].tokens[: index + 1])),))
        for index, request in enumerate(case.searching)
    ]
    answers = case.harness.run(case.harness.engine(chunk=64), resumed)
    for index, request in enumerate(case.searching):
        answer, expected = answers[request.request_id, 0], case.alone[request.request_id, 0]
        assert (answer.tokens, answer.finish_reason) == (expected.tokens, expected.finish_reason)
        assert answer.logprobs == expected.logprobs[index + 1 :]


def test_all_choices_of_a_request_are_the_same(case: Case) -> None:
    request = replace(case.searching[0], choices=tuple(ChoiceState(index) for index in range(3)))
    answers = case.harness.run(case.harness.engine(), [request])
    expected = case.alone[request.request_id, 0]
    assert all((answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs) for answer in answers.values())


def test_aborted_in_between_it_leaves_nothing(case: Case) -> None:
    engine = case.harness.engine(chunk=64)
    for request in case.crowd:
        engine.add(request)
    for _ in range(12):
        engine.step()
    for request in case.crowd:
        engine.abort(request.request_id)
    engine.check_integrity()
    assert engine.stats().kv_usage == 0.0
    case.check(case.harness.run(engine, case.crowd))
