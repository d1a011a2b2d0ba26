"""Outputs that a grammar holds: always its language, and the same however they come about."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import regex

from model_runner.contract import Contrastive, DoLa, Dry, Mirostat, SamplingParams, Speculation, Xtc
from scheduler.interface import BeamSearch, ChoiceState, EngineRequest, FinishReason
from tests import tiny_vocabulary
from tests.conftest import VOCAB_SIZE
from tests.engine.conftest import SMALL_VOCAB, Answer, Harness
from tests.engine.tiny_heads import write_eagle3

HEAD = '%llguidance {"no_forcing": true}\n'
SCHEMA = {
    "type": "object",
    "properties": {"ab": {"enum": ["a", "b", "ab"]}, "n": {"type": "integer"}, "l": {"type": "array", "items": {}}},
    "required": ["ab", "n", "l"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = f"{HEAD}start: %json {json.dumps(SCHEMA)}"
REGEX = HEAD + r"start: /(ab|ba){12,20}[0-9]+e/"
SAMPLED = SamplingParams(temperature=2.0, seed=3, stop_token_ids=(tiny_vocabulary.EOS,), logprobs=1)


def request(name: str, **changes: object) -> EngineRequest:
    sampling = replace(SAMPLED, **{"grammar": REGEX, **changes})
    return EngineRequest(name, (4, 5, 6), sampling, 100)


def text_of(answer: Answer) -> str:
    return tiny_vocabulary.tokenizer(VOCAB_SIZE).decode(answer.tokens)


def is_right(answer: Answer) -> bool:
    """Whether the output is in the language of REGEX, or cut off."""
    return answer.finish_reason is FinishReason.LENGTH or bool(re.fullmatch(r"(ab|ba){12,20}[0-9]+e", text_of(answer)))


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_outputs_are_in_the_language_beside_others_that_are_free(
    temperature: float, load: Callable[..., Harness]
) -> None:
    harness = load("llama")
    held = [request(f"held{seed}", seed=seed, temperature=temperature) for seed in range(6)]
    free = [request(f"free{seed}", seed=seed, temperature=temperature, grammar=None) for seed in range(3)]
    answers = harness.run(harness.engine(), [*held, *free])
    assert all(is_right(answers[one.request_id, 0]) for one in held)
    assert not any(re.fullmatch(r"(ab|ba){12,20}[0-9]+e", text_of(answers[one.request_id, 0])) for one in free)
    for one in [*held, *free]:
        assert harness.run(harness.engine(), [one])[one.request_id, 0].tokens == answers[one.request_id, 0].tokens


def test_preempted_chunked_or_resumed_it_goes_on_as_if_nothing_had_been(load: Callable[..., Harness]) -> None:
    harness = load("llama")
    requests = [request(f"r{seed}", seed=seed, grammar=(REGEX, JSON)[seed % 2]) for seed in range(6)]
    expected = harness.run(harness.engine(), requests)
    small = harness.engine(chunk=16, num_blocks=4)
    assert harness.run(small, requests) == expected
    assert small.stats().preemptions > 0
    for one in requests:
        answer = expected[one.request_id, 0]
        resumed = replace(one, choices=(ChoiceState(0, tuple(answer.tokens[:5])),))
        assert harness.run(harness.engine(), [resumed])[one.request_id, 0].tokens == answer.tokens


# -- together with every other setting ---------------------------------------------------------------------------------

WORDS = HEAD + r"start: /(ab|ba){2,8}[0-3]{1,3}e/"
OBJECT = HEAD + "start: %json " + json.dumps(
    {
        "type": "object",
        "properties": {"ab": {"enum": ["a", "b", "ab"]}, "n": {"type": "integer", "minimum": 0, "maximum": 333}},
        "required": ["ab", "n"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)  # fmt: skip
JUDGES = {
    WORDS: regex.compile(r"(ab|ba){2,8}[0-3]{1,3}e"),
    OBJECT: regex.compile(r'\{"ab":"(?:a|b|ab)","n":(?:[0-9]|[1-9][0-9]|[12][0-9][0-9]|3[0-2][0-9]|33[0-3])\}'),
}


def ids(text: str) -> tuple[int, ...]:
    return tuple(tiny_vocabulary.tokenizer(VOCAB_SIZE).encode(text).ids)


A, B, E = ids("abe")
STOPS = (tiny_vocabulary.EOS,)


@dataclass(frozen=True)
class Pair:
    """Settings combined with a grammar, and the result."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    num_choices: int = 1
    blames: str = ""
    """The field that may leave no token."""
    always_fails: bool = False


