"""The runner's end of the line to a learner, which runs in a process of its own."""

import contextlib
import logging
import os
import queue
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Protocol

from model_runner.learning.messages import (
    EXIT_IMPOSSIBLE,
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
from model_runner.parent import Backoff, describe_end, isolated_module

logger = logging.getLogger("samewise.learning")

_WAITING_PIECES = 4
"""What waits to be sent at most: a learner that is short of time gets no more than it can use."""
_GRACE_S = 1.5
"""How long a learner may take to end once its connection is closed."""
COMMAND = isolated_module("model_runner.learning.process")


class LearnerLink(Protocol):
    """The line to a learner. Nothing here waits for it."""

    is_open: bool
    """Whether there is a learner now that takes pieces."""
    num_dropped: int
    """Pieces that the learner was too slow for."""
    report: LearnerReport | None
    """The last one, with the counts of the learners before this one."""

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
    of the runner neither waits nor works for any of it. When the learner dies, that is logged, and another one is
    started, which goes on with what the last one has kept.
    """

    def __init__(
        self,
        begin: Begin,
        prepare: Callable[[bytes], Heads],
        command: tuple[str, ...] = COMMAND,
        backoff: Backoff | None = None,
    ) -> None:
        """
        Args:
            begin: each learner's first message.
            prepare: makes heads that can be used of a checkpoint. Called in a thread of its own.
            command: starts a learner, given its options.
            backoff: how long to wait before a learner that has died is followed by another.
        """
        self.is_open = False
        self.num_dropped = 0
        self.report: LearnerReport | None = None
        self._begin = begin
        self._prepare = prepare
        self._command = command
        self._backoff = backoff or Backoff()
        self._pieces: queue.Queue[Piece | None] = queue.Queue(_WAITING_PIECES)
        self._fresh: deque[Heads] = deque(maxlen=1)
        self._before: LearnerReport | None = None
        """The last one of the learners before this one."""
        self._is_closing = threading.Event()
        self._receiver: threading.Thread | None = None

    def start(self) -> None:
        """See LearnerLink. A process that cannot be started is logged like one that has died."""
        try:
            self._open()
        except OSError as error:
            logger.warning("The heads do not learn: their process cannot be started: %s", error)
            return
        self._receiver = threading.Thread(target=self._supervise, name="samewise-from-learner", daemon=True)
        self._receiver.start()

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
        if self._receiver is not None:
            self._is_closing.set()
            self._hang_up()
            self._receiver.join()

    def _open(self) -> None:
        """Start a process, and send to it. Raises OSError."""
        self._started_at = time.monotonic()
        ours, theirs = socket.socketpair()
        with theirs:
            options = ["--connection", str(theirs.fileno()), "--parent", str(os.getpid())]
            try:
                self._process = subprocess.Popen(
                    [*self._command, *options], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
            except OSError:
                ours.close()
                raise
        self._pieces = queue.Queue(_WAITING_PIECES)
        self._connection = Connection(os.dup(ours.fileno()))
        self._socket = ours
        self._sender = threading.Thread(target=self._send_all, name="samewise-to-learner", daemon=True)
        self._sender.start()
        self.is_open = True

    def _supervise(self) -> None:
        """Receive from one learner after the other, until there shall be none or it makes no sense any more."""
        failures, ending = 0, self._receive_all()
        while not self._is_closing.is_set():
            failures = 0 if self._backoff.stayed_up(0, time.monotonic() - self._started_at) else failures + 1
            is_impossible = self._process.returncode == EXIT_IMPOSSIBLE
            delay = None if is_impossible else self._backoff.delay(failures)
            outlook = "the heads learn no more until the engine starts again"
            logger.warning(
                "The process in which the heads learn has ended: %s. They are used as they are now; %s.",
                ending, outlook if delay is None else f"another process is started in {delay:g} s",
            )  # fmt: skip
            if delay is None or self._is_closing.wait(delay):
                return
            ending = self._run_another()

    def _run_another(self) -> str:
        """The whole life of one more learner. Returns how it ended."""
        try:
            self._open()
        except OSError as error:
            return f"it cannot be started: {error}"
        if self._is_closing.is_set():
            self._hang_up()
        return self._receive_all()

    def _send_all(self) -> None:
        """Until the line is cut."""
        pieces = self._pieces
        with contextlib.suppress(OSError):  # whoever receives finds out why
            self._send(self._begin)
            while (piece := pieces.get()) is not None:
                self._send(piece)

    def _send(self, message: ToLearner) -> None:
        self._connection.send_bytes(encode(message))

    def _receive_all(self) -> str:
        """Until the learner has ended, and see to it that it has. Returns how it ended."""
        why = ""
        try:
            while True:
                self._apply(decode_from_learner(self._connection.recv_bytes()))
        except (EOFError, OSError):
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, requests are served as before
            why = f"; what it sent cannot be used: {error}"
        self.is_open = False
        self._before = self.report
        self._hang_up()
        self._sender.join()
        ending = self._reap()
        self._connection.close()
        self._socket.close()
        return ending + why

    def _apply(self, message: FromLearner) -> None:
        match message:
            case NewHeads(version, checkpoint):
                self._fresh.append(self._prepare(checkpoint))
                logger.debug("Heads of version %d can be used.", version)
            case LearnerReport():
                self.report = message if self._before is None else _since(self._before, message)
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


def _since(before: LearnerReport, report: LearnerReport) -> LearnerReport:
    """A report that counts what learners before this one have done, too."""
    return replace(
        report,
        steps=before.steps + report.steps,
        tokens=before.tokens + report.tokens,
        published=before.published + report.published,
        rolled_back=before.rolled_back + report.rolled_back,
    )
