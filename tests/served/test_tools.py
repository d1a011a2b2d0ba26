"""Tools called by the embedded model, through the helpers of the official client.

The model is too small to choose well, so it is made to call; what it writes is held to the schemas.
"""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.served.conftest import Server

pytestmark = pytest.mark.embedded

MODEL = "SmolLM2-135M-Instruct"


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: Literal["Rome", "Oslo"]
    unit: Literal["C", "F"]


TOOL: Any = openai.pydantic_function_tool(Weather)
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
MANNERS: dict[str, Any] = {"model": MODEL, "seed": 3, "tools": [TOOL], "max_tokens": 80}


def test_a_call_parsed_and_streamed(server: Server) -> None:
    completions = server.client.chat.completions
    asked: Any = {**MANNERS, "messages": ASKED, "tool_choice": "required", "parallel_tool_calls": False}
    choice = completions.parse(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)
    with completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0]
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert streamed.finish_reason == "tool_calls"
    (again,) = streamed.message.tool_calls or ()
    assert again.function == call.function
    assert again.id != call.id


def test_an_agent(server: Server) -> None:
    """A call, its result, and an answer that may call again but is held to no form."""
    completions = server.client.chat.completions
    messages = list(ASKED)
    called = completions.create(**MANNERS, messages=messages, tool_choice="required").choices[0].message
    messages.append(called)
    for call in called.tool_calls or ():
        assert Weather.model_validate_json(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 4})})
    answer = completions.create(**MANNERS, messages=messages, tool_choice="none").choices[0]
    assert answer.message.content
    assert answer.message.tool_calls is None
    assert answer.finish_reason in {"stop", "length"}


def test_a_tool_by_its_name_beside_others(server: Server) -> None:
    other: Any = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    choice: Any = {"type": "function", "function": {"name": "Weather"}}
    answer = server.client.chat.completions.create(
        **{**MANNERS, "tools": [other, TOOL]}, messages=ASKED, tool_choice=choice, n=3
    )
    for one in answer.choices:
        (call,) = one.message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name == "Weather"
        Weather.model_validate_json(call.function.arguments)


@pytest.mark.parametrize("method", ["auto", "grammar"])
def test_drafts_do_not_change_calls(server: Server, method: str) -> None:
    asked: Any = {**MANNERS, "messages": ASKED, "tool_choice": "required"}
    plain, drafted = (
        server.client.chat.completions.create(**asked, extra_body={"speculation": speculation}).choices[0].message
        for speculation in ("off", {"method": method})
    )
    assert [call.function for call in plain.tool_calls or ()] == [call.function for call in drafted.tool_calls or ()]  # type: ignore[union-attr]
