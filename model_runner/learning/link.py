"""The engine's connection to the learner process, and the messages between them.

The engine sends a `Begin`, and then pieces: examples of consecutive tokens of one choice, all computed by the target,
with float16 features. The learner sends `NewHeads`, `LearnerNote`s, and after a training step, at most once a second,
its `LearningStats` since it started.
"""

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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from model_runner.processes import Backoff, describe_end, isolated_module, start_connected
from model_runner.runner_interface import LearningStats

if TYPE_CHECKING:
    from model_runner.heads.base import Example, Heads

EXIT_IMPOSSIBLE = 65
"""Exit code of a learner whose failure a restart would only repeat."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The learner's first message: the heads to train, and the resources for it."""

    model: str
    """The target's folder."""
    kind: str
    heads: str | None
    """The folder of the initial heads; None starts with fresh ones, which only `hydra` supports."""
    cache: str
    """The cache folder for trained heads."""
    threads: int
    memory: int
    """Bytes for features, weights in training and the versions to compare with, together."""


@dataclass(frozen=True, slots=True)
class NewHeads:
    """Heads to use from now on."""

    version: int
    """Higher than all versions before; the engine's initial heads are version 0."""
    checkpoint: bytes
    """Serialised heads for `store.load_learnt`."""


@dataclass(frozen=True, slots=True)
class LearnerNote:
    """A log line of the learner; the engine's process writes it."""

    level: int
    """A level of `logging`."""
    text: str


logger = logging.getLogger("samewise.learning")

_WAITING_PIECES = 4
"""Maximum number of pieces waiting to be sent: a slow learner gets no more than it can use."""
_GRACE_S = 1.5
"""Seconds that a learner has to exit after its connection is closed."""
COMMAND = isolated_module("model_runner.learning.process")


class ProcessLink:
    """Connection to a learner process, which ends with the thread that starts it. No call blocks.

    One thread sends pieces, another receives heads and prepares them, so that the runner's steps neither wait nor work
    for either. If the learner dies, this is logged and it is restarted with the heads stored last.
    """

    def __init__(
        self,
        begin: Begin,
        prepare: Callable[[bytes], "Heads"],
        command: tuple[str, ...] = COMMAND,
        backoff: Backoff | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            begin: each learner's first message.
            prepare: makes usable heads from a checkpoint. Called in its own thread.
            command: starts a learner.
            backoff: delays before restarts.
        """
        self.is_open = False
        """Whether a learner is running and accepts pieces."""
        self._begin = begin
        self._prepare = prepare
        self._command = command
        self._backoff = backoff or Backoff()
        self._pieces: queue.Queue[Example | None] = queue.Queue(_WAITING_PIECES)
        self._fresh: deque[Heads] = deque(maxlen=1)
        self._num_dropped = 0
        self._report = self._before = LearningStats()
        """The last report with the counts of all learner processes, and the last one of the previous process."""
        self._is_closing = threading.Event()
        self._receiver: threading.Thread | None = None

    def start(self) -> None:
        """Start the process. A failure is logged like a process that died."""
        try:
            self._open()
        except OSError as error:
            logger.warning("Heads are not trained: the learner process cannot be started: %s", error)
            return
        self._receiver = threading.Thread(target=self._supervise, name="samewise-from-learner", daemon=True)
        self._receiver.start()

    @property
    def pid(self) -> int:
        """Process id of the learner."""
        return self._process.pid

    @property
    def stats(self) -> LearningStats:
        """Statistics of all learner processes so far."""
        return replace(self._report, pieces_dropped=self._num_dropped)

    def offer(self, piece: "Example") -> None:
        """Send a piece, or drop it if the learner is too slow."""
        try:
            self._pieces.put_nowait(piece)
        except queue.Full:
            self._num_dropped += 1

    def take_heads(self) -> "Heads | None":
        """The newest heads since the last call, ready to use; None if there are none."""
        return self._fresh.pop() if self._fresh else None

    def close(self) -> None:
        """Stop the learner; returns when its process is gone."""
        if self._receiver is not None:
            self._is_closing.set()
            self._hang_up()
            self._receiver.join()

    def _open(self) -> None:
        """Start a process and begin to send. Raises OSError."""
        self._started_at = time.monotonic()
        self._process, self._connection = start_connected(self._command)
        self._socket = socket.socket(fileno=os.dup(self._connection.fileno()))
        """Hangs up in another thread than the one that reads and closes the connection."""
        self._pieces = queue.Queue(_WAITING_PIECES)
        self._sender = threading.Thread(target=self._send_all, name="samewise-to-learner", daemon=True)
        self._sender.start()
        self.is_open = True

    def _supervise(self) -> None:
        """Receive from one learner after another, until the link is closed or a restart makes no sense."""
        failures, ending = 0, self._receive_all()
        while not self._is_closing.is_set():
            failures = 0 if self._backoff.stayed_up(0, time.monotonic() - self._started_at) else failures + 1
            is_impossible = self._process.returncode == EXIT_IMPOSSIBLE
            delay = None if is_impossible else self._backoff.delay(failures)
            outlook = "training stops until the engine restarts"
            logger.warning(
                "The learner process has ended: %s. The current heads stay in use; %s.",
                ending, outlook if delay is None else f"it restarts in {delay:g} s",
            )  # fmt: skip
            if delay is None or self._is_closing.wait(delay):
                return
            ending = self._run_another()

    def _run_another(self) -> str:
        """Run one more learner to its end; returns how it ended."""
        try:
            self._open()
        except OSError as error:
            return f"it could not be started: {error}"
        if self._is_closing.is_set():
            self._hang_up()
        return self._receive_all()

    def _send_all(self) -> None:
        """Send pieces until the connection is closed."""
        pieces = self._pieces
        with contextlib.suppress(OSError):  # the receiving thread finds out why
            self._connection.send(self._begin)
            while (piece := pieces.get()) is not None:
                self._connection.send(piece)

    def _receive_all(self) -> str:
        """Receive until the learner has ended, and make sure that it has; returns how it ended."""
        why = ""
        try:
            while True:
                self._apply(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception as error:  # noqa: BLE001 - requests are served regardless
            why = f"; it sent an unusable message: {error}"
        self.is_open = False
        self._before = self._report
        self._hang_up()
        self._sender.join()
        ending = self._reap()
        self._connection.close()
        self._socket.close()
        return ending + why

    def _apply(self, message: object) -> None:
        match message:
            case NewHeads(version, checkpoint):
                self._fresh.append(self._prepare(checkpoint))
                logger.debug("Heads version %d is ready to use.", version)
            case LearningStats():
                self._report = _since(self._before, message)
            case LearnerNote(level, text):
                logger.log(level, "%s", text)
            case _:
                raise TypeError(f"{type(message).__name__} is not a message from a learner")

    def _hang_up(self) -> None:
        """Wake both threads and the learner."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(queue.Full):  # then the sending thread is awake and finds the connection closed
            self._pieces.put_nowait(None)

    def _reap(self) -> str:
        """Wait for the process, or kill it; returns how it ended."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return describe_end(self._process.pid, code)


def _since(before: LearningStats, now: LearningStats) -> LearningStats:
    """Add the counts of earlier learners to a report."""
    counts = ("tokens", "steps", "publications", "rollbacks")
    return replace(now, **{count: getattr(before, count) + getattr(now, count) for count in counts})
