"""A small OpenAI server with the behaviours that the commands have to cope with, on a real socket."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from server.http.listening import bind


@dataclass
class FakeOpenAI:
    """Answers with `words`, one a chunk; the fields change how. Remembers what it was sent."""

    words: list[str] = field(default_factory=lambda: ["Paris", " is", " it", "."])
    delay_s: float = 0.0
    vocab_size: int | None = 50
    takes_ignore_eos: bool = True
    sends_usage: bool = True
    fails_with: tuple[int, dict[str, Any]] | None = None
    breaks_after: int | None = None
    """Words after which the stream ends without [DONE]."""
    error_after: int | None = None
    """Words after which the stream carries an error."""
    api_key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    left: int = 0
    """Clients that closed the connection before the end."""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/tokenizer_info", self.tokenizer_info),
                Route("/v1/completions", self.generate, methods=["POST"]),
                Route("/v1/chat/completions", self.generate, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        if self.api_key is not None and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": {"message": "Incorrect API key.", "type": "x"}}, status_code=401)
        return JSONResponse({"object": "list", "data": [{"id": "fake-1", "object": "model"}]})

    async def tokenizer_info(self, request: Request) -> Response:
        if self.vocab_size is None:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        return JSONResponse({"vocab_size": self.vocab_size, "tokenizer_class": "X"})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.fails_with is not None:
            status, error = self.fails_with
            return JSONResponse({"error": error}, status_code=status, headers={"retry-after": "7"})
        if "ignore_eos" in body and not self.takes_ignore_eos:
            return JSONResponse({"error": {"message": "Unknown parameter: 'ignore_eos'."}}, status_code=400)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            async for chunk in self.chunks(body):
                yield f"data: {json.dumps(chunk)}\n\n"
            if self.breaks_after is None:
                yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise
        finally:
            self.in_flight -= 1

    async def chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        is_chat = "messages" in body
        if is_chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None}
        for position, word in enumerate(self.words[: body.get("max_tokens")]):
            if position == self.breaks_after:
                return
            if position == self.error_after:
                yield {"error": {"message": "The engine is gone.", "type": "server_error"}}
                return
            await asyncio.sleep(self.delay_s)
            yield {"choices": [{"index": 0, **({"delta": {"content": word}} if is_chat else {"text": word})}]}
        if self.sends_usage and body.get("stream_options", {}).get("include_usage"):
            yield {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 4}}


@contextmanager
def running(app: Any, config: uvicorn.Config | None = None) -> Iterator[str]:
    """Runs an application in a thread; gives the address of its /v1."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(config or uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
