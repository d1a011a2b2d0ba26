"""A connection that has become a websocket, with an end to its handshake and to its close.

In between, uvicorn asks the client now and then whether it is still there.
"""

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's websocket, which by itself waits for ever for a handshake to be accepted and for a client to read."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], timeout_s: float) -> None:
        super().__init__(config, server_state, app_state)
        self._timeout_s = timeout_s
        self._deadline: asyncio.TimerHandle | None = None

    def understands(self, head: bytes) -> bool:
        """Read the whole head of a request, before all else; returns whether there is any answer to it."""
        self.conn.receive_data(head)
        return self.conn.handshake_exc is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over the connection of the request that was read."""
        super().connection_made(transport)
        self._drop_unless_open_later()
        self.handle_events()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._drop_unless_open_later()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if not self.disconnected:
            self._drop_unless_open_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def _drop_unless_open_later(self) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(self._timeout_s, self._drop_unless_open)

    def _drop_unless_open(self) -> None:
        if not self.handshake_complete or self.transport.is_closing():
            self.transport.abort()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
