"""Requests and answers between ingress and replicas, as ASGI messages."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client.core import Metric
from starlette.types import ASGIApp, Message, Scope

_KEPT = ("type", "asgi", "http_version", "method", "scheme", "path", "root_path", "query_string", "client", "server")
"""Keys of a scope that are sent to the replica; the others concern only the ingress or cannot be pickled."""
_REPLACED = frozenset({b"content-length", b"transfer-encoding", b"x-request-id"})


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A complete request that can be pickled."""

    scope: dict[str, Any]
    body: bytes

    @classmethod
    def of(cls, scope: Scope, body: bytes, request_id: str) -> "ForwardedRequest":
        """Build the request with this body and with the request id that both logs show."""
        kept = {name: scope[name] for name in _KEPT if name in scope}
        headers = [(name, value) for name, value in scope["headers"] if name not in _REPLACED]
        headers += [(b"content-length", str(len(body)).encode()), (b"x-request-id", request_id.encode())]
        return cls({**kept, "headers": headers}, body)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A replica's first message: it has accepted the request."""

    replica: str


class AnswerStreams:
    """Runs requests through a replica's ASGI application and streams its messages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running: set[asyncio.Task[None]] = set()

    async def to(self, request: ForwardedRequest) -> AsyncGenerator[Message]:
        """Yield the answer's messages. Raises any exception of the application.

        If the reader stops early, the application sees a client disconnect.
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
    """The ingress's interface to the replicas."""

    def answer(self, request: ForwardedRequest, session: str) -> AsyncGenerator[Accepted | Message]:
        """The answer of the replica that the session is routed to. Raises UnavailableError, also during the answer.

        If the reader stops early, the replica aborts the request.
        """
        ...

    async def metrics(self) -> Sequence[tuple[str, Sequence[Metric]]]:
        """Names and metrics of the replicas that answer in time. Raises UnavailableError if none does."""
        ...
