"""Anthropic's own client: whatever it asks for, it understands the answer, streamed or not."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, beta_tool
from anthropic.types import Message
from pydantic import BaseModel

from server.engine.client import QueueFullError
from server.errors import RequestTimeoutError
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import says, serving
from tests.server.messages.test_answers import ROME, TOOLS
from tests.server.test_reasoning import OPENING, THOUGHT
from tests.server.tiny_model import END, write_folder

ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def address(make_app, tmp_path) -> Iterator[str]:
    """The address of a model that reasons first."""
    app = make_app(write_folder(tmp_path / "m", template=OPENING), api_key="right")
    with serving(app) as address:
        yield address


@pytest.fixture
def official(address: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=address, api_key="right", max_retries=0) as client:
        yield client


def streamed(client: Anthropic, **fields: Any) -> Message:
    with client.messages.stream(**ASKED, **fields) as stream:
        stream.until_done()
        return stream.get_final_message()


def without_ids(message: Message) -> dict[str, Any]:
    kept = message.to_dict(mode="json")
    content = [{**block, "id": ""} if "id" in block else block for block in kept["content"]]
    return {**kept, "id": "", "content": content}


@pytest.mark.parametrize(
    ("text", "kinds", "reason"),
    [
        ("Hm.</think>Blue.", ["thinking", "text"], "end_turn"),
        (f"Hm.</think>So: {ROME}", ["thinking", "text", "tool_use"], "tool_use"),
        (THOUGHT * 20, ["thinking"], "max_tokens"),
    ],
)
def test_whole_and_streamed(official: Anthropic, engine: FakeEngine, text: str, kinds: list[str], reason: str):
    engine.script = says(text)
    fields: dict[str, Any] = {"tools": TOOLS, "thinking": {"type": "adaptive"}, "extra_body": {"seed": 1}}
    whole = official.messages.create(**ASKED, **fields)
    assert [block.type for block in whole.content] == kinds
    assert whole.stop_reason == reason
    assert whole._request_id
    assert without_ids(streamed(official, **fields)) == without_ids(whole)
    again = [*ASKED["messages"], {"role": "assistant", "content": whole.content}, *ASKED["messages"]]
    assert official.messages.create(**{**ASKED, "messages": again}, tools=TOOLS).content


class Colour(BaseModel):
    name: str


def test_parsed(official: Anthropic, engine: FakeEngine):
    engine.script = says('Hm.</think>{"name": "blue"}')
    assert official.messages.parse(**ASKED, output_format=Colour).parsed_output == Colour(name="blue")


def test_counted_and_listed(official: Anthropic, engine: FakeEngine):
    asked: dict[str, Any] = {"model": "tiny", "messages": ASKED["messages"], "system": "s", "tools": TOOLS}
    count = official.messages.count_tokens(**asked)
    assert count.input_tokens == official.messages.create(**asked, max_tokens=3).usage.input_tokens
    assert [model.id for model in official.models.list()] == ["tiny"]
    assert official.models.retrieve("tiny").max_input_tokens == 4096


def test_an_agent_falls_back_to_whole_conversations(official: Anthropic, engine: FakeEngine):
    """Its conversations on the server are refused; then it sends all of them."""
    cities = []

    @beta_tool
    def weather(city: str) -> str:
        """Looks out of the window."""
        cities.append(city)
        return "sun"

    def script(request: Any, choice: int) -> list[int]:
        shown = bytes(token for token in request.prompt if token < 256)
        return [*("</think>Sun." if b"tool\nsun" in shown else f"</think>{ROME}").encode(), END]

    engine.script = script
    runner = official.beta.messages.tool_runner(**ASKED, tools=[weather])
    last = runner.until_done()
    assert [block.text for block in last.content if block.type == "text"] == ["Sun."]
    assert cities == ["Rome"]


def test_errors_become_its_exceptions(official: Anthropic, engine: FakeEngine):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        official.messages.create(**{**ASKED, "system": "x" * 9999})
    with pytest.raises(anthropic.NotFoundError):
        official.messages.create(**{**ASKED, "model": "claude"})
    engine.fail_after, engine.failure = 3, RequestTimeoutError("It took too long.")
    with pytest.raises(anthropic.APIStatusError, match="It took too long"):
        streamed(official)
    engine.refuse = QueueFullError()
    with pytest.raises(anthropic.InternalServerError) as overloaded:
        official.messages.create(**ASKED)
    assert overloaded.value.status_code == 529
    stranger = official.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**ASKED)


def test_it_may_send_its_key_in_its_own_header(official: Anthropic):
    headers = {"x-api-key": "right", "authorization": ""}
    assert official.messages.create(**ASKED, extra_headers=headers).type == "message"
