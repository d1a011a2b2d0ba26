"""A websocket connection, with limits on every wait for its client and on the size of its messages.

In between, uvicorn pings the client to notice when it is gone.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from server.errors import SHUTTING_DOWN
from server.http.connection import AnsweringConnection
from server.http.fair_memory import FairMemory

CONNECTION = "samewise.connection"
"""Key of the connection in the state of a websocket's scope."""
_FRAME_BYTES = 64
"""Memory of a frame in addition to its content. A message may have any number of frames, even empty ones."""
_PIECE_BYTES = 1 << 10
"""Bytes parsed at a time: up to 170 frames, whose pongs and events take some milliseconds."""
_TURN_S = 0.005
"""Seconds in which all websockets are parsed together before the event loop does something else."""
_GOING_AWAY = f"{SHUTTING_DOWN} Please reconnect later."


class ParsingTurns:
    """Parses what websockets have received, piece by piece in turns, so that floods of frames leave time for others."""

    def __init__(self) -> None:
        self._waiting: dict[LimitedWebSocket, None] = {}  # in the order of their turns
        self._is_resting = False

    def add(self, websocket: "LimitedWebSocket") -> None:
        """Parse what a websocket has received, now if this iteration of the event loop has time for it."""
        self._waiting[websocket] = None
        if not self._is_resting:
            self._run()

    def _run(self) -> None:
        self._is_resting = True  # also for what is added meanwhile
        asyncio.get_running_loop().call_soon(self._resume)
        end = time.perf_counter() + _TURN_S
        while self._waiting:
            websocket = next(iter(self._waiting))
            del self._waiting[websocket]
            if websocket.parse_piece():
                self._waiting[websocket] = None
            if time.perf_counter() >= end:
                break

    def _resume(self) -> None:
        self._is_resting = False
        if self._waiting:
            self._run()


def _drop(websocket: "LimitedWebSocket") -> None:
    websocket.transport.abort()


@dataclass(frozen=True, slots=True)
class IncomingMessages:
    """The turns and the memory that all websockets share while their messages arrive."""

    memory: "FairMemory[LimitedWebSocket]"
    """Memory of incomplete messages. If they take too much, connections are dropped."""
    turns: ParsingTurns = field(default_factory=ParsingTurns)

    @classmethod
    def within(cls, max_bytes: int) -> "IncomingMessages":
        """Messages that take at most this memory together."""
        return cls(FairMemory(max_bytes, _drop))


class LimitedWebSocket(WebSocketsSansIOProtocol, AnsweringConnection):
    """uvicorn's websocket, with limits on its waits for the handshake and for the client to read."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        timeout_s: float,
        max_bytes: int,
        incoming: IncomingMessages,
    ) -> None:
        """`max_bytes` is the size of the largest message; `incoming` bounds the messages of all connections."""
        super().__init__(config, server_state, app_state)
        self.conn.max_message_size = max_bytes
        self.is_answering = False
        """Whether an answer is in progress; set by the application."""
        self.sender = ""
        """The client's address, or its name, set by the application."""
        self._timeout_s = timeout_s
        self._incoming = incoming
        self._unparsed = memoryview(b"")
        self._gathered = 0  # bytes that the frames of the next message take
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    @property
    def owes_answer(self) -> bool:
        """Whether an answer is in progress, or the client has not read all of it."""
        return self.is_answering or self.transport.get_write_buffer_size() > 0

    def understands(self, head: bytes) -> bool:
        """Read the whole head of a request, before anything else. Returns whether it is a valid handshake."""
        self.conn.receive_data(head)
        return self.conn.handshake_exc is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over the connection of the request that was read."""
        super().connection_made(transport)
        self.sender = self.client[0] if self.client is not None else ""
        self._drop_unless_open_later()
        self.handle_events()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope["state"][CONNECTION] = self

    def data_received(self, data: bytes) -> None:
        self._unparsed = memoryview(bytes(self._unparsed) + data if self._unparsed else data)
        self._read_on()

    def parse_piece(self) -> bool:
        """Parse the next bytes. Returns whether there are more, and nothing else has to be done before."""
        piece, self._unparsed = self._unparsed[:_PIECE_BYTES], self._unparsed[_PIECE_BYTES:]
        if self.transport.is_closing():
            return False
        super().data_received(piece)  # type: ignore[arg-type]  # any buffer
        num_bytes = len(self.conn.reader.buffer) + self._gathered + len(self._unparsed)
        self._incoming.memory.resize(self, self.sender, num_bytes)
        if self._unparsed and self._may_read:
            return True
        self._read_on()
        return False

    @property
    def _may_read(self) -> bool:
        """Whether the websocket is open, the application has all messages, and the client reads what it gets."""
        return self.handshake_complete and not self.read_paused and self.writable.is_set()

    def _read_on(self) -> None:
        """Parse what has come, or read more, as far as that may be done now."""
        if self.transport.is_closing():
            return
        if self._may_read and not self._unparsed:
            self.transport.resume_reading()
            return
        self.transport.pause_reading()
        if self._may_read:
            self._incoming.turns.add(self)

    def handle_text(self, event: Frame) -> None:
        self._gathered = 0 if event.fin else len(event.data) + _FRAME_BYTES
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._gathered = 0 if event.fin else len(event.data) + _FRAME_BYTES
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        self._gathered = 0 if event.fin else self._gathered + len(event.data) + _FRAME_BYTES
        super().handle_cont(event)

    def pause_writing(self) -> None:
        """Read nothing, either: each ping would be answered into memory."""
        super().pause_writing()
        self.transport.pause_reading()
        self._write_deadline = self.loop.call_later(self._timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_deadline()
        self._read_on()

    async def receive(self) -> ASGIReceiveEvent:
        """Receive a message, and read on once all are received. Between two messages, others have a turn."""
        await asyncio.sleep(0)
        message = await super().receive()
        self._read_on()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        """Send a message. Raises ClientDisconnected, also after this side has closed the websocket."""
        await self.writable.wait()
        if self.close_sent:
            raise ClientDisconnected
        was_open = self.handshake_complete
        await super().send(message)
        if not was_open:
            self._read_on()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._drop_unless_open_later()

    def shutdown(self) -> None:
        """Close with a reason, which uvicorn does not send."""
        if self.handshake_complete and not self.close_sent and not self.transport.is_closing():
            self.conn.send_close(CloseCode.SERVICE_RESTART, _GOING_AWAY)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.SERVICE_RESTART})
            self.close_sent = True
        super().shutdown()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if not self.disconnected:
            self._drop_unless_open_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._incoming.memory.resize(self, self.sender, 0)
        self._cancel_deadline()
        self._cancel_write_deadline()
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

    def _cancel_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
