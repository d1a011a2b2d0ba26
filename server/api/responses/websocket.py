"""Responses over a websocket: each event `response.create` is handled as a separate request with other framing."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
from fastapi import Request, Response
from msgspec import Raw
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from server.api.openai.errors import error_body
from server.api.responses.schema import STREAM_ID
from server.errors import ApiError, InternalError, InvalidRequestError, RateLimitError, UnavailableError
from server.http.body import MAX_INCOMPLETE_MIB
from server.http.middleware import record_of, sender_of
from server.http.websocket import CONNECTION

LANE = "samewise.lane"
"""Key of a request's lane in its state."""
MAX_OPEN = 256
"""The most open websockets. Beyond it, a new one replaces one of the client that has the most."""
LIFETIME_S = 3600.0
"""Longest life of a connection in seconds: OpenAI's limit."""
MAX_RUNNING = 16
"""The most responses of one connection in flight: OpenAI's limit."""
MAX_LANES = 32
"""The most named lanes of one connection: OpenAI's limit."""
MAX_WAITING = 64
"""The most waiting events of one connection."""

_OWN_HEADERS = frozenset(
    {"connection", "upgrade", "origin", "content-length", "content-type", "transfer-encoding", "x-request-id"}
)
"""Headers of a handshake that the connection's requests do not inherit."""
_ITEM_BYTES = 128
"""Memory of an item in addition to its text, in bytes."""
_AGE = "Responses websocket connection limit reached (60 minutes)."
_CROWD = f"The limit of {MAX_OPEN} open connections is reached, and another one needs the place of this one."
_AGAIN = "Create a new websocket connection to continue."


class Websockets:
    """The open websockets of an application."""

    def __init__(self, max_message_bytes: int, max_remembered_bytes: int) -> None:
        self.max_message_bytes = max_message_bytes
        self.memories = Memories(max_remembered_bytes, max_message_bytes)
        self.waiting_bytes: Counter[str] = Counter()
        """Bytes of the waiting events of all connections, by client."""
        self._max_waiting_bytes = max(int(MAX_INCOMPLETE_MIB * (1 << 20)), 4 * max_message_bytes)
        self._open: dict[Session, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, session: "Session") -> None:
        """Add a session. If there are too many, one of the client that has the most ends once it has answered.

        Raises UnavailableError if that is the session's own client, and all of its sessions are busy.
        """
        staying = [one for one in self._open if not one.is_ending]
        held = Counter(one.client for one in staying)
        own = sum(one.client == session.client for one in self._open)
        if len(staying) >= MAX_OPEN or own >= MAX_OPEN:
            most = max(held, key=lambda client: held[client], default=session.client)
            owner = session.client if own >= MAX_OPEN or held[session.client] >= held[most] else most
            _replaced([one for one in staying if one.client == owner], is_own=owner == session.client).expire(_CROWD)
        self._open[session] = None

    def has_room(self, client: str, num_bytes: int) -> bool:
        """Whether an event may wait. A client never has more than is left for others then."""
        return self.waiting_bytes[client] + num_bytes <= self._max_waiting_bytes - self.waiting_bytes.total()

    def leave(self, session: "Session") -> None:
        """Remove a session."""
        self._open.pop(session, None)


def _replaced(sessions: "Sequence[Session]", *, is_own: bool) -> "Session":
    """The session of a client that ends for a new one: that which is idle for longest, or else another's oldest."""
    idle = [one for one in sessions if one.idle_since is not None]
    if not idle and is_own:
        raise UnavailableError(
            f"{MAX_OPEN} websockets are open, and all of yours are busy. Please try again later, or use plain HTTP."
        )
    return min(idle, key=lambda one: one.idle_since or 0.0) if idle else sessions[0]


@dataclass(frozen=True, slots=True)
class _Event:
    """A waiting event of the client."""

    body: bytes
    previous: str | None
    """Id of the response that the event continues."""


