from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from server.client.openai_answers import Chunk
from server.page.api import Api, ApiError
from server.page.chat.answering import Answering, with_seed
from server.page.conversation import Turn
from tests.cli.fake_openai import FakeOpenAI, running


class Scripted:
    """In place of an API: streams these chunks, and remembers what it was asked."""

    def __init__(self, *chunks: Mapping[str, Any]) -> None:
        self.chunks = [msgspec.convert(chunk, Chunk) for chunk in chunks]
        self.body: Mapping[str, Any] = {}

    @asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any], key: str) -> AsyncIterator[AsyncIterator[Chunk]]:
        assert (path, key) == ("/chat/completions", "key")
        self.body = body
        yield self._all()

    async def _all(self) -> AsyncIterator[Chunk]:
        for chunk in self.chunks:
            yield chunk


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def part(index: int, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **fields}]}


async def answered(
    *chunks: Mapping[str, Any], turn: Turn | None = None
) -> tuple[Turn, Scripted, list[tuple[str, str]]]:
    api, seen = Scripted(*chunks), []
    turn = turn or Turn(id=2, role="assistant", request={"model": "m", "seed": 3})
    messages: Sequence[Mapping[str, Any]] = [{"role": "user", "content": "Hi"}]
    await Answering(api, turn, messages).run("key", lambda text, thought: seen.append((text, thought)))  # type: ignore[arg-type]
    return turn, api, seen


async def test_text_reasoning_and_facts_come_into_the_turn() -> None:
    turn, api, seen = await answered(
        {"id": "chatcmpl-1", "system_fingerprint": "fp", "choices": [{"index": 0, "delta": {"role": "assistant"}}]},
        delta(reasoning_content="Hm."),
        delta(content="Hel"),
        {"choices": [{"index": 1, "delta": {"content": "of another choice"}}]},
        {"choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": "stop"}]},
        {"warnings": [{"path": "user", "reason": "nothing is done with it"}]},
        {"usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}},
    )
    assert (turn.content, turn.reasoning, turn.finish_reason) == ("Hello", "Hm.", "stop")
    assert (turn.prompt_tokens, turn.cached_tokens, turn.completion_tokens) == (9, 4, 2)
    assert (turn.request_id, turn.fingerprint) == ("chatcmpl-1", "fp")
    assert turn.notices == ["user: nothing is done with it"]
    assert seen == [("", "Hm."), ("Hel", ""), ("lo", "")]
    assert turn.first_token_s is not None
    assert turn.seconds is not None
    assert turn.first_token_s <= turn.seconds
    assert (api.body["model"], api.body["seed"], api.body["stream"]) == ("m", 3, True)
    assert api.body["messages"] == [{"role": "user", "content": "Hi"}]


async def test_calls_are_put_together_from_their_parts() -> None:
    turn, _, _ = await answered(
        delta(**part(0, id="a", type="function", function={"name": "clock", "arguments": ""})),
        delta(**part(0, function={"arguments": '{"zone":'})),
        delta(**part(0, function={"arguments": ' "UTC"}'})),
        delta(**part(1, id="b", type="custom", custom={"name": "shell", "input": "l"})),
        delta(**part(1, custom={"input": "s"})),
    )
    assert turn.tool_calls == [
        {"id": "a", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}},
        {"id": "b", "type": "custom", "custom": {"name": "shell", "input": "ls"}},
    ]


async def test_an_answer_can_begin_with_a_given_text() -> None:
    turn = Turn(id=2, role="assistant", content="Once upon", prefix="Once upon", request={"model": "m"})
    _, api, _ = await answered(delta(content=" a time"), turn=turn)
    assert turn.content == "Once upon a time"
    assert api.body["messages"][-1] == {"role": "assistant", "content": "Once upon"}
    assert api.body["continue_final_message"] is True
    assert api.body["add_generation_prompt"] is False


def test_a_seed_is_drawn_where_none_is_set() -> None:
    assert with_seed({"seed": 7, "top_p": 1}) == {"seed": 7, "top_p": 1}
    assert with_seed({})["seed"] != with_seed({})["seed"]


@pytest.mark.parametrize(
    ("fake", "said", "status"),
    [
        (FakeOpenAI(fails_with=(400, {"message": "No such field.", "param": "top_p"})), "No such field.", 400),
        (FakeOpenAI(error_after=2), "The engine is gone.", None),
        (FakeOpenAI(breaks_after=2), "The server closed the connection before the answer was complete.", None),
    ],
)
async def test_what_goes_wrong_is_told_in_the_servers_words(fake: FakeOpenAI, said: str, status: int | None) -> None:
    turn = Turn(id=2, role="assistant", request={"model": "m"})
    with running(fake.app()) as base_url:
        api = Api(base_url)
        with pytest.raises(ApiError) as problem:
            await Answering(api, turn, []).run("", lambda *_: None)
        await api.close()
    assert (str(problem.value), problem.value.status) == (said, status)
    assert problem.value.param == ("top_p" if status else None)
    assert turn.content == ("" if status else "Paris is")
    assert turn.seconds is not None


async def test_a_key_that_is_wanted_is_known_by_its_refusal() -> None:
    with running(FakeOpenAI(api_key="right").app()) as base_url:
        api = Api(base_url)
        with pytest.raises(ApiError, match=r"Incorrect API key\.") as refused:
            await api.models("wrong")
        assert refused.value.wants_key
        assert await api.models("right") == ["fake-1"]
        assert await api.capabilities("right") is None
        await api.close()
        gone = Api(base_url)
    with pytest.raises(ApiError, match="No server answers at"):
        await gone.models("")
    await gone.close()
