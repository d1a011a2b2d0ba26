"""Outputs that a grammar holds: always its language, and the same however they come about."""

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from model_runner.contract import SamplingParams
from scheduler.interface import ChoiceState, EngineRequest, FinishReason
from tests import tiny_vocabulary
from tests.conftest import VOCAB_SIZE
from tests.engine.conftest import Answer, Harness

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
    small = harness.engine(chunk=16, num_blocks=5)
    assert harness.run(small, requests) == expected
    assert small.stats().preemptions > 0
    for one in requests:
        answer = expected[one.request_id, 0]
        resumed = replace(one, choices=(ChoiceState(0, tuple(answer.tokens[:5])),))
        assert harness.run(harness.engine(), [resumed])[one.request_id, 0].tokens == answer.tokens