class Session(Response):
    """The answer to a handshake: a connection on which the client requests responses.

    Responses of one lane run one after the other. Each notices a disconnect, as it would over plain HTTP.
    """

    def __init__(self, request: Request, websockets: Websockets) -> None:
        super().__init__()
        self._app = request.app
        self._websockets = websockets
        self.client = record_of(request).client
        self._memory: Memory
        self._scope = request_scope(request.scope)
        self._connection = request.scope["state"].get(CONNECTION)
        if self._connection is not None:
            self._connection.sender = sender_of(request).name
        self._gone = asyncio.Event()
        self._waiting: dict[str | None, deque[_Event]] = {}  # by lane: all lanes so far
        self._workers: dict[str | None, asyncio.Task[None]] = {}  # by lane: busy lanes
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._send: Send
        self._expired = ""
        self._farewell: asyncio.Task[None] | None = None
        self.idle_since: float | None = asyncio.get_running_loop().time()
        """None while events are answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the connection until it closes. Raises UnavailableError if there are too many connections."""
        self._websockets.admit(self)
        self._send, self._memory = send, self._websockets.memories.open(self.client)
        expiry = asyncio.get_running_loop().call_later(LIFETIME_S, self.expire, _AGE)
        try:
            await send({"type": "http.response.start", "status": 101, "headers": []})
            while (message := await receive())["type"] == "websocket.receive":
                await self._take(message)
        finally:
            expiry.cancel()
            self._gone.set()
            self._websockets.leave(self)
            self._forget_waiting()
            await asyncio.gather(*self._workers.values(), *([self._farewell] if self._farewell else []))
            self._memory.close()

    @property
    def is_ending(self) -> bool:
        """Whether it accepts no more events."""
        return bool(self._expired)

    def expire(self, why: str) -> None:
        """Accept no more events, and close the connection once all are answered."""
        self._expired = self._expired or why
        if not self._workers and self._farewell is None:
            self._farewell = asyncio.create_task(self._say_farewell())

    async def send_event(self, event: bytes, lane: str | None) -> None:
        """Send an event, a JSON object in ASCII; `stream_id` is added in a named lane."""
        if lane is not None:
            event = b'{"stream_id":"%b",%b' % (lane.encode(), event[1:])
        await self._say({"type": "websocket.send", "text": event.decode("ascii")})

    async def send_error(self, status: int, body: bytes, headers: Mapping[str, str], lane: str | None) -> None:
        """Send an error, given as an HTTP response."""
        kept = {name: value for name, value in headers.items() if name not in ("content-type", "content-length")}
        error = {**msgspec.json.decode(body)["error"], "headers": kept}  # read by OpenAI's client
        event = {"type": "error", "status": status, "error": error, "headers": kept}  # headers here are for Codex
        await self.send_event(msgspec.json.encode(event), lane)

    async def _take(self, message: Message) -> None:
        text = message.get("text")
        body = b"" if text is None else text.encode()
        lane, previous = lane_and_previous(body)
        try:
            if text is None:
                raise InvalidRequestError("Events must be JSON in text messages, but this message is binary.")
            self._check_room(lane, len(body))
        except ApiError as error:
            await self.send_error(error.status, error_body(error), error.headers, lane)
            return
        self._websockets.waiting_bytes[self.client] += len(body)
        self._waiting.setdefault(lane, deque()).append(_Event(body, previous))
        if lane not in self._workers:
            self._workers[lane] = asyncio.create_task(self._work(lane))
            self._note_work()

    def _check_room(self, lane: str | None, num_bytes: int) -> None:
        """Raise ApiError if there is no room for an event of this size."""
        if self._expired:
            raise _connection_limit(self._expired)
        if lane is not None and lane not in self._waiting and len(self._waiting.keys() - {None}) >= MAX_LANES:
            message = (
                f"This WebSocket connection has reached its maximum number of distinct stream IDs ({MAX_LANES}). Reuse "
                "an existing stream_id or open a new WebSocket connection."
            )
            raise InvalidRequestError(message, param="stream_id", code="websocket_stream_limit_reached")
        waiting = [len(event.body) for events in self._waiting.values() for event in events]
        if len(waiting) >= MAX_WAITING or (waiting and sum(waiting) + num_bytes > self._websockets.max_message_bytes):
            message = f"{len(waiting)} events of {sum(waiting)} bytes are waiting on this connection."
            raise RateLimitError(f"{message} Please wait until one is answered.")
        if not self._websockets.has_room(self.client, num_bytes):
            raise RateLimitError("Too many events are waiting on all connections. Please try again later.")

    async def _work(self, lane: str | None) -> None:
        """Answer the waiting events of a lane."""
        events = self._waiting[lane]
        try:
            while events:
                async with self._slots:
                    if events:
                        await self._answer(lane, events.popleft())
        finally:
            del self._workers[lane]
            self._note_work()
            if self._expired:
                self.expire(self._expired)

    def _note_work(self) -> None:
        self.idle_since = None if self._workers else asyncio.get_running_loop().time()
        if self._connection is not None:
            self._connection.is_answering = bool(self._workers)

    async def _answer(self, lane: str | None, event: _Event) -> None:
        """Answer an event by running the application, with the event as a request's body."""
        self._websockets.waiting_bytes[self.client] -= len(event.body)
        length, previous = str(len(event.body)).encode(), event.previous
        framing = _Framing(self, lane, lambda: self._memory.forget(previous or ""))
        scope = {
            **self._scope,
            "headers": [*self._scope["headers"], (b"content-length", length)],
            "state": {LANE: Lane(self._memory, lane)},
        }
        messages: list[Message] = [{"type": "http.request", "body": event.body, "more_body": False}]
        del event  # its body may be large, and the answer may take long

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await self._gone.wait()
            return {"type": "http.disconnect"}

        await self._app(scope, receive, framing.send)
        if not framing.is_over and not self._gone.is_set():
            await framing.fail(InternalError("The response ended too early."))

    def _forget_waiting(self) -> None:
        for events in self._waiting.values():
            while events:
                self._websockets.waiting_bytes[self.client] -= len(events.popleft().body)

    async def _say_farewell(self) -> None:
        error = _connection_limit(self._expired)
        await self.send_error(error.status, error_body(error), error.headers, None)
        await self._say({"type": "websocket.close", "code": 1000, "reason": self._expired})

    async def _say(self, message: Message) -> None:
        if self._gone.is_set():
            return
        try:
            await self._send(message)
        except OSError:  # the client has disconnected
            self._gone.set()


