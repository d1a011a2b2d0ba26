"""An answer that grows, and what goes wrong on its way."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from server.client.openai_answers import Choice, Chunk, Delta, Logprobs, TokenLogprob
from server.page.answer import MeasuredAnswer, common_prefix_length
from server.page.api import Api, ApiError
from server.page.compare.answering import comparison
from server.page.conversation import Turn
from server.page.session import Session
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


async def answered(*chunks: Mapping[str, Any], turn: Turn | None = None) -> tuple[Turn, Scripted]:
    api = Scripted(*chunks)
    turn = turn or Turn(id=2, role="assistant", request={"model": "m", "seed": 3})
    await fill(turn, api, "key", [{"role": "user", "content": "Hi"}])
    return turn, api


async def fill(turn: Turn, api: Any, key: str, messages: Sequence[Mapping[str, Any]] = ()) -> None:
    async def give_up(reason: str) -> str:
        return ""

    def add(chunk: Chunk, at_s: float) -> None:
        turn.note(chunk)
        for choice in chunk.choices:
            if choice.index == 0:
                turn.add(choice, at_s)

    session = Session(api, None, give_up)  # type: ignore[arg-type]
    session.key = key
    await session.stream_chat(turn.request_body(messages), add)


async def test_text_reasoning_and_facts_come_into_the_turn() -> None:
    turn, api = await answered(
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
    assert turn.first_token_s is not None
    assert (api.body["model"], api.body["seed"], api.body["stream"]) == ("m", 3, True)
    assert api.body["messages"] == [{"role": "user", "content": "Hi"}]


async def test_calls_are_put_together_from_their_parts() -> None:
    turn, _ = await answered(
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
    _, api = await answered(delta(content=" a time"), turn=turn)
    assert turn.content == "Once upon a time"
    assert api.body["messages"][-1] == {"role": "assistant", "content": "Once upon"}
    assert api.body["continue_final_message"] is True
    assert api.body["add_generation_prompt"] is False


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
            await fill(turn, api, "")
        await api.close()
    assert (str(problem.value), problem.value.status) == (said, status)
    assert problem.value.param == ("top_p" if status else None)
    assert turn.content == ("" if status else "Paris is")


async def test_a_key_that_is_wanted_is_known_by_its_refusal() -> None:
    with running(FakeOpenAI(api_key="right").app()) as base_url:
        api = Api(base_url)
        with pytest.raises(ApiError, match=r"Incorrect API key\.") as refused:
            await api.models("wrong")
        assert refused.value.wants_key
        assert [model.id for model in await api.models("right")] == ["fake-1"]
        assert await api.capabilities("right") is None
        await api.close()
        gone = Api(base_url)
    with pytest.raises(ApiError, match="No server answers at"):
        await gone.models("")
    await gone.close()


def chunk(text: str, *logprobs: float, **more) -> Choice:
    tokens = [TokenLogprob(token=text, logprob=logprob) for logprob in logprobs]
    return Choice(delta=Delta(content=text), logprobs=Logprobs(content=tokens) if tokens else None, **more)


def test_an_answer_grows_chunk_by_chunk():
    answer = MeasuredAnswer()
    answer.add(Choice(), 0.1)  # the role alone
    answer.add(chunk("Hel", -1.0), 0.5)
    answer.add(chunk("lo", -2.0), 1.0)
    answer.add(Choice(finish_reason="stop", score=-1.5, cumulative_logprob=-3.0), 1.1)
    assert (answer.content, answer.completion_tokens) == ("Hello", 2)
    assert (answer.score, answer.cumulative_logprob) == (-1.5, -3.0)
    assert (
        answer.facts
        == "2 tokens · 2 tokens/s · first token after 500 ms · ended by itself · mean log-probability −1.500"
    )


def test_tokens_are_counted_by_their_ids_where_there_are_no_logprobs():
    answer = MeasuredAnswer()
    answer.add(chunk("Hello", token_ids=[7, 8]), 0.5)
    answer.add(chunk("!", token_ids=[9]), 0.6)
    assert answer.completion_tokens == 3


def test_reasoning_stands_beside_the_text():
    answer = MeasuredAnswer()
    answer.add(Choice(delta=Delta(reasoning_content="Hm")), 0.5)
    answer.add(chunk("Yes"), 0.6)
    assert (answer.reasoning, answer.content, answer.first_token_s) == ("Hm", "Yes", 0.5)


def test_endings_in_words():
    assert MeasuredAnswer().ending == ""
    assert MeasuredAnswer(finish_reason="length").ending == "cut off at the token limit"
    assert MeasuredAnswer(finish_reason="of another server").ending == "of another server"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("abc", "Same as the first."),
        ("xbc", "Differs from the first from the start."),
        ("axc", "Same as the first for 1 character."),
        ("ab", "Same as the first for 2 characters."),
        ("abcd", "Same as the first for 3 characters."),
    ],
)
def test_where_a_text_parts_with_the_first(text, said):
    assert comparison(text, "abc") == said


def test_num_same_of_any_sequences():
    assert common_prefix_length([], [1]) == 0
    assert common_prefix_length([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix_length("ab", "abc") == 2
