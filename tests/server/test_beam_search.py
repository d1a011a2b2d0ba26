"""Beam search in the API: what the engine is asked for, what comes back, and what is refused."""

from typing import Any

import httpx
import pytest

from model_runner.contract import SamplingParams, Speculation
from scheduler.interface import BeamScore, BeamSearch, EngineRequest, RequestOutput
from server.engine.beam_stop_strings import StopStringWatches
from server.text.tokenizer import Tokenizer
from tests.server import helpers
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, completion, events_of, refused


async def asked(client: httpx.AsyncClient, engine: FakeEngine, **fields: Any) -> EngineRequest:
    return await helpers.requested(client, engine, COMPLETIONS, completion(**fields))


@pytest.fixture
def scoring(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """An engine whose answers end like a beam search's."""
    step = FakeEngine._step

    def with_score(
        self: FakeEngine, request: EngineRequest, choice: int, tokens: list[int], position: int
    ) -> RequestOutput:
        output = step(self, request, choice, tokens, position)
        beam = BeamScore(-0.5 - choice, -2.0 - choice) if output.finish_reason else None
        return RequestOutput(**{name: getattr(output, name) for name in RequestOutput.__slots__} | {"beam": beam})

    monkeypatch.setattr(FakeEngine, "_step", with_score)
    return engine


async def test_both_ways_to_ask(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    request = await asked(client, engine, beam_search={"width": 4})
    assert request.beam_search == BeamSearch(4)
    assert [choice.index for choice in request.choices] == [0]
    request = await asked(
        client,
        engine,
        stop=["x"],
        skip_special_tokens=False,
        beam_search={
            "width": 6, "length_penalty": 0.5, "early_stopping": "never", "num_return": 2, "groups": 3,
            "diversity_penalty": 0.25,
        },
    )  # fmt: skip
    assert request.beam_search == BeamSearch(6, 0.5, "never", 3, 0.25, ("x",), skip_special_tokens=False)
    assert [choice.index for choice in request.choices] == [0, 1]
    request = await asked(client, engine, use_beam_search=True, n=3, length_penalty=0.0, early_stopping=True)
    assert request.beam_search == BeamSearch(3, 0.0, early_stopping=True)
    assert [choice.index for choice in request.choices] == [0, 1, 2]


@pytest.mark.parametrize(
    "fields", [{"beam_search": {"width": 4, "num_return": 3}}, {"use_beam_search": True, "n": 3}], ids=["own", "vllm"]
)
async def test_a_best_of_that_asks_for_nothing_takes_no_answers_away(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    body = completion(prompt=["a", "bb"], echo=True, best_of=1, **fields)
    choices = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert [len(request.choices) for request in engine.requests] == [3, 3]
    assert [choice["text"][0] for choice in choices] == ["a", "a", "a", "b", "b", "b"]


async def test_one_beam_is_greedy_decoding(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for fields in ({"beam_search": {"width": 1}}, {"use_beam_search": True}):
        request = await asked(client, engine, **fields)
        assert (request.beam_search, request.sampling.temperature) == (None, 0.0)


async def test_nothing_is_drawn_and_nothing_is_guessed(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await asked(client, engine)).speculation == Speculation("auto")
    request = await asked(client, engine, beam_search={"width": 2}, temperature=0, repetition_penalty=1.5)
    assert request.speculation is None
    assert request.sampling.temperature == 0
    assert request.sampling.repetition_penalty == 1.5


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_choices_say_how_they_compare(client: httpx.AsyncClient, scoring: FakeEngine, path: str) -> None:
    body = (chat if path == CHAT else completion)(beam_search={"width": 3, "num_return": 2})
    choices = (await client.post(path, json=body)).json()["choices"]
    assert [(choice["score"], choice["cumulative_logprob"]) for choice in choices] == [(-0.5, -2.0), (-1.5, -3.0)]
    chunks = events_of((await client.post(path, json={**body, "stream": True})).text)
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert {choice["index"]: choice["score"] for choice in ends} == {0: -0.5, 1: -1.5}


async def test_other_answers_have_no_score(client: httpx.AsyncClient) -> None:
    (choice,) = (await client.post(COMPLETIONS, json=completion())).json()["choices"]
    assert not {"score", "cumulative_logprob"} & choice.keys()


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"beam_search": {}}, "beam_search.width", "missing_required_parameter"),
        ({"beam_search": {"width": 0}}, "beam_search.width", "integer_below_min_value"),
        ({"beam_search": {"width": 65}}, "beam_search.width", "integer_above_max_value"),
        ({"beam_search": {"width": 9}}, "beam_search.width", "integer_above_max_value"),  # the server runs 8 at a time
        ({"use_beam_search": True, "n": 9}, "n", "integer_above_max_value"),
        ({"use_beam_search": True, "n": 65}, "n", "integer_above_max_value"),
        ({"beam_search": {"width": 4, "groups": 2}}, "beam_search.diversity_penalty", "invalid_value"),
        ({"beam_search": {"width": 4, "early_stopping": 1}}, "beam_search.early_stopping", "invalid_type"),
        ({"beam_search": {"width": 4}, "best_of": 2}, "beam_search", "invalid_parameter_combination"),
        ({"beam_search": {"width": 2, "num_return": 3}}, "beam_search.num_return", "integer_above_max_value"),
        ({"beam_search": {"width": 4, "groups": 3}}, "beam_search.groups", "invalid_value"),
        ({"beam_search": {"width": 4, "diversity_penalty": 1}}, "beam_search.diversity_penalty", "invalid_value"),
        ({"beam_search": {"width": 4, "early_stopping": "soon"}}, "beam_search.early_stopping", "invalid_value"),
        ({"beam_search": {"width": 4, "length_penalty": 11}}, "beam_search.length_penalty", "decimal_above_max_value"),
        ({"beam_search": {"witdh": 4}}, "beam_search.witdh", "unknown_parameter"),
        ({"beam_search": 4}, "beam_search", "invalid_type"),
        ({"beam_search": {"width": 2}, "max_tokens": 0}, "max_tokens", "integer_below_min_value"),
        ({"beam_search": {"width": 2}, "prompt": [1] * 200, "max_tokens": 56}, None, None),
        ({"beam_search": {"width": 8}, "prompt": [1] * 200, "max_tokens": 56}, "prompt", "context_length_exceeded"),
        ({"beam_search": {"width": 8}, "prompt": ["x"] * 200}, "beam_search.width", "integer_above_max_value"),
        ({"length_penalty": 2.0}, "length_penalty", "invalid_value"),
        ({"early_stopping": True}, "early_stopping", "invalid_value"),
    ],
)
async def test_sizes(client: httpx.AsyncClient, fields: dict[str, Any], param: str | None, code: str | None) -> None:
    if code is None:
        assert (await client.post(COMPLETIONS, json=completion(**fields))).status_code == 200
    else:
        await refused(client, COMPLETIONS, completion(**fields), param, code)


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.1}, {"typical_p": 0.5}, {"n": 2},
        {"speculation": {"method": "suffix"}}, {"use_beam_search": True},
    ],
)  # fmt: skip
async def test_what_it_cannot_go_together_with(client: httpx.AsyncClient, other: dict[str, Any]) -> None:
    body = completion(beam_search={"width": 2}, **other)
    message = await refused(client, COMPLETIONS, body, "beam_search", "invalid_parameter_combination")
    assert f"'{next(iter(other))}'" in message


