"""`samewise verify` against servers that keep, and that break, the promise of the same answer."""

import asyncio
import hashlib
import io
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from typer.testing import CliRunner

from server.cli.main import app as command_line
from server.cli.verification import Verification, VerifyOptions, verify
from server.cli.verify import report
from server.client.openai_answers import AnswerError

WORDS = [" one", " two", " three", " four", " five", " six", " seven", " eight"]


@dataclass
class Server:
    """Answers with words that follow from the request. The fields break that in different ways."""

    varies_in_crowds: bool = False
    varies_with_cache: bool = False
    varies_when_streamed: bool = False
    ignores_seed: bool = False
    refuses_seed: bool = False
    reports_tokens: bool = True
    fails_in_crowds: bool = False
    most_in_flight: int = 0
    in_flight: int = 0
    num_asked: int = 0
    beginnings: set[str] = field(default_factory=set)

    def app(self) -> Starlette:
        routes = [Route(path, self.answer, methods=["POST"]) for path in ("/v1/chat/completions", "/v1/completions")]
        return Starlette(routes=routes)

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        if "logprobs" in body and not self.reports_tokens:
            return JSONResponse({"error": {"message": "no logprobs"}}, status_code=400)
        if "seed" in body and self.refuses_seed:
            return JSONResponse({"error": {"message": "no seed"}}, status_code=400)
        self.num_asked += 1
        self.in_flight += 1
        try:
            for _ in range(5):  # let others in
                await asyncio.sleep(0)
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            if self.fails_in_crowds and self.in_flight > 4:
                return JSONResponse({"error": {"message": "too many"}}, status_code=429)
            words = self.words(body)
        finally:
            self.in_flight -= 1
        return self.written(body, words)

    def words(self, body: dict[str, Any]) -> list[str]:
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        seed = (self.num_asked if self.ignores_seed else body["seed"]) if body["temperature"] else ""
        digest = hashlib.sha256(f"{prompt} {seed}".encode()).digest()
        words = [WORDS[byte % len(WORDS)] for byte in digest[: body["max_tokens"]]]
        beginning = prompt.partition("\n")[0]
        is_cached = beginning in self.beginnings
        self.beginnings.add(beginning)
        if (self.varies_in_crowds and self.in_flight > 4) or (self.varies_with_cache and is_cached):
            words[5] = " other"
        if self.varies_when_streamed and body.get("stream"):
            words.pop()
        return words

    def written(self, body: dict[str, Any], words: list[str]) -> Response:
        is_chat, is_stream = "messages" in body, body.get("stream")
        choices = [self.choice(body, [word], is_chat) for word in words] if is_stream else []
        if not is_stream:
            return JSONResponse({"choices": [{**self.choice(body, words, is_chat), "finish_reason": "length"}]})
        choices.append({"delta": {}, "text": "", "finish_reason": "length"})
        frames = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
        return StreamingResponse(iter([*frames, "data: [DONE]\n\n"]), media_type="text/event-stream")

    def choice(self, body: dict[str, Any], words: list[str], is_chat: bool) -> dict[str, Any]:
        text = "".join(words)
        tokens = {"content": [{"token": word} for word in words]} if is_chat else {"tokens": words}
        logprobs = {"logprobs": tokens} if "logprobs" in body else {}
        if not is_chat:
            return {"text": text, **logprobs}
        return {"delta" if body.get("stream") else "message": {"content": text}, **logprobs}


async def verified(server: Server, **options: Any) -> Verification:
    transport = httpx.ASGITransport(server.app())
    async with httpx.AsyncClient(transport=transport) as client:
        return await verify(client, VerifyOptions("http://fake/v1", "fake", **{"num_requests": 60, **options}))


def differing(result: Verification) -> dict[str, int]:
    return {one.name: len(one.differences) for one in result.conditions if one.differences}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("reports_tokens", [True, False])
async def test_a_server_that_keeps_the_promise(endpoint: str, reports_tokens: bool) -> None:
    server = Server(reports_tokens=reports_tokens)
    result = await verified(server, endpoint=endpoint)
    assert result.is_same
    assert result.compares_tokens == reports_tokens
    assert result.num_compared >= 60
    assert all(one.num_compared for one in result.conditions)
    assert server.most_in_flight == 16


async def test_an_answer_that_changes_in_a_crowd_is_found_at_its_token() -> None:
    result = await verified(Server(varies_in_crowds=True))
    assert set(differing(result)) == {"in a crowd"}
    assert not result.is_same
    (first, *_) = result.differences
    assert (first.position, first.unit, first.actual[:6]) == (5, "token", " other")


async def test_an_answer_that_changes_behind_a_cached_beginning_is_found() -> None:
    result = await verified(Server(varies_with_cache=True))
    assert {"alone, again", "after a request with the same beginning", "later"} <= set(differing(result))


async def test_a_stream_that_differs_from_the_whole_answer_is_found_by_text_alone() -> None:
    result = await verified(Server(varies_when_streamed=True, reports_tokens=False))
    assert "alone, streamed" in differing(result)
    assert "alone, again" not in differing(result)
    assert {one.unit for one in result.differences} == {"character"}


async def test_a_seed_that_is_ignored_is_found_and_greedy_requests_are_not_blamed() -> None:
    result = await verified(Server(ignores_seed=True))
    assert {one.probe.kind for one in result.differences} == {"seeded"}


async def test_a_seed_that_is_refused_is_reported_and_greedy_requests_are_compared() -> None:
    result = await verified(Server(refuses_seed=True))
    assert (result.is_same, result.refused_seed) == (True, "no seed")


async def test_requests_that_fail_are_no_differences_and_no_success() -> None:
    result = await verified(Server(fails_in_crowds=True))
    assert not result.differences
    assert {failure.kind for failure in result.failures} == {"HTTP 429"}
    assert not result.is_same


async def test_a_server_that_refuses_everything_is_an_error() -> None:
    app = Starlette(routes=[Route("/v1/models", lambda request: JSONResponse({}))])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        with pytest.raises(AnswerError, match="Not Found"):
            await verify(client, VerifyOptions("http://fake/v1", "fake"))


async def test_the_report_names_conditions_differences_and_the_verdict() -> None:
    console = Console(width=200, file=io.StringIO())
    result = await verified(Server(varies_in_crowds=True))
    console.print(report(result))
    text = console.file.getvalue()
    assert "in a crowd, greedy, token 5" in text
    assert f"{len(result.differences)} of {result.num_compared} answers differ." in text


def test_an_address_that_is_none_is_refused() -> None:
    result = CliRunner().invoke(command_line, ["verify", "ftp://nowhere"])
    assert (result.exit_code, "not an http or https address" in result.output) == (2, True)
