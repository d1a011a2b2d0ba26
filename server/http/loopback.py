"""Requests that the server sends to itself, for clients that have left it work."""

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.connection import new_request_id
from server.telemetry.request_trace import RequestTrace

_AT_A_TIME = 64
"""Requests of one client in flight, so that no other client's wait for them."""


@dataclass(frozen=True, slots=True)
class LoopbackAnswer:
    """The whole answer to a request."""

    request_id: str
    status: int
    body: bytes
    retry_after_s: float | None
    """After this time, the same request may succeed."""


class Loopback:
    """Sends requests through the whole application, except the keys, as background work: so the answer is the same."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._places: dict[str, asyncio.Semaphore] = {}  # by client

    async def post(self, path: str, body: bytes, client: str) -> LoopbackAnswer:
        """Send a JSON body in the name of this client."""
        import httpx  # noqa: PLC0415  (takes time and memory, and few servers run batches)

        record = RequestTrace(new_request_id(), client=client, is_background=True)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app({**scope, "state": {"record": record}}, receive, send)

        request = httpx.Request(
            "POST", f"http://localhost{path}", content=body, headers={"content-type": "application/json"}
        )
        async with self._places.setdefault(client, asyncio.Semaphore(_AT_A_TIME)):
            response = await httpx.ASGITransport(app, client=("", 0)).handle_async_request(request)
        retry_after = response.headers.get("retry-after")
        wait_s = None if retry_after is None else float(retry_after)
        return LoopbackAnswer(record.request_id, response.status_code, await response.aread(), wait_s)
