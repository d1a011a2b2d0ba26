"""Worker processes for request bodies that are costly to check, limited in memory and CPU time and shared fairly.

A grammar of a few hundred bytes can take any amount of time and memory to compile, in a library that nothing can
interrupt. Here that ends one process and fails one request.
"""

import logging
import os
import pickle
import signal
import subprocess
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from model_runner.processes import describe_end, isolated_module
from server.errors import ApiError, InternalError, InvalidRequestError, RateLimitError
from server.telemetry.request_trace import Sender

MAX_WORKERS = 3
"""Processes. One sender has at most all but one of them, so that another sender never waits for it."""
MAX_WAITING_BYTES = 64 << 20
"""Of one sender's bodies that no worker has taken yet."""
_BASE_CPU_S = 10
_BASE_BYTES = 512 << 20
_MEMORY_PER_BYTE = 64
"""JSON as objects of Python takes up to this much more room than as text."""
_EXPECTED_ENDS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
"""How native code ends a process whose memory ran out, of the heap or of the stack."""
_ADVICE = "Simplify its schemas, patterns or grammars."
_logger = logging.getLogger("samewise.intake")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one body may cost."""

    cpu_s: int
    num_bytes: int
    """Memory beyond what the worker has before."""

    @classmethod
    def of_size(cls, size: int) -> "Limits":
        """The limits for a body of this many bytes."""
        return cls(_BASE_CPU_S + (size >> 20), _BASE_BYTES + _MEMORY_PER_BYTE * size)


@dataclass(frozen=True, slots=True)
class Errand:
    """Work on a body, in a form that can be pickled: `work(context, body, *args)` in the worker."""

    place: bytes
    """The pickled parts of the context."""
    work: Callable[..., Any]
    body: bytes
    args: tuple[Any, ...]
    sender: str
    """Name of whom the body is from."""
    limits: Limits


@dataclass(frozen=True, slots=True)
class Outcome:
    """A worker's answer to an errand."""

    value: Any = None
    error: Exception | None = None
    is_last: bool = False
    """The worker has grown large and ends now."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    errand: Errand
    num_bytes: int
    future: "Future[Any]"


class BodyWorkers:
    """A pool of worker processes, started when they are needed. Safe to use in threads and from several event loops.

    The next body is one of the sender that has the fewest workers, and of the same sender's one that is waited for. The
    worker that was used last goes first: it has seen most of the grammars that come again.
    """

    def __init__(self, most: int = MAX_WORKERS) -> None:
        self._most = most
        self._lock = Lock()
        self._waiting: OrderedDict[Sender, deque[_Waiting]] = OrderedDict()  # by sender
        self._waiting_bytes: Counter[Sender] = Counter()
        self._running: Counter[str] = Counter()  # workers by names of senders
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []

    def submit(self, sender: Sender, errand: Errand, num_bytes: int) -> "Future[Any]":
        """Return the future result of the work.

        Raises RateLimitError if too much of this sender's is waiting. The future raises what the work raises,
        InvalidRequestError if the limits were exceeded, and InternalError if the process ended in another way.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._waiting_bytes[sender] + num_bytes > max(MAX_WAITING_BYTES, num_bytes):
                message = f"{self._waiting_bytes[sender]} bytes of your requests are waiting to be checked."
                raise RateLimitError(f"{message} Please try again later.")
            self._waiting.setdefault(sender, deque()).append(_Waiting(errand, num_bytes, future))
            self._waiting_bytes[sender] += num_bytes
            self._assign()
        return future

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def close(self) -> None:
        """End the processes. Work that was not done is cancelled."""
        with self._lock:
            for queue in self._waiting.values():
                for one in queue:
                    one.future.cancel()
            self._waiting.clear()
            workers, self._workers, self._idle = self._workers, [], []
        for worker in workers:
            worker.close()

    def _assign(self) -> None:
        """Give waiting bodies to free workers; needs the lock."""
        while self._waiting:
            sender = min(self._waiting, key=lambda one: (self._running[one.name], one.is_background))
            if self._running[sender.name] >= max(1, self._most - 1) or (worker := self._free_worker()) is None:
                return
            queue = self._waiting[sender]
            one = queue.popleft()
            self._waiting_bytes[sender] -= one.num_bytes
            self._waiting.move_to_end(sender)
            if not queue:
                del self._waiting[sender], self._waiting_bytes[sender]
            self._running[sender.name] += 1
            worker.give(one.errand, one.future, lambda worker=worker, name=sender.name: self._done(worker, name))  # type: ignore[misc]

    def _free_worker(self) -> "_Worker | None":
        if self._idle:
            return self._idle.pop()
        if len(self._workers) == self._most:
            return None
        worker = _Worker()
        self._workers.append(worker)
        worker.start()
        return worker

    def _done(self, worker: "_Worker", name: str) -> None:
        """A worker has done what it was given of the sender of this name."""
        with self._lock:
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]
            if worker in self._workers:  # the pool is not closed
                self._idle.append(worker)
                self._assign()


