"""`best_of`: more completions than the answer has, and the most probable of them."""

from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine, letters, logprob_of
from tests.server.helpers import COMPLETIONS, completion, events_of, refused


async def answer(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(COMPLETIONS, json=completion(seed=5, return_token_ids=True, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def means(engine: FakeEngine, prompt: int, count: int) -> list[float]:
    """The mean logprob of each choice of a prompt, by its index."""
    outputs = (letters(engine.requests[prompt], choice) for choice in range(count))
    return [sum(logprob_of(t, place) - 10 for place, t in enumerate(tokens)) / len(tokens) for tokens in outputs]


async def test_the_best_choices_come_in_descending_order(client: httpx.AsyncClient, engine: FakeEngine):
    body = await answer(client, prompt=["one", "two"], n=2, best_of=6)
    assert [len(request.choices) for request in engine.requests] == [6, 6]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    for prompt in range(2):
        mean = means(engine, prompt, 6)
        best = sorted(range(6), key=lambda choice: -mean[choice])[:2]
        shown = [choice["token_ids"] for choice in body["choices"][2 * prompt : 2 * prompt + 2]]
        assert shown == [letters(engine.requests[prompt], choice) for choice in best]
        assert best != [0, 1]
    assert body["usage"]["completion_tokens"] == 2 * 6 * 5
    assert body["usage"]["prompt_tokens"] == 6


async def test_the_mean_is_over_each_choice_s_own_tokens(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = lambda request, choice: [[65, 66, 301], [67], [68, 301]][choice]
    outputs = [[65, 66, 301], [67] * 9, [68, 301]]
    mean = [sum(logprob_of(t, place) for place, t in enumerate(tokens)) / len(tokens) for tokens in outputs]
    body = await answer(client, n=3, best_of=3, max_tokens=9)
    assert [choice["token_ids"] for choice in body["choices"]] == outputs  # nothing is left out, so in their order
    for wanted in (1, 2):
        body = await answer(client, n=wanted, best_of=3, max_tokens=9)
        ranked = sorted(range(3), key=lambda choice: -mean[choice])[:wanted]
        assert [choice["token_ids"] for choice in body["choices"]] == [outputs[choice] for choice in ranked]


async def test_equals_go_to_the_lower_index(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = lambda request, choice: [65 + choice]
    body = await answer(client, best_of=4, max_tokens=0)
    assert [choice["text"] for choice in body["choices"]] == [""]
    engine.script = lambda request, choice: [65]
    body = await answer(client, n=2, best_of=4, echo=True)
    assert [choice["text"] for choice in body["choices"]] == ["hiAAAAA"] * 2


@pytest.mark.parametrize(("fields", "asked"), [({}, 0), ({"logprobs": 2}, 2), ({"best_of": 1}, None), ({"n": 3}, None)])
async def test_logprobs_are_asked_for_where_needed_and_shown_where_wanted(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], asked: int | None
):
    body = await answer(client, **{"best_of": 3, **fields})
    assert engine.requests[0].sampling.logprobs == asked
    assert all((choice["logprobs"] is not None) == ("logprobs" in fields) for choice in body["choices"])


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"best_of": 0}, "best_of", "integer_below_min_value"),
        ({"best_of": 21}, "best_of", "integer_above_max_value"),
        ({"best_of": 1, "n": 2}, "best_of", "integer_below_min_value"),
        ({"best_of": True}, "best_of", "invalid_type"),
        ({"best_of": 2.0}, "best_of", "invalid_type"),
        ({"best_of": 2, "stream": True}, "best_of", "invalid_parameter_combination"),
        ({"best_of": 20, "prompt": ["a"] * 1000}, "best_of", "integer_above_max_value"),
    ],
)
async def test_what_does_not_fit_is_refused(client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    assert "'best_of'" in await refused(client, COMPLETIONS, completion(**fields), param, code) or "prompt" in fields


async def test_a_stream_of_all_choices_is_the_answer_as_a_whole(client: httpx.AsyncClient):
    fields = completion(seed=5, n=2, best_of=2)
    whole = (await client.post(COMPLETIONS, json=fields)).json()
    texts = ["", ""]
    for event in events_of((await client.post(COMPLETIONS, json={**fields, "stream": True})).text):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