GREEDY = {"temperature": 0.0}
PAIRS = {
    "logprobs": Pair({"logprobs": 5}),
    "prompt_logprobs": Pair({"prompt_logprobs": 1}),
    "a bias against what must come": Pair({"logit_bias": ((A, -100.0), (E, -100.0), *((t, -100.0) for t in STOPS))}),
    "a bias for what must not come": Pair({"logit_bias": ((STOPS[0], 100.0), (30, 100.0), (1, 100.0))}),
    "allowed_token_ids with all that is needed": Pair({"allowed_token_ids": (*STOPS, *ids('{}":,abn0123e'))}),
    "allowed_token_ids without the end": Pair(
        {"allowed_token_ids": ids('{}":,abn0123e')}, blames="allowed_token_ids", always_fails=True
    ),
    "allowed_token_ids that never fit": Pair(
        {"allowed_token_ids": (30, 31)}, blames="allowed_token_ids", always_fails=True
    ),
    "bad_words": Pair({"bad_words": (ids("ab"), ids("a"), ids('":'))}, blames="bad_words"),
    "bad_words of all marks": Pair(
        {"bad_words": tuple((token,) for token in range(VOCAB_SIZE) if token not in STOPS)},
        blames="bad_words", always_fails=True,
    ),
    "min_tokens that the language cannot reach": Pair({"min_tokens": 60}),
    "min_tokens and a ban of the end": Pair({"min_tokens": 60, "bad_words": (STOPS,)}),
    "a stop token that is text": Pair({"stop_token_ids": (*STOPS, A, ids("1")[0])}, blames="stop_token_ids"),
    "several stop tokens": Pair({"stop_token_ids": (0, 1, *STOPS)}),
    "no_repeat_ngram_size of one": Pair({"no_repeat_ngram_size": 1}, blames="no_repeat_ngram_size"),
    "no_repeat_ngram_size": Pair({"no_repeat_ngram_size": 3}, blames="no_repeat_ngram_size"),
    "penalties": Pair({"repetition_penalty": 1.8, "frequency_penalty": 2.0, "presence_penalty": -2.0}),
    "dry, growing end": Pair({"dry": Dry(2.0), "exponential_decay_length_penalty": (2, 1.9)}),
    "greedy": Pair(GREEDY),
    "temperature": Pair({"temperature": 0.3}),
    "top_k": Pair({"top_k": 1}),
    "top_p": Pair({"top_p": 0.3}),
    "min_p": Pair({"min_p": 0.9}),
    "cutoffs": Pair({"top_n_sigma": 0.5, "eta_cutoff": 0.5, "epsilon_cutoff": 0.5, "typical_p": 0.2}),
    "xtc": Pair({"xtc": Xtc(1.0, 0.001)}),
    "mirostat": Pair({"mirostat": Mirostat(tau=1.0)}),
    "own order": Pair({"top_p": 0.5, "top_k": 4, "sampler_order": ("top_k", "top_p", "temperature")}),
    "n": Pair(num_choices=3),
    "contrastive search": Pair({**GREEDY, "penalty_alpha": 0.6, "top_k": 4}),
    "contrastive search, n-grams": Pair(
        {**GREEDY, "penalty_alpha": 0.6, "top_k": 3, "no_repeat_ngram_size": 2}, blames="no_repeat_ngram_size"
    ),
    "guidance": Pair({"guidance": 1.5}, {"guide": (7, 8, 9)}),
    "guidance away": Pair({"guidance": 0.0}, {"guide": (9,)}),
    "DoLa": Pair({"dola": DoLa("low")}),
    "DoLa of all": Pair({"dola": DoLa("high", alpha=0.0)}),
    "contrastive decoding": Pair({"contrastive": Contrastive()}),
    "contrastive decoding of the most probable": Pair({"contrastive": Contrastive(alpha=1.0)}),
    "speculation": Pair(request={"speculation": Speculation("auto", 6)}, num_choices=2),
}  # fmt: skip