class _Worker(Thread):
    """A thread that has one process do the work, and starts another one when that has ended."""

    def __init__(self) -> None:
        super().__init__(name="samewise-body-worker", daemon=True)
        self._errands: SimpleQueue[tuple[Errand, Future[Any], Callable[[], None]] | None] = SimpleQueue()
        self._process: _Process | None = None

    @property
    def pid(self) -> int | None:
        """The process's id; None if there is none."""
        process = self._process
        return None if process is None else process.pid

    def give(self, errand: Errand, future: "Future[Any]", then: Callable[[], None]) -> None:
        """Do this and call `then`."""
        self._errands.put((errand, future, then))

    def close(self) -> None:
        """End the process and the thread."""
        self._errands.put(None)
        process = self._process
        if process is not None:
            process.kill()
        self.join()

    def run(self) -> None:
        while (given := self._errands.get()) is not None:
            errand, future, then = given
            if future.set_running_or_notify_cancel():
                try:
                    result = self._ask(errand)
                except Exception as error:  # noqa: BLE001 - raised to whoever waits for the future
                    then()
                    future.set_exception(error)
                else:
                    then()
                    future.set_result(result)
            else:
                then()
        self._end()

    def _ask(self, errand: Errand) -> Any:
        message = pickle.dumps(errand)
        if self._process is not None and not self._process.is_running:
            self._end()
        self._process = process = self._process or _Process()
        try:
            outcome = process.ask(message)
        except (EOFError, OSError):
            code = self._end()
            raise _failure(process.pid, code, errand.limits) from None
        if outcome.is_last:
            self._end()
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _end(self) -> int:
        """End and reap the process. Returns its exit code."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        return process.end()


class _Process:
    """A worker process and the pipe to it."""

    def __init__(self) -> None:
        """Start it. Raises OSError."""
        self._connection, theirs = Pipe()
        with theirs:
            command = [*isolated_module("server.api.body_worker"), str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self.pid = self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def ask(self, message: bytes) -> Outcome:
        """The outcome of a pickled errand. Raises EOFError or OSError if the process ended."""
        self._connection.send_bytes(message)
        outcome: Outcome = pickle.loads(self._connection.recv_bytes())
        return outcome

    def kill(self) -> None:
        """End it at once; `end` reaps it."""
        self._process.kill()

    def end(self) -> int:
        """Returns the exit code as subprocess gives it."""
        self._connection.close()
        return self._process.wait()


def _failure(pid: int, code: int, limits: Limits) -> ApiError:
    """The error of a request whose worker ended."""
    if code == -signal.SIGXCPU:
        return _too_costly(f"more than {limits.cpu_s} s of CPU time", pid)
    if -code in _EXPECTED_ENDS:
        return too_much_memory(limits, pid)
    _logger.error("%s while it checked a request", describe_end(pid, code))
    return InternalError("The process that checks large requests ended while it had this one.")


def too_much_memory(limits: Limits, pid: int) -> ApiError:
    """The error of a request that took more memory than it may."""
    return _too_costly(f"more than {limits.num_bytes >> 20} MiB of memory", pid)


def _too_costly(what: str, pid: int) -> ApiError:
    _logger.warning("a request took %s to check and is refused (process %d)", what, pid)
    return InvalidRequestError(f"Checking this request took {what}. {_ADVICE}", code="request_too_complex")
