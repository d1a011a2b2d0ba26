"""LangChain's chat models, for OpenAI's API and for Ollama's, on the embedded model."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.served.conftest import Server

langchain_openai = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")
pytestmark = pytest.mark.embedded

CALL = {"name": "Weather", "args": {"city": "Oslo", "unit": "C"}, "id": "call00001"}
ASKED = "What is the weather in Oslo? Answer as JSON with city and unit."


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: Literal["Rome", "Oslo"] = Field(description="Where.")
    unit: Literal["C", "F"]


@pytest.fixture
def model(server: Server) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.address}/v1", api_key="none", model="SmolLM2-135M-Instruct", max_tokens=80, seed=3,
        max_retries=0,
    )  # fmt: skip


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: Any, method: str) -> None:
    assert isinstance(model.with_structured_output(Weather, method=method).invoke(ASKED), Weather)


def test_any_json(model: Any) -> None:
    """Held to JSON, and to no schema, so that a small model may not come to its end."""
    try:
        found = json.dumps(model.with_structured_output(None, method="json_mode").invoke(ASKED))
    except openai.LengthFinishReasonError as error:
        found = error.completion.choices[0].message.content or ""
    assert found.lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["any", "Weather"])
def test_calls_whole_and_streamed(model: Any, choice: str) -> None:
    bound = model.bind_tools([Weather], tool_choice=choice, strict=True)
    answer = bound.invoke(ASKED)
    assert answer.content == ""
    assert answer.invalid_tool_calls == []
    pieces: Iterator[Any] = bound.stream(ASKED)
    streamed = next(pieces)
    for piece in pieces:
        streamed += piece
    assert [call["args"] for call in streamed.tool_calls] == [call["args"] for call in answer.tool_calls] != []
    assert all(Weather.model_validate(call["args"]) and call["id"] for call in answer.tool_calls)


def test_the_result_of_a_call(model: Any) -> None:
    history: list[Any] = [messages.SystemMessage("Be brief."), messages.HumanMessage(ASKED)]
    history.append(model.bind_tools([Weather], tool_choice="any").invoke(history))
    history += [messages.ToolMessage("4 degrees", tool_call_id=call["id"]) for call in history[-1].tool_calls]
    assert model.bind_tools([Weather], tool_choice="none").invoke(history).content


@pytest.fixture
def ollama_model(server: Server) -> Any:
    chat = pytest.importorskip("langchain_ollama").ChatOllama
    model = "SmolLM2-135M-Instruct"
    return chat(
        base_url=server.address, model=model, validate_model_on_init=True, num_predict=80, num_ctx=4096, seed=3,
        keep_alive="5m",
    )  # fmt: skip


def test_ollamas_chat_model(ollama_model: Any) -> None:
    whole = ollama_model.invoke(ASKED)
    pieces = list(ollama_model.stream(ASKED))
    assert "".join(piece.content for piece in pieces) == whole.content != ""
    assert whole.usage_metadata["output_tokens"] == whole.response_metadata["eval_count"] > 0


def test_ollamas_structured_output_and_calls(ollama_model: Any) -> None:
    assert isinstance(ollama_model.with_structured_output(Weather, method="json_schema").invoke(ASKED), Weather)
    history: list[Any] = [messages.HumanMessage(ASKED), messages.AIMessage("", tool_calls=[CALL])]
    history.append(messages.ToolMessage("4 degrees", tool_call_id=CALL["id"]))
    assert ollama_model.bind_tools([Weather]).invoke(history).content
