"""The runner's end of the line to a learner, which runs in a process of its own."""

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

from model_runner.learning.messages import (
    Begin,
    FromLearner,
    LearnerNote,
    LearnerReport,
    NewHeads,
    Piece,
    ToLearner,
    decode_from_learner,
    encode,
)
from model_runner.models.heads.base import Heads
from model_runner.parent import describe_end

logger = logging.getLogger("samewise.learning")

_WAITING_PIECES = 4
"""What waits to be sent at most: a learner that is short of time gets no more than it can use."""
_GRACE_S = 1.5
"""How long a learner may take to end once its connection is closed."""
COMMAND = (sys.executable, "-P", "-m", "model_runner.learning.process")  # -P: nothing from the working folder


class LearnerLink(Protocol):
    """The line to a learner. Nothing here waits for it."""

    is_open: bool
    """Whether there is a learner that takes pieces; once there is none any more, none will come."""
    num_dropped: int
    """Pieces that the learner was too slow for."""
    report: LearnerReport | None
    """The last one."""

    def start(self) -> None:
        """Have the learner begin."""
        ...

    def offer(self, piece: Piece) -> None:
        """Send a piece, or drop it."""
        ...

    def take_heads(self) -> Heads | None:
        """The newest heads that came since the last call, ready to be used."""
        ...

    def close(self) -> None:
        """End the learner."""
        ...


class ProcessLink:
    """A LearnerLink to a process that dies with the thread that starts it.

    One thread sends what waits, another receives and brings heads into the form that they are used in, so that a step
    of the runner neither waits nor works for any of it. When the learner dies, that is logged, once.
    """

    def __init__(self, begin: Begin, prepare: Callable[[bytes], Heads], command: tuple[str, ...] = COMMAND) -> None:
        """
        Args:
            begin: the learner's first message.
            prepare: makes heads that can be used of a checkpoint. Called in a thread of its own.
            command: starts the learner, given its options.
        """
        self.is_open = False
        self.num_dropped = 0
        self.report: LearnerReport | None = None
        self._begin = begin
        self._prepare = prepare
        self._command = command
        self._pieces: queue.Queue[Piece | None] = queue.Queue(_WAITING_PIECES)
        self._fresh: deque[Heads] = deque(maxlen=1)
        self._is_closing = False
        self._threads: tuple[threading.Thread, ...] = ()

    def start(self) -> None:
        """See LearnerLink. A process that cannot be started is logged like one that has died."""
        ours, theirs = socket.socketpair()
        with theirs:
            options = ["--connection", str(theirs.fileno()), "--parent", str(os.getpid())]
            try:
                self._process = subprocess.Popen(
                    [*self._command, *options], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
            except OSError as error:
                ours.close()
                logger.warning("The heads do not learn: their process cannot be started: %s", error)
                return
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self.is_open = True
        self._threads = tuple(
            threading.Thread(target=run, name=f"samewise-{name}", daemon=True)
            for name, run in (("to-learner", self._send_all), ("from-learner", self._receive_all))
        )
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """The id of the learner's process."""
        return self._process.pid

    def offer(self, piece: Piece) -> None:
        """See LearnerLink."""
        try:
            self._pieces.put_nowait(piece)
        except queue.Full:
            self.num_dropped += 1

    def take_heads(self) -> Heads | None:
        """See LearnerLink."""
        return self._fresh.pop() if self._fresh else None

    def close(self) -> None:
        """See LearnerLink. Returns when the process is gone."""
        if not self._threads:
            return
        self._is_closing = True
        self._hang_up()
        for thread in self._threads:
            thread.join()

    def _send_all(self) -> None:
        """Until the line is cut."""
        with contextlib.suppress(OSError):  # whoever receives finds out why
            self._send(self._begin)
            while (piece := self._pieces.get()) is not None:
                self._send(piece)

    def _send(self, message: ToLearner) -> None:
        self._connection.send_bytes(encode(message))

    def _receive_all(self) -> None:
        """Until the learner has ended, and see to it that it has."""
        why = ""
        try:
            while True:
                self._apply(decode_from_learner(self._connection.recv_bytes()))
        except (EOFError, OSError):
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, requests are served as before
            why = f"; what it sent cannot be used: {error}"
        self.is_open = False
        self._hang_up()
        ending = self._reap()
        self._connection.close()
        self._socket.close()
        if not self._is_closing:
            logger.warning(
                "The heads learn no more until the engine starts again, and are used as they are now. "
                "The process in which they learnt has ended: %s%s.", ending, why,
            )  # fmt: skip

    def _apply(self, message: FromLearner) -> None:
        match message:
            case NewHeads(version, checkpoint):
                self._fresh.append(self._prepare(checkpoint))
                logger.debug("Heads of version %d can be used.", version)
            case LearnerReport():
                self.report = message
            case LearnerNote(level, text):
                logger.log(level, "%s", text)

    def _hang_up(self) -> None:
        """Wakes both threads and the learner, wherever they wait."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(queue.Full):  # then the thread that sends is awake, and finds the line cut
            self._pieces.put_nowait(None)

    def _reap(self) -> str:
        """How the process ended, by itself or by force."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return describe_end(self._process.pid, code)