class _Framing:
    """Converts an HTTP response to the messages of a websocket."""

    def __init__(self, session: Session, lane: str | None, on_failure: Callable[[], None]) -> None:
        self._session = session
        self._lane = lane
        self._on_failure = on_failure
        self._status = 0
        self._headers = Headers()
        self._body = b""
        self.is_over = False
        """Whether the whole answer was sent."""

    async def send(self, message: Message) -> None:
        """Implement ASGI's `send` for the application."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], Headers(raw=message["headers"])
            return
        body: bytes = message.get("body", b"")
        self.is_over = not message.get("more_body", False)
        if self._headers.get("content-type", "").startswith("text/event-stream"):
            await self._send_frames(body)
            return
        self._body += body
        if self.is_over:
            self._on_failure()
            await self._session.send_error(self._status, self._body, self._headers, self._lane)

    async def fail(self, error: ApiError) -> None:
        """End an answer that broke off."""
        self._on_failure()
        await self._session.send_error(error.status, error_body(error), error.headers, self._lane)

    async def _send_frames(self, frames: bytes) -> None:
        """Send the events of whole frames. [DONE] is only for streams over HTTP."""
        for frame in frames.split(b"\n\n"):
            kind, _, event = frame.partition(b"\ndata: ")
            if kind == b"event: response.failed":
                self._on_failure()
            if event:
                await self._session.send_event(event, self._lane)


def request_scope(handshake: Scope) -> Scope:
    """The scope of requests through a websocket, without content-length and state."""
    kept = ("asgi", "http_version", "scheme", "path", "raw_path", "root_path", "client", "server")
    headers = [
        (name, value)
        for name, value in handshake["headers"]
        if (lowered := name.decode("latin-1").lower()) not in _OWN_HEADERS and not lowered.startswith("sec-websocket-")
    ]
    return {
        **{key: handshake[key] for key in kept if key in handshake},
        "type": "http",
        "method": "POST",
        "query_string": b"",
        "headers": [*headers, (b"content-type", b"application/json")],
    }


def _connection_limit(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{why} {_AGAIN}", code="websocket_connection_limit_reached")


def lane_and_previous(event: bytes) -> tuple[str | None, str | None]:
    """The lane of an event, and the response that it continues. None if missing or invalid.

    Errors in the event are found when it is validated as a request, in the unnamed lane.
    """
    try:
        found = msgspec.json.decode(event, type=_Routing)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None, None
    lane, previous = found.stream_id, found.previous_response_id
    is_lane = isinstance(lane, str) and STREAM_ID.fullmatch(lane) is not None
    return lane if is_lane else None, previous if isinstance(previous, str) else None


class _Routing(msgspec.Struct):
    """The fields of an event that are needed before it is validated as a request."""

    stream_id: Any = None
    previous_response_id: Any = None


@dataclass(frozen=True, slots=True)
class Lane:
    """A sequence of responses on one connection."""

    memory: "Memory"
    name: str | None
    """None for the unnamed lane."""

    def keep(self, response_id: str, items: Sequence[Raw]) -> None:
        """Remember the conversation up to this response, which is the lane's last one."""
        self.memory.keep(self.name, response_id, items)


