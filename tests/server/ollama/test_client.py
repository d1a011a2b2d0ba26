"""Ollama's own client for Python: whatever it asks for, it understands the answer, streamed or not."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from server.engine.client import QueueFullError
from server.errors import RequestTimeoutError
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import says, serving
from tests.server.test_reasoning import COLOUR, THOUGHT
from tests.server.test_tools import written

HI = [{"role": "user", "content": "hi"}]
FEW = {"num_predict": 8, "seed": 3}


@pytest.fixture
def official(
    make_app: Callable[..., FastAPI], thinking_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ollama.Client]:
    """The client, with a key, of a model that can think."""
    monkeypatch.setenv("OLLAMA_API_KEY", "right")
    with serving(make_app(thinking_folder, api_key="right")) as address, ollama.Client(host=address) as client:
        yield client


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: Where.
    """
    return f"Rain in {city}."


def streamed(client: ollama.Client, **fields: Any) -> dict[str, Any]:
    """The message and the end that the pieces of a chat make."""
    made: dict[str, Any] = {"content": "", "thinking": "", "tool_calls": []}
    for part in client.chat("tiny", stream=True, **fields):
        made["content"] += part.message.content or ""
        made["thinking"] += part.message.thinking or ""
        made["tool_calls"] += [call.function.model_dump() for call in part.message.tool_calls or ()]
    return {**made, "reason": part.done_reason, "counts": (part.prompt_eval_count, part.eval_count)}


def whole(client: ollama.Client, **fields: Any) -> dict[str, Any]:
    answer = client.chat("tiny", **fields)
    calls = [call.function.model_dump() for call in answer.message.tool_calls or ()]
    made = {"content": answer.message.content, "thinking": answer.message.thinking or "", "tool_calls": calls}
    return {**made, "reason": answer.done_reason, "counts": (answer.prompt_eval_count, answer.eval_count)}


def both(client: ollama.Client, **fields: Any) -> dict[str, Any]:
    made = whole(client, **fields)
    assert streamed(client, **fields) == made
    return made


def test_a_text(official: ollama.Client, engine: FakeEngine) -> None:
    engine.script = says("Hé\u2028there.")
    made = both(official, messages=HI)
    assert (made["content"], made["reason"]) == ("Hé\u2028there.", "stop")
    assert made["counts"] == (len(engine.requests[-1].prompt), len("Hé\u2028there.".encode()) + 1)
    assert both(official, messages=HI, options={"num_predict": 3})["reason"] == "length"


@pytest.mark.parametrize("per_step", [1, 7, 500])
def test_thinking_and_tools(official: ollama.Client, engine: FakeEngine, per_step: int) -> None:
    text = f"<think>{THOUGHT}</think>Well.{written('weather', city='Rome')}{written('weather', city='Øslo')}"
    engine.script, engine.tokens_per_step = says(text), per_step
    made = both(official, messages=HI, tools=[weather], think=True, options={"seed": 1})
    assert (made["thinking"], made["content"].strip()) == (THOUGHT, "Well.")
    assert made["tool_calls"] == [{"name": "weather", "arguments": {"city": city}} for city in ("Rome", "Øslo")]
    assert made["reason"] == "stop"


def test_the_result_of_a_call(official: ollama.Client, engine: FakeEngine) -> None:
    engine.script = says(written("weather", city="Rome"))
    answer = official.chat("tiny", HI, tools=[weather])
    (call,) = answer.message.tool_calls or ()
    result = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
    engine.script = says("It rains.")
    assert official.chat("tiny", [*HI, answer.message, result], tools=[weather]).message.content == "It rains."


def test_a_schema(official: ollama.Client, engine: FakeEngine) -> None:
    class Colour(BaseModel):
        c: str

    engine.script = says('{"c": "red"}')
    made = both(official, messages=HI, format=Colour.model_json_schema(), options=FEW | {"num_predict": 50})
    assert Colour.model_validate_json(made["content"]).c == "red"
    assert engine.requests[-1].sampling.grammar is not None
    official.chat("tiny", HI, format=COLOUR, think=False)
    official.chat("tiny", HI, format="json")
    assert engine.requests[-1].sampling.grammar != engine.requests[-2].sampling.grammar is not None


def test_generate(official: ollama.Client, engine: FakeEngine) -> None:
    made = official.generate("tiny", "hi", system="Be brief.", options=FEW)
    pieces = list(official.generate("tiny", "hi", system="Be brief.", options=FEW, stream=True))
    assert "".join(piece.response for piece in pieces) == made.response != ""
    assert (pieces[-1].done_reason, pieces[-1].eval_count) == (made.done_reason, made.eval_count) == ("length", 8)
    raw = official.generate("tiny", "hi", raw=True, options=FEW)
    assert engine.requests[-1].prompt == tuple(b"hi")
    assert raw.response != made.response
    engine.script = says(f"<think>{THOUGHT}</think>Yes.")
    assert official.generate("tiny", "hi").thinking == THOUGHT


def test_log_probabilities(official: ollama.Client, engine: FakeEngine) -> None:
    engine.script = says("ab")
    fields: dict[str, Any] = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    tokens = official.chat("tiny", **fields).logprobs or ()
    assert [token.token for token in tokens][:2] == ["a", "b"]
    assert all(len(token.top_logprobs or ()) == 2 for token in tokens)
    pieces = [token for part in official.chat("tiny", stream=True, **fields) for token in part.logprobs or ()]
    assert pieces == list(tokens)


def test_vectors(official: ollama.Client) -> None:
    made = official.embed("tiny", ["one", "two"])
    assert made.prompt_eval_count == 6
    assert made.embeddings == [official.embed("tiny", text).embeddings[0] for text in ("one", "two")]
    assert len(official.embeddings("tiny", "one").embedding) == 16
    assert official.embed("tiny", []).embeddings == official.embeddings("tiny").embedding == []


def test_loads(official: ollama.Client) -> None:
    assert official.chat("tiny", []).done_reason == official.generate("tiny", keep_alive=0).done_reason == "load"


@pytest.mark.parametrize("stream", [False, True])
def test_errors(official: ollama.Client, engine: FakeEngine, stream: bool) -> None:
    def refused(status: int, model: str = "tiny", **fields: Any) -> str:
        with pytest.raises(ollama.ResponseError) as raised:
            list(official.chat(model, HI, stream=stream, **fields))
        assert raised.value.status_code == status
        return raised.value.error

    assert refused(404, "phi") == "model 'phi' not found"
    assert "Did you mean 'temperature'?" in refused(400, options={"temprature": 1})
    engine.refuse = QueueFullError()
    assert refused(429).startswith("The server's queue is full.")
    engine.refuse, engine.fail_after, engine.failure = None, 2, RequestTimeoutError("Too slow.")
    assert refused(-1 if stream else 504) == "Too slow."
    with pytest.raises(ollama.ResponseError, match="cannot add, change or remove models") as raised:
        list(official.pull("phi", stream=stream))
    assert raised.value.status_code == 404
    official._client.headers["authorization"] = "Bearer wrong"
    assert refused(401) == "Incorrect API key provided."
