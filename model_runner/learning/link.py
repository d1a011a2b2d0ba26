"""The engine's connection to the learner process, and the messages between them."""

import contextlib
import logging
import os
import pickle
import queue
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Literal, Protocol

from model_runner.processes import Backoff, describe_end, isolated_module, start_isolated

if TYPE_CHECKING:
    from model_runner.heads.base import Heads

EXIT_IMPOSSIBLE = 65
"""Exit code of a learner whose failure a restart would only repeat."""
LearnedKind = Literal["hydra", "medusa", "eagle3"]
"""Kinds of heads that can be trained."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The learner's first message: the heads to train, and the resources for it."""

    model: str
    """The target's folder."""
    kind: LearnedKind
    heads: str | None
    """The folder of the initial heads; None starts with fresh ones, which only `hydra` supports."""
    cache: str | None
    """The cache folder for trained heads; None does not store them."""
    threads: int
    memory: int
    """Bytes for features, weights in training and the versions to compare with, together."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one choice, all computed by the target.

    Row t of a feature belongs to tokens[t] and predicts tokens[t + 1]. Heads are trained on tokens[num_prompt:];
    earlier rows are context. num_prompt is at least 1, and exactly 1 if the piece begins within the output.
    """

    start: int
    """Position of the first token in its sequence."""
    num_prompt: int
    temperature: float
    tokens: bytes
    """[T] int32"""
    features: dict[str, bytes]
    """By feature name (features.py), each [T, hidden] float16, clipped to its range."""


@dataclass(frozen=True, slots=True)
class NewHeads:
    """Heads to use from now on."""

    version: int
    """Higher than all versions before; the engine's initial heads are version 0."""
    checkpoint: bytes
    """Serialised heads for `store.load_learnt`."""


@dataclass(frozen=True, slots=True)
class LearnerReport:
    """Progress of training. Sent after a training step, at most once a second."""

    version: int
    """Version of the heads in use."""
    steps: int
    """Training steps since the process started."""
    tokens: int
    """Output tokens received."""
    held: int
    """Tokens that are available for training now."""
    published: int
    """Versions that were better and were published since the process started."""
    rolled_back: int
    """How often an older version was better again and was restored."""
    first: float | None
    """Expected tokens per step of the engine's initial heads on recent traffic: a chain of first guesses, plus the
    target's own token. None before the first test."""
    current: float | None
    """Tokens per step of the heads in use on recent traffic."""


@dataclass(frozen=True, slots=True)
class LearnerNote:
    """A log line of the learner; the engine's process writes it."""

    level: int
    """A level of `logging`."""
    text: str


ToLearner = Begin | Piece
FromLearner = NewHeads | LearnerReport | LearnerNote


def encode(message: ToLearner | FromLearner) -> bytes:
    """Serialise a message."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decode_to_learner(sent: bytes) -> ToLearner:
    """Read a message to the learner. Raises pickle's errors, or TypeError for anything else."""
    message = pickle.loads(sent)
    if not isinstance(message, ToLearner):
        raise TypeError(f"{type(message).__name__} is not a message to a learner")
    return message


def decode_from_learner(sent: bytes) -> FromLearner:
    """Read a message from the learner. Raises pickle's errors, or TypeError for anything else."""
    message = pickle.loads(sent)
    if not isinstance(message, FromLearner):
        raise TypeError(f"{type(message).__name__} is not a message from a learner")
    return message


logger = logging.getLogger("samewise.learning")

_WAITING_PIECES = 4
"""Maximum number of pieces waiting to be sent: a slow learner gets no more than it can use."""
_GRACE_S = 1.5
"""Seconds that a learner has to exit after its connection is closed."""
COMMAND = isolated_module("model_runner.learning.process")


class LearnerLink(Protocol):
    """Connection to a learner. No call blocks."""

    is_open: bool
    """Whether a learner is running and accepts pieces."""
    num_dropped: int
    """Pieces that were dropped because the learner was too slow."""
    report: LearnerReport | None
    """The last report, including the counts of earlier learner processes."""

    def start(self) -> None:
        """Start the learner."""
        ...

    def offer(self, piece: Piece) -> None:
        """Send a piece, or drop it."""
        ...

    def take_heads(self) -> "Heads | None":
        """The newest heads since the last call, ready to use; None if there are none."""
        ...

    def close(self) -> None:
        """Stop the learner."""
        ...


class ProcessLink:
    """A LearnerLink to a process that ends with the thread that starts it.

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
            command: starts a learner; its options are appended.
            backoff: delays before restarts.
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
        """The last report of the previous learner process."""
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

    def offer(self, piece: Piece) -> None:
        try:
            self._pieces.put_nowait(piece)
        except queue.Full:
            self.num_dropped += 1

    def take_heads(self) -> "Heads | None":
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
        ours, theirs = socket.socketpair()
        with theirs:
            options = ["--connection", str(theirs.fileno()), "--parent", str(os.getpid())]
            try:
                self._process = start_isolated([*self._command, *options], theirs.fileno())
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
            self._send(self._begin)
            while (piece := pieces.get()) is not None:
                self._send(piece)

    def _send(self, message: ToLearner) -> None:
        self._connection.send_bytes(encode(message))

    def _receive_all(self) -> str:
        """Receive until the learner has ended, and make sure that it has; returns how it ended."""
        why = ""
        try:
            while True:
                self._apply(decode_from_learner(self._connection.recv_bytes()))
        except (EOFError, OSError):
            pass
        except Exception as error:  # noqa: BLE001 - requests are served regardless
            why = f"; it sent an unusable message: {error}"
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
                logger.debug("Heads version %d is ready to use.", version)
            case LearnerReport():
                self.report = message if self._before is None else _since(self._before, message)
            case LearnerNote(level, text):
                logger.log(level, "%s", text)

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


def _since(before: LearnerReport, report: LearnerReport) -> LearnerReport:
    """Add the counts of earlier learners to a report."""
    return replace(
        report,
        steps=before.steps + report.steps,
        tokens=before.tokens + report.tokens,
        published=before.published + report.published,
        rolled_back=before.rolled_back + report.rolled_back,
    )