def paired(name: str, grammar: str, seed: int, pair: Pair) -> EngineRequest:
    sampling = replace(SAMPLED, grammar=grammar, seed=seed, **pair.sampling)
    choices = tuple(ChoiceState(choice) for choice in range(pair.num_choices))
    return EngineRequest(name, (4, 5, 6, *ids("ab") * 6), sampling, 40, choices, **pair.request)


def check(answer: Answer, grammar: str, pair: Pair) -> None:
    """It is in the language, or begins a text of it and says why it is not complete."""
    spelled = tiny_vocabulary.spelled(VOCAB_SIZE)
    text = b"".join(spelled[token] for token in answer.tokens).decode()
    if answer.finish_reason is FinishReason.STOP:
        text = text.removesuffix(spelled[answer.tokens[-1]].decode())
        assert JUDGES[grammar].fullmatch(text), text
    else:
        assert JUDGES[grammar].fullmatch(text, partial=True), text
    if answer.error is not None:
        assert answer.error.by_request
        assert pair.blames
        assert {"grammar", pair.blames} <= set(answer.error.message.rpartition(": ")[2].split(", "))
    assert (answer.finish_reason is FinishReason.ERROR) == (answer.error is not None)
    assert answer.error is not None or not pair.always_fails


@pytest.mark.parametrize("name", PAIRS)
def test_beside_every_other_setting(name: str, load: Callable[..., Harness]) -> None:
    """Alone, in a crowd, preempted and resumed."""
    harness, pair = load("llama"), PAIRS[name]
    held = [paired(f"held{seed}", (WORDS, OBJECT)[seed % 2], seed, pair) for seed in range(4)]
    crowd = [replace(SAMPLED, seed=seed, logprobs=None, stop_token_ids=()) for seed in range(3)]
    others = [EngineRequest(f"free{one.seed}", (7, 8), one, 80) for one in crowd]  # which outgrow few blocks
    expected = harness.run(harness.engine(), [*held, *others], may_fail=True)
    for one in held:
        for choice in one.choices:
            check(expected[one.request_id, choice.index], str(one.sampling.grammar), pair)
    assert not any(expected[one.request_id, 0].error for one in others)
    small = harness.engine(chunk=16, num_blocks=7 if "guide" in pair.request else 5)
    again = harness.run(small, [*held, *others], may_fail=True)
    assert small.stats().preemptions > 0
    assert {key: outcome(answer) for key, answer in again.items()} == {
        key: outcome(answer) for key, answer in expected.items()
    }
    for one in held[:2]:
        alone = harness.run(harness.engine(), [one], may_fail=True)
        answers = {key: expected[key] for key in alone}
        assert {key: outcome(answer) for key, answer in alone.items()} == {
            key: outcome(answer) for key, answer in answers.items()
        }
        begun = [ChoiceState(key[1], *beginning(answer)) for key, answer in alone.items()]
        resumed = harness.run(harness.engine(), [replace(one, choices=tuple(begun))], may_fail=True)
        assert {key: outcome(answer) for key, answer in resumed.items()} == {
            key: outcome(answer) for key, answer in alone.items()
        }


def outcome(answer: Answer) -> tuple[object, ...]:
    return answer.tokens, answer.finish_reason, answer.error