def lane_of(request: Request) -> Lane | None:
    """The lane that a request came through; None for plain HTTP."""
    lane: Lane | None = request.scope["state"].get(LANE)
    return lane


@dataclass(frozen=True, slots=True)
class _Turn:
    response_id: str
    items: Sequence[Raw]
    num_bytes: int


class Memories:
    """Conversations that open websockets remember, so that a turn can continue a response that is not stored.

    All connections share a limit. Beyond it, the client that uses most memory loses its oldest conversation.
    """

    def __init__(self, max_bytes: int, max_connection_bytes: int) -> None:
        """`max_connection_bytes` is the limit of one connection."""
        self.max_connection_bytes = max_connection_bytes
        self._max_bytes = max_bytes
        self._open: set[Memory] = set()
        self._clock = count()

    @property
    def num_bytes(self) -> int:
        """Bytes of all memories."""
        return sum(memory.num_bytes for memory in self._open)

    def open(self, client: str) -> "Memory":
        """Return the memory of a new connection of this client; the caller must close it."""
        memory = Memory(self, client)
        self._open.add(memory)
        return memory

    def close(self, memory: "Memory") -> None:
        """Drop the memory of a closed connection."""
        self._open.discard(memory)

    def tick(self) -> int:
        """Return the next number of a logical clock that orders uses."""
        return next(self._clock)

    def make_room(self) -> None:
        """Drop conversations until the limit is met."""
        while self.num_bytes > self._max_bytes:
            by_client: Counter[str] = Counter()
            for memory in self._open:
                by_client[memory.client] += memory.num_bytes
            ((most, _),) = by_client.most_common(1)
            held = [memory for memory in self._open if memory.client == most and memory.num_bytes]
            min(held, key=lambda memory: memory.used_at).drop_oldest()


class Memory:
    """The memory of one connection: the conversation up to the last response of each of its lanes."""

    def __init__(self, memories: Memories, client: str) -> None:
        self.client = client
        self.used_at = 0
        self.num_bytes = 0
        self._memories = memories
        self._turns: dict[str | None, _Turn] = {}  # by lane, the oldest first

    def find(self, response_id: str) -> Sequence[Raw] | None:
        """The items of the conversation up to a response; None if it is not remembered."""
        self.used_at = self._memories.tick()
        return next((turn.items for turn in self._turns.values() if turn.response_id == response_id), None)

    def keep(self, lane: str | None, response_id: str, items: Sequence[Raw]) -> None:
        """Replace the lane's conversation, unless it is larger than the largest request."""
        self.used_at = self._memories.tick()
        self._drop(lane)
        size = sum(len(item) + _ITEM_BYTES for item in items)
        if size > self._memories.max_connection_bytes:
            return
        while self.num_bytes + size > self._memories.max_connection_bytes:
            self.drop_oldest()
        self._turns[lane] = _Turn(response_id, items, size)
        self.num_bytes += size
        self._memories.make_room()

    def forget(self, response_id: str) -> None:
        """Drop the conversation up to a response."""
        for lane in [lane for lane, turn in self._turns.items() if turn.response_id == response_id]:
            self._drop(lane)

    def drop_oldest(self) -> None:
        """Drop the conversation that was remembered first."""
        self._drop(next(iter(self._turns)))

    def close(self) -> None:
        """Drop everything."""
        self._memories.close(self)

    def _drop(self, lane: str | None) -> None:
        turn = self._turns.pop(lane, None)
        self.num_bytes -= 0 if turn is None else turn.num_bytes
