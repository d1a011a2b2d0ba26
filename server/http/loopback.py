"""Requests that the server sends to itself, to run the lines of batches."""

import asyncio
from dataclasses import dataclass
from datetime import datetime

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.connection import new_request_id
from server.telemetry.request_trace import RequestTrace

MAX_IN_FLIGHT = 64
"""The most requests of one client in flight to one model, so that other clients' requests do not wait for them."""


@dataclass(frozen=True, slots=True)
class LoopbackAnswer:
    """The complete answer to a request."""

    request_id: str
    status: int
    body: bytes
    retry_after_s: float | None
    """Seconds after which the same request may succeed; None: the answer does not say."""


class Loopback:
    """Sends background requests through the whole application, without a key, so that answers are the same."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._slots: dict[tuple[str, str], asyncio.Semaphore] = {}
        """By client and group."""

    async def post(
        self, path: str, body: bytes, client: str, group: str = "", date: datetime | None = None
    ) -> LoopbackAnswer:
        """Send a JSON body on behalf of this client. Requests of different groups never wait for each other.

        Chat templates show this date; by default now.
        """
        import httpx  # noqa: PLC0415  (takes time and memory, and few servers run batches)

        record = RequestTrace(new_request_id(), client=client, is_background=True, date=date)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app({**scope, "state": {"record": record}}, receive, send)

        request = httpx.Request(
            "POST", f"http://localhost{path}", content=body, headers={"content-type": "application/json"}
        )
        async with self._slots.setdefault((client, group), asyncio.Semaphore(MAX_IN_FLIGHT)):
            response = await httpx.ASGITransport(app, client=("", 0)).handle_async_request(request)
        retry_after = response.headers.get("retry-after")
        wait_s = None if retry_after is None else float(retry_after)
        return LoopbackAnswer(record.request_id, response.status_code, await response.aread(), wait_s)
