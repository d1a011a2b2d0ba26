"""Requests and answers between the ingress and the replicas, as messages of ASGI."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client.core import Metric
from starlette.types import ASGIApp, Message, Scope

_KEPT = ("type", "asgi", "http_version", "method", "scheme", "path", "root_path", "query_string", "client", "server")
"""Keys of a scope that are sent; others concern only the ingress, or cannot be pickled."""
_REPLACED = frozenset({b"content-length", b"transfer-encoding", b"x-request-id"})


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A whole request, which can be pickled."""

    scope: dict[str, Any]
    body: bytes

    @classmethod
    def of(cls, scope: Scope, body: bytes, request_id: str) -> "ForwardedRequest":
        """The request with this body, and this id, which logs on both sides show."""
        kept = {name: scope[name] for name in _KEPT if name in scope}
        headers = [(name, value) for name, value in scope["headers"] if name not in _REPLACED]
        headers += [(b"content-length", str(len(body)).encode()), (b"x-request-id", request_id.encode())]
        return cls({**kept, "headers": headers}, body)


@dataclass(frozen=True, slots=True)
class Taken:
    """A replica's first message: it has the request."""

    replica: str


class Answers:
    """Answers requests by the application, and yields its messages as they come."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running: set[asyncio.Task[None]] = set()

    async def to(self, request: ForwardedRequest) -> AsyncGenerator[Message]:
        """All messages of the answer. Raises what the application raises.

        If the reader stops before the end, the application sees a client that has left.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        is_gone = asyncio.Event()
        unread: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        task = asyncio.ensure_future(self._app({**request.scope}, receive, send))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            await task
        finally:
            is_gone.set()


class Replicas(Protocol):
    """The replicas, as the front sees them."""

    def answer(self, request: ForwardedRequest, session: str) -> AsyncGenerator[Taken | Message]:
        """The answer of the replica that the session belongs to. Raises UnavailableError, also in the middle.

        If the reader stops before the end, the replica stops, too.
        """
        ...

    async def metrics(self) -> Sequence[tuple[str, Sequence[Metric]]]:
        """Names and metrics of the replicas that answer. Raises UnavailableError if none does."""
        ...
