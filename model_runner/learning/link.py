"""The runner's end of the line to a learner, which runs in a process of its own."""

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
from typing import Literal, Protocol

from model_runner.models.heads.base import Heads
from model_runner.processes import Backoff, describe_end, isolated_module

EXIT_IMPOSSIBLE = 65
"""Exit code of a learner that would end in the same way if it was started again."""
LearnedKind = Literal["hydra", "medusa", "eagle3"]
"""Heads for which there is an objective."""


@dataclass(frozen=True, slots=True)
class Begin:
    """What to learn, and with what."""

    model: str
    """The target's folder."""
    kind: LearnedKind
    heads: str | None
    """The folder of the heads to go on from; None begins with fresh ones, which only `hydra` can."""
    cache: str | None
    """The folder under which learnt heads are kept; None keeps none."""
    threads: int
    memory: int
    """Bytes that features, weights in training and the versions to compare with may take together."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one choice, all of which the target has computed.

    Row t of a feature belongs to tokens[t] and is what tokens[t + 1] is guessed from. So tokens[num_prompt:] are what
    is learnt from, and the rows before them are what came before: num_prompt is at least 1, and exactly 1 where a piece
    begins within the output.
    """

    start: int
    """The position of the first token in its sequence."""
    num_prompt: int
    temperature: float
    tokens: bytes
    """[T] int32"""
    features: dict[str, bytes]
    """By name (models/features.py), each [T, hidden] float16, clipped to its range."""


@dataclass(frozen=True, slots=True)
class NewHeads:
    """Heads to be used from now on."""

    version: int
    """Greater than that of all before; the heads that the engine began with are version 0."""
    checkpoint: bytes
    """For `checkpoint.load_learnt`."""


@dataclass(frozen=True, slots=True)
class LearnerReport:
    """Where learning is. Sent after a training step, at most once a second."""

    version: int
    """Of the heads in use."""
    steps: int
    """Of training, since the process began."""
    tokens: int
    """Of output that were taken in."""
    held: int
    """Tokens that can be trained on now."""
    published: int
    """Versions that were found better; those of earlier runs do not count."""
    rolled_back: int
    """Times that an older version was found better again."""
    first: float | None
    """Tokens per step that the engine's first heads would give on what came in lately: expected of a chain of first
    guesses, the target's own token included. None before anything was judged."""
    current: float | None
    """The same of the heads in use."""


@dataclass(frozen=True, slots=True)
class LearnerNote:
    """A line for the log: the engine's process knows where and how it is written."""

    level: int
    """As `logging` has them."""
    text: str


ToLearner = Begin | Piece
FromLearner = NewHeads | LearnerReport | LearnerNote


def encode(message: ToLearner | FromLearner) -> bytes:
    """A message as it is sent."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decode_to_learner(sent: bytes) -> ToLearner:
    """A message that the learner got. Raises what pickle does, or TypeError for anything else."""
    message = pickle.loads(sent)
    if not isinstance(message, ToLearner):
        raise TypeError(f"{type(message).__name__} is no message to a learner")
    return message


def decode_from_learner(sent: bytes) -> FromLearner:
    """A message of the learner. Raises what pickle does, or TypeError for anything else."""
    message = pickle.loads(sent)
    if not isinstance(message, FromLearner):
        raise TypeError(f"{type(message).__name__} is no message of a learner")
    return message


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