def beginning(answer: Answer) -> tuple[tuple[int, ...], float | None]:
    """Some of its tokens, and what the sampler knew after them."""
    num_tokens = len(answer.tokens) // 2
    is_single = len(answer.sampler_states) >= len(answer.tokens)
    return tuple(answer.tokens[:num_tokens]), answer.sampler_states[
        num_tokens - 1
    ] if num_tokens and is_single else None


@pytest.mark.parametrize("grammar", [WORDS, OBJECT])
@pytest.mark.parametrize(
    "beams", [BeamSearch(4), BeamSearch(6, groups=3, diversity_penalty=2.0), BeamSearch(3, early_stopping=True)]
)
def test_all_that_beam_search_finds_is_in_the_language(
    grammar: str, beams: BeamSearch, load: Callable[..., Harness]
) -> None:
    harness, pair = load("llama"), Pair(GREEDY, {"beam_search": beams}, num_choices=3)
    one = paired("beams", grammar, 1, pair)
    found = harness.run(harness.engine(), [one])
    for answer in found.values():
        check(answer, grammar, pair)
    assert len({tuple(answer.tokens) for answer in found.values()}) == 3
    again = harness.run(harness.engine(chunk=16, num_blocks=16), [one, request("beside"), request("beside2", seed=4)])
    assert {key: outcome(again[key]) for key in found} == {key: outcome(answer) for key, answer in found.items()}


def test_beams_for_which_no_token_is_left_end(load: Callable[..., Harness]) -> None:
    harness = load("llama")
    pair = Pair({**GREEDY, "allowed_token_ids": ids("ab0")}, {"beam_search": BeamSearch(3)}, num_choices=2)
    answers = harness.run(harness.engine(), [paired("beams", WORDS, 1, pair), request("beside")], may_fail=True)
    for choice in range(2):
        error = answers["beams", choice].error
        assert error is not None
        assert (error.message, error.by_request) == (
            "beam search found only 0 of 2 sequences with these settings: allowed_token_ids, grammar",
            True,
        )
    assert is_right(answers["beside", 0])


@pytest.fixture(scope="module")
def drafting(load_drafting: Callable[..., Harness]) -> Iterator[Harness]:
    harness = load_drafting(write_eagle3)
    yield harness
    harness.forget()


@pytest.mark.parametrize("verify", ["match", "rejection", "typical"])
def test_however_drafts_are_verified(verify: str, drafting: Harness) -> None:
    """Heads draw at random in one of them, and do not know of the grammar."""
    grammar = HEAD + r"start: /(ab|ba){2,8}[0-3]{1,3}e/"
    methods = [method for method in drafting.runner.info.speculation_methods if method != "prediction"]
    requests = [
        EngineRequest(
            f"{method} {seed}", (4, 5, 6, *ids("ab") * 6),
            replace(SAMPLED, grammar=grammar, seed=seed, logprobs=None), 60,
            speculation=Speculation(method, 6, verify=verify),
        )
        for method in methods for seed in range(3)
    ]  # fmt: skip
    answers = drafting.run(drafting.engine(), requests)
    texts = set()
    spelled = tiny_vocabulary.spelled(SMALL_VOCAB)
    for answer in answers.values():
        assert answer.finish_reason is FinishReason.STOP
        texts.add(b"".join(spelled[token] for token in answer.tokens).decode())
    assert all(JUDGES[WORDS].fullmatch(text) for text in texts)
    assert sum(answer.num_accepted for answer in answers.values()) > 0
    assert len(texts) > 1


def test_a_grammar_that_does_not_compile_fails_alone(load: Callable[..., Harness]) -> None:
    harness = load("llama")
    requests = [request("good"), request("bad", grammar="start: nope"), request("free", grammar=None)]
    answers = harness.run(harness.engine(), requests, may_fail=True)
    assert answers["bad", 0].error is not None
    assert answers["bad", 0].error.by_request
    assert is_right(answers["good", 0])
    assert answers["free", 0].error is None
