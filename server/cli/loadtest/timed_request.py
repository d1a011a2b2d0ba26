"""One streamed request, timed chunk by chunk. Shares the machine with the server, so it does little for each chunk."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import msgspec

from server.cli.loadtest.workload import LoadRequest
from server.client.openai_answers import AnswerError, Chunk, ChunkParser

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/completions", "chat": "/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what all of them have in common."""

    base_url: str
    model: str
    endpoint: Endpoint
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of each body: temperature, ignore_eos."""
    timeout_s: float = 600.0

    @property
    def url(self) -> str:
        return self.base_url + PATHS[self.endpoint]

    def body(self, request: LoadRequest) -> dict[str, Any]:
        """The JSON body that this request is sent as."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.max_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        return {**body, **self.extra}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request brought no complete answer: a kind to count by, and what was said."""

    kind: str
    message: str


@dataclass(slots=True)
class Outcome:
    """What came of one request. Times are seconds of one monotonic clock."""

    started: float
    finished: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    """When text arrived; empty if the answer has none (the first token ended it)."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """From the server's usage; the number of chunks where it sends none."""
    failure: Failure | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return self.chunk_times[0] - self.started if self.chunk_times else None

    @property
    def latency(self) -> float:
        return self.finished - self.started


async def send(client: httpx.AsyncClient, target: Target, request: LoadRequest) -> Outcome:
    """Send one request and read its stream to the end. Never raises for what the server or the network does."""
    content = msgspec.json.encode(target.body(request))
    outcome = Outcome(started=time.perf_counter())
    try:
        async with asyncio.timeout(target.timeout_s):
            await _stream(client, target.url, content, outcome)
    except TimeoutError:
        outcome.failure = Failure("timeout", f"not finished after {target.timeout_s:g} s")
    except httpx.TransportError as error:
        outcome.failure = Failure("connection", f"{type(error).__name__}: {error}".rstrip(": "))
    except AnswerError as error:
        outcome.failure = Failure(error.kind, str(error))
    outcome.finished = time.perf_counter()
    return outcome


async def _stream(client: httpx.AsyncClient, url: str, content: bytes, outcome: Outcome) -> None:
    headers = {"content-type": "application/json"}
    async with client.stream("POST", url, content=content, headers=headers) as response:
        if response.status_code != 200:
            raise AnswerError.refusal(response.status_code, await response.aread())
        parser = ChunkParser()
        async for data in response.aiter_bytes():
            now = time.perf_counter()
            for chunk in parser.feed(data):
                _record(chunk, now, outcome)
            if parser.is_done:
                break
    parser.close()
    outcome.output_tokens = outcome.output_tokens or len(outcome.chunk_times)


def _record(chunk: Chunk, now: float, outcome: Outcome) -> None:
    if chunk.text:
        outcome.chunk_times.append(now)
    if chunk.usage is not None:
        outcome.prompt_tokens = chunk.usage.prompt_tokens
        outcome.output_tokens = chunk.usage.completion_tokens