async def test_values_that_ask_for_nothing_do_no_harm(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    nothing = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "typical_p": 1, "n": 1, "speculation": "off"}
    assert (await asked(client, engine, beam_search={"width": 2}, **nothing)).beam_search == BeamSearch(2)


# -- stop strings as the engine sees them ------------------------------------------------------------------------------


def watch_of(tokenizer: Tokenizer, *stop: str, min_tokens: int = 0) -> Any:
    sampling = SamplingParams(min_tokens=min_tokens)
    request = EngineRequest("a", (104,), sampling, 9, beam_search=BeamSearch(2, stop=stop))
    return StopStringWatches(lambda: tokenizer)(request)


def test_a_stop_string_is_found_with_its_last_token(tokenizer: Tokenizer) -> None:
    watch = watch_of(tokenizer, "abc")
    assert [watch.push(ord(letter)) for letter in "xababc"] == [False] * 5 + [True]


def test_forks_go_their_own_ways(tokenizer: Tokenizer) -> None:
    watch = watch_of(tokenizer, "ab")
    watch.push(ord("a"))
    fork = watch.fork()
    assert not watch.push(ord("x"))
    assert not watch.push(ord("b"))
    assert fork.push(ord("b"))


def test_strings_within_the_least_tokens_do_not_count(tokenizer: Tokenizer) -> None:
    watch = watch_of(tokenizer, "a", min_tokens=2)
    assert [watch.push(ord(letter)) for letter in "aaa"] == [False, False, True]
