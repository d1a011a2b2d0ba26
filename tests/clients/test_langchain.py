"""LangChain's chat model on the embedded model."""

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
