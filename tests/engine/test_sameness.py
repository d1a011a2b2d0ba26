"""Speed never changes the answer: tokens and logprobs, compared with ==, whatever else happens."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from model_runner.contract import Contrastive, DoLa, Dry, Mirostat, SamplingParams, Xtc
from scheduler.interface import ChoiceState, EngineRequest
from tests.engine.conftest import GREEDY, Answer, Harness

MODELS = [
    *(("llama", "int8", rows) for rows in ("int8", "int16")),
    *((family, "int8") for family in ("qwen2", "qwen2_moe", "gemma3", "gpt_oss", "llama4")),
    ("llama", "int4"),
    *((family, "none") for family in ("qwen2_moe", "jamba", "kimi_linear")),
    *((family, "int8") for family in ("falcon_h1", "qwen3_5_text", "deepseek_v4")),
    pytest.param(("embedded", "int8"), marks=pytest.mark.embedded),
]
"""Model families with types of weights and, optionally, of rows."""
SETTINGS = [
    SamplingParams(seed=1, logprobs=2),
    GREEDY,
    SamplingParams(seed=2, logprobs=0, prompt_logprobs=1, top_p=0.9, top_k=40),
    SamplingParams(seed=3, logprobs=2, temperature=0.8, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(seed=4, logprobs=1, typical_p=0.9, presence_penalty=0.5, no_repeat_ngram_size=2),
    SamplingParams(seed=5, logprobs=1, logit_bias=((7, 3.0), (9, -100.0)), min_tokens=5, stop_token_ids=(2, 7)),
    SamplingParams(seed=6, logprobs=1, temperature=1.2, mirostat=Mirostat(tau=3.0)),
    SamplingParams(
        seed=7,
        logprobs=1,
        dry=Dry(0.8, 1.75, 1),
        xtc=Xtc(0.5, 0.05),
        temperature=0.7,
        eta_cutoff=0.01,
        sampler_order=("eta_cutoff", "xtc", "temperature"),
    ),
    SamplingParams(seed=6, logprobs=1, dola=DoLa("low"), repetition_penalty=1.2),
]
CONTRASTIVE = SamplingParams(seed=7, logprobs=1, contrastive=Contrastive(), top_p=0.9)
"""Where there is an auxiliary model."""


def make_requests(harness: Harness, count: int, num_tokens: int, longest: int) -> list[EngineRequest]:
    """Requests of mixed settings and lengths; every other prompt starts with the same 70 tokens."""
    rng = np.random.default_rng(5)
    vocab_size = harness.runner.info.vocab_size
    settings = [*SETTINGS, CONTRASTIVE] if harness.has_aux_model else SETTINGS
    shared = rng.integers(3, vocab_size, size=70).tolist()
    requests = []
    for index in range(count):
        prompt = rng.integers(3, vocab_size, size=rng.integers(1, longest)).tolist()
        requests.append(
            EngineRequest(
                request_id=f"r{index}",
                prompt=tuple(shared + prompt if index % 2 else prompt),
                sampling=replace(settings[index % len(settings)], seed=index),
                max_tokens=num_tokens,
            )
        )
    return requests


def same(answers: dict[tuple[str, int], Answer], expected: dict[tuple[str, int], Answer]) -> bool:
    """Tokens, logprobs and finish reasons of `answers`, to the last bit."""
    return all(
        (answer.tokens, answer.logprobs, answer.prompt_logprobs, answer.finish_reason)
        == (expected[key].tokens, expected[key].logprobs, expected[key].prompt_logprobs, expected[key].finish_reason)
        for key, answer in answers.items()
    )


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def case(request: pytest.FixtureRequest, load: Callable[..., Harness]) -> "Case":
    family, quantization, *rows = request.param
    harness = load(family, quantization, rows=rows[0] if rows else "auto")
    small = family == "embedded"
    requests = make_requests(harness, 6 if small else 12, 10 if small else 24, 90 if small else 300)
    return Case(harness, requests)


@pytest.fixture(scope="module")
def harness(load: Callable[..., Harness]) -> Harness:
    """For what is the same with every model."""
    return load("llama", "int4")


class Case:
    """A model, requests, and the answers that each request gets alone."""

    def __init__(self, harness: Harness, requests: Sequence[EngineRequest]) -> None:
        self.harness = harness
        self.requests = list(requests)
        self.alone: dict[tuple[str, int], Answer] = {}
        for request in requests:
            self.alone |= harness.run(harness.engine(prefix_caching=False), [request])


def test_the_comparison_can_fail(case: Case) -> None:
    other = [replace(r, sampling=replace(r.sampling, seed=r.sampling.seed + 1)) for r in case.requests[:1]]
    assert not same(case.harness.run(case.harness.engine(), other), case.alone)


@pytest.mark.parametrize("chunk", [16, 512])
def test_in_a_crowd_in_small_chunks_and_whole(case: Case, chunk: int) -> None:
    assert same(case.harness.run(case.harness.engine(chunk=chunk), case.requests), case.alone)


def test_among_31_others(case: Case) -> None:
    others = [
        replace(request, request_id=f"other{index}", sampling=replace(request.sampling, seed=100 + index))
        for index, request in enumerate((case.requests * 6)[:31])
    ]
    one = case.requests[1]
    answers = case.harness.run(case.harness.engine(), [*others[:15], one, *others[15:]])
    assert same({key: answers[key] for key in answers if key[0] == one.request_id}, case.alone)


def test_with_a_warm_prefix_cache(case: Case) -> None:
    engine = case.harness.engine(chunk=64)
    assert same(case.harness.run(engine, case.requests), case.alone)
    again = [replace(request, request_id="again" + request.request_id) for request in case.requests]
    answers = case.harness.run(engine, again)
    assert sum(answer.num_cached for answer in answers.values()) > 64
    assert same({(name.removeprefix("again"), choice): a for (name, choice), a in answers.items()}, case.alone)


def test_under_forced_preemption(case: Case) -> None:
    longest = max(len(request.prompt) + request.max_tokens for request in case.requests)
    num_blocks = longest // case.harness.runner.info.block_size + 4
    engine = case.harness.engine(chunk=64, num_blocks=num_blocks)
    answers = case.harness.run(engine, case.requests)
    assert engine.stats().preemptions > 0
    assert same(answers, case.alone)


def test_resumed_after_a_restart(case: Case) -> None:
    resumed = []
    for index, request in enumerate(case.requests):
        alone = case.alone[request.request_id, 0]
        if index + 1 < len(alone.tokens):  # it had not ended by then
            known = ChoiceState(0, tuple(alone.tokens[: index + 1]), alone.sampler_states[index])
            resumed.append(replace(request, choices=(known,)))
    assert len(resumed) > len(case.requests) / 2
    answers = case.harness.run(case.harness.engine(chunk=64), resumed)
    for request in resumed:
        answer, expected = answers[request.request_id, 0], case.alone[request.request_id, 0]
        assert answer.tokens == expected.tokens
        assert answer.logprobs == expected.logprobs[len(request.choices[0].output) :]
        assert answer.finish_reason == expected.finish_reason


def test_choices_share_the_prompt_and_equal_each_alone(case: Case) -> None:
    _assert_equal_alone(case.harness, replace(case.requests[1], sampling=SamplingParams(seed=1), max_tokens=8))


def _assert_equal_alone(harness: Harness, request: EngineRequest) -> None:
    """Three choices of this request differ from each other, and equal each alone."""
    request = replace(request, choices=tuple(ChoiceState(index) for index in range(3)))
    together = harness.run(harness.engine(chunk=64), [request])
    assert len({tuple(answer.tokens) for answer in together.values()}) == 3
    for index in range(3):
        alone = harness.run(harness.engine(prefix_caching=False), [replace(request, choices=(ChoiceState(index),))])
        assert same({("", 0): together[request.request_id, index]}, {("", 0): alone[request.request_id, index]})


def test_the_state_of_the_sampler_matters_and_must_be_given(harness: Harness) -> None:
    sampling = SamplingParams(mirostat=Mirostat(tau=0.5, eta=0.5), seed=3)
    request = replace(make_requests(harness, 1, 10, 300)[0], sampling=sampling)
    alone = harness.run(harness.engine(), [request])["r0", 0]

    def resumed(state: float | None) -> Answer:
        known = replace(request, choices=(ChoiceState(0, tuple(alone.tokens[:5]), state),))
        return harness.run(harness.engine(), [known])["r0", 0]

    answer = resumed(alone.sampler_states[4])
    assert (answer.tokens, answer.sampler_states) == (alone.tokens, alone.sampler_states[5:])
    assert resumed(40.0).sampler_states != alone.sampler_states[5:]
    with pytest.raises(ValueError, match="resumed without sampler_state"):
        resumed(None)


def test_each_choice_has_a_state_of_the_sampler(harness: Harness) -> None:
    mirostat = SamplingParams(seed=6, mirostat=Mirostat(tau=3.0, eta=0.5))
    _assert_equal_alone(harness, replace(make_requests(harness, 1, 8, 300)[0], sampling=mirostat))


def test_among_199_others(load: Callable[..., Harness]) -> None:
    """Prompts are so short that all of them are in the first step."""
    harness = load("llama", "int8", max_num_seqs=200)
    requests = [replace(request, prompt=request.prompt[-2:]) for request in make_requests(harness, 200, 8, 3)]
    engine = harness.engine(max_num_seqs=200)
    together = harness.run(engine, requests)
    assert engine.stats().steps < 40
    for request in requests[3::17]:
        alone = harness.run(harness.engine(prefix_caching=False), [request])
        assert same(alone, together)


def test_the_number_of_threads_changes_nothing_where_a_model_runs_by_its_modules(load: Callable[..., Harness]) -> None:
    one, several = (load("jamba", "none", threads=threads) for threads in (1, 3))
    requests = make_requests(one, 6, 12, 150)
    together = several.run(several.engine(chunk=64), requests)
    assert same(one.run(one.engine(), requests), together)
    for request in requests[::2]:
        assert same(several.run(several.engine(prefix_caching=False), [request]), together)
