"""Publishes the engines' prefix-cache events (kv_events.py) over ZeroMQ. Needs pyzmq.

It lives in the HTTP process, so subscribers stay connected and the numbering continues when an engine is replaced.
"""

import errno
import logging
import threading
from collections import deque

import zmq

BACKLOG = 10_000
"""Batches (one step each) kept for replay, and queued at most for each subscriber."""
BACKLOG_BYTES = 64 << 20
"""Limit on the backlog in bytes, because one step of a long prompt can carry thousands of tokens."""
_SLACK = 1_000
"""Further messages that are queued for who asks for a replay."""
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_NO_ADDRESS = "no network interface here has this address"

logger = logging.getLogger("samewise.kv_events")


class KVPublisher:
    """Numbers batches from 0 and sends each as `[topic, number, batch]` to all subscribers.

    Sending never waits. A subscriber that falls behind by more than the backlog misses batches, and sees it from the
    numbers. It can request them at the replay endpoint with `[b"", number]`. The reply is `[b"", number, batch]` for
    each batch in the backlog from that number on, then `[b"", -1, b""]`. Numbers have 8 bytes, big-endian.
    """

    def __init__(self, endpoint: str, topic: str = "", replay: str | None = None, backlog: int = BACKLOG) -> None:
        """Raises OSError with a message for the user if it cannot listen on one of the endpoints."""
        self._topic = topic.encode()
        self._most = 0 if replay is None else backlog
        self._batches: deque[tuple[bytes, bytes]] = deque()
        self._num_bytes = 0
        """Size of `_batches`."""
        self._num_batches = 0
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._thread: threading.Thread | None = None
        try:
            self._subscribers = _listen(self._context, zmq.PUB, endpoint, backlog)
            self.endpoint = self._subscribers.get_string(zmq.LAST_ENDPOINT)
            """The given endpoint, with the chosen port if none was given."""
            self.replay: str | None = None
            if replay is not None:
                # ZeroMQ drops messages beyond the limit. It may count up to half of it as unread after all was read,
                # and on a busy machine hears late of what was read.
                late = _listen(self._context, zmq.ROUTER, replay, 2 * (backlog + 1) + _SLACK)
                self.replay = late.get_string(zmq.LAST_ENDPOINT)
                self._thread = threading.Thread(
                    target=self._serve_replays, args=(late,), name="samewise-kv-replay", daemon=True
                )
                self._thread.start()
        except OSError:
            self._context.destroy(linger=0)
            raise

    def publish(self, batch: bytes) -> None:
        """Send a batch to all subscribers. Never blocks. Called from one thread only."""
        number = self._num_batches.to_bytes(_NUMBER_BYTES, "big")
        with self._lock:
            self._batches.append((number, batch))
            self._num_bytes += len(batch)
            while len(self._batches) > self._most or (self._num_bytes > BACKLOG_BYTES and len(self._batches) > 1):
                self._num_bytes -= len(self._batches.popleft()[1])
        self._num_batches += 1
        self._subscribers.send_multipart((self._topic, number, batch), zmq.NOBLOCK)

    def close(self) -> None:
        """Close at once; unsent batches are dropped."""
        self._subscribers.close(linger=0)
        self._context.term()
        if self._thread is not None:
            self._thread.join()

    def _serve_replays(self, socket: "zmq.Socket[bytes]") -> None:
        """Answers replay requests in a thread that owns the socket, so that it takes no time from the event loop."""
        try:
            while True:
                self._answer(socket, socket.recv_multipart())
        except zmq.ContextTerminated:
            return
        finally:
            socket.close(linger=0)  # otherwise closing would wait for unsent answers

    def _answer(self, socket: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1] or len(frames[2]) != _NUMBER_BYTES:
            logger.warning("Ignored a replay request for KV events: expected an empty frame and a number of 8 bytes.")
            return
        sender, delimiter, first = frames
        with self._lock:
            batches = list(self._batches)
        for number, batch in batches:
            if number >= first:
                socket.send_multipart((sender, delimiter, number, batch))
        socket.send_multipart((sender, delimiter, _END, b""))


def _listen(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, endpoint: str, backlog: int) -> "zmq.Socket[bytes]":
    """A bound socket that drops messages beyond `backlog` for a slow peer. Raises OSError."""
    socket = context.socket(kind)
    socket.sndhwm = backlog
    socket.ipv6 = "[" in endpoint
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        reason = _NO_ADDRESS if error.errno == errno.ENODEV else zmq.strerror(error.errno or 0)
        raise OSError(f"cannot publish KV events on {endpoint}: {reason}") from None
    return socket
