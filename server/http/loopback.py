"""Requests that the server sends to itself, for clients that have left it work."""

import asyncio
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from server.http.request_id import new_request_id
from server.telemetry.request_trace import RequestTrace

_AT_A_TIME = 64
"""Requests of one client, so that no other one's wait for them."""


@dataclass(frozen=True, slots=True)
class LoopbackAnswer:
    """What came back."""

    request_id: str
    status: int
    body: bytes
    retry_after_s: float | None
    """When the same request may be answered otherwise."""


class Loopback:
    """Takes them the way of every request, past the keys and into the background: so the answer is the same."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._places: dict[str, asyncio.Semaphore] = {}  # by client

    async def post(self, path: str, body: bytes, client: str) -> LoopbackAnswer:
        """The whole answer to a JSON body from this client."""
        record = RequestTrace(new_request_id(), client=client, is_background=True)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": None,
            "server": None,
            "state": {"record": record},
        }
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        start: Message = {}
        parts: list[bytes] = []

        async def receive() -> Message:
            if not messages:
                await asyncio.Event().wait()  # it never leaves
            return messages.pop()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                parts.append(message.get("body", b""))

        async with self._places.setdefault(client, asyncio.Semaphore(_AT_A_TIME)):
            await self._app(scope, receive, send)
        retry_after = Headers(raw=start["headers"]).get("retry-after")
        wait_s = None if retry_after is None else float(retry_after)
        return LoopbackAnswer(record.request_id, start["status"], b"".join(parts), wait_s)
