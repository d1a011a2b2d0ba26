"""Anthropic's client on the embedded model, which is made to call, since it is too small to choose well."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.served.conftest import Server

pytestmark = pytest.mark.embedded

MODEL = "SmolLM2-135M-Instruct"
CITIES = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOL: Any = {"name": "weather", "description": "Tells the weather.", "input_schema": CITIES}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
MANNERS: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "system": "Be brief.", "extra_body": {"seed": 3}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0) as client:
        yield client


def test_an_agent(client: anthropic.Anthropic) -> None:
    """A call, streamed as it comes whole, its result, and an answer."""
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    asked: dict[str, Any] = {**MANNERS, "tools": [TOOL], "tool_choice": choice}
    called = client.messages.create(**asked, messages=ASKED)
    assert called.stop_reason == "tool_use"
    with client.messages.stream(**asked, messages=ASKED) as stream:
        streamed = stream.get_final_message()
    assert [block.input for block in streamed.content] == [block.input for block in called.content]
    assert {block.input["city"] for block in called.content} <= {"Rome", "Oslo"}
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "4 degrees"} for block in called.content]
    history = [*ASKED, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    answer = client.messages.create(**MANNERS, messages=history)
    assert [block.type for block in answer.content] == ["text"]


def test_the_words_are_those_of_chat_completions(client: anthropic.Anthropic, server: Server) -> None:
    message = client.messages.create(**MANNERS, messages=ASKED)
    messages = [{"role": "system", "content": "Be brief."}, *ASKED]
    chat = server.client.chat.completions.create(model=MODEL, max_tokens=60, seed=3, messages=messages)
    assert [block.text for block in message.content] == [chat.choices[0].message.content]
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == chat.usage.prompt_tokens
    count = client.messages.count_tokens(model=MODEL, system="Be brief.", messages=ASKED)
    assert count.input_tokens == chat.usage.prompt_tokens
