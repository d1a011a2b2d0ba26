"""A request on its way between the ingress and a replica, as ASGI has it: what goes there, and what comes back."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

_KEPT = ("type", "asgi", "http_version", "method", "scheme", "path", "root_path", "query_string", "client", "server")
"""What goes along of a scope. Others are the ingress's own affair, or cannot be pickled."""
_REPLACED = frozenset({b"content-length", b"transfer-encoding", b"x-request-id"})


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A whole request that can be pickled."""

    scope: dict[str, Any]
    body: bytes

    @classmethod
    def of(cls, scope: Scope, body: bytes, request_id: str) -> "ForwardedRequest":
        """The request, with these for its body and its id, under which logs have it on both sides."""
        kept = {name: scope[name] for name in _KEPT if name in scope}
        headers = [(name, value) for name, value in scope["headers"] if name not in _REPLACED]
        headers += [(b"content-length", str(len(body)).encode()), (b"x-request-id", request_id.encode())]
        return cls({**kept, "headers": headers}, body)


@dataclass(frozen=True, slots=True)
class Taken:
    """What a replica says first: it has the request."""

    replica: str


class Answers:
    """The application's messages to requests, each as soon as it is there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running: set[asyncio.Task[None]] = set()

    async def to(self, request: ForwardedRequest) -> AsyncGenerator[Message]:
        """All messages of the answer. Raises what the application raises.

        Whoever stops reading before the end has left: the application is told so, and ends the request in its way.
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
