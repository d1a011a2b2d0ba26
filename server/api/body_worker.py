"""Parses request bodies off the event loop; large ones go to a worker process.

Parsing, validating and encoding hold the interpreter's lock for long stretches, so a thread does not protect the event
loop from a body of megabytes. A grammar of a few hundred bytes can take any amount of time and memory to compile, in a
library that nothing can interrupt. Worker processes with limits handle both: exceeding a limit ends one process and
fails one request. Bodies of kilobytes share one thread: several threads would pass the lock among each other while the
event loop waits. A chat template that takes more work than its place allows (server/text/template_sandbox.py) is
rendered again in a worker process.
"""

import asyncio
import logging
import pickle
import re
import signal
import subprocess
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from pydantic import BaseModel

from model_runner.processes import describe_end, isolated_module, start_connected
from model_runner.runner_interface import RunnerInfo
from server.api.fields.rules import LENIENT, NOT_LENIENT
from server.config import Settings
from server.errors import (
    SHUTTING_DOWN,
    ApiError,
    InternalError,
    InvalidRequestError,
    RateLimitError,
    UnavailableError,
)
from server.generation.planning.planner import Planner
from server.generation.pooling import PoolingRules
from server.generation.remote_images import UnfetchedError
from server.generation.sent_images import UploadedFile
from server.generation.served_model import ServedModel
from server.http.image_fetcher import ImageFetcher
from server.http.json_body import validated
from server.telemetry.request_trace import Sender
from server.text.template_sandbox import TemplateWorkError, within
from server.text.tokenizer import Tokenizer

_T = TypeVar("_T")
_Body = TypeVar("_Body", bound=BaseModel)
SMALL_BYTES = 4 << 10
"""Bodies up to this size are handled on the event loop, which takes less time than handing them over."""
LARGE_BYTES = 192 << 10
"""Bodies from this size on go to worker processes."""
_SMALL_WORK = 10_000
"""Units of work that chat templates may take on the event loop for one body: a few hundredths of a second."""
_THREAD_WORK = 100_000
"""Units in a thread."""
COSTLY = re.compile(
    rb"dry_sequence_breakers|response_format|json_schema|output_config|output_format|structured_outputs|guided_|"
    rb"tools(?!\":\s*\[\s*\])|functions|\"(?:regex|grammar|ebnf)\"|\"format\"\s*:\s*\{|\\u00"
)
"""Finds fields that may take long, however short the body is: breakers are searched for in the whole vocabulary, and
grammars are compiled. A field's name may have escapes. Ollama's clients send `tools` without any tool."""


_NO_FILES: Mapping[str, UploadedFile] = {}


def _allow_nothing() -> None:
    """Outside of worker processes no work is limited."""


class HeavyError(Exception):
    """A body means more work than is allowed in this place; a worker process then does it."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"As much work as {num_bytes} bytes of text.")
        self.num_bytes = num_bytes


@dataclass(frozen=True, slots=True)
class BodyContext:
    """Everything that work on a body needs."""

    tokenizer: Tokenizer
    model: ServedModel
    engine: RunnerInfo | None
    """None if the work does not need it."""
    settings: Settings
    date: datetime | None = None
    """The date that chat templates show; None: now."""
    most_bytes: int | None = None
    """The most bytes of text that may be worked on in this place; None: any number."""
    files: Mapping[str, UploadedFile] = field(default_factory=dict)
    """Images that the body may name, uploaded ones by their ids and fetched ones by their URLs."""
    allow_image: Callable[[], None] = _allow_nothing
    """Raises the limit of CPU time by what decoding one image may take."""

    @property
    def info(self) -> RunnerInfo:
        """The engine's information about the model."""
        assert self.engine is not None, "callers pass it with work that needs it"
        return self.engine

    def weigh(self, num_bytes: int) -> None:
        """Raise HeavyError if work on this many bytes of text is too much for this place."""
        if self.most_bytes is not None and num_bytes > self.most_bytes:
            raise HeavyError(num_bytes)

    def weigh_image(self) -> None:
        """Raise HeavyError if this is no place to decode an image in; otherwise allow the time for it."""
        self.weigh(LARGE_BYTES)
        self.allow_image()

    def validated(self, schema: type[_Body], body: bytes) -> _Body:
        """The body by its schema, for an answer that reports ignored fields.

        Raises InvalidRequestError; for unknown fields only if the server is not lenient.
        """
        return validated(schema, body, LENIENT if self.settings.lenient else NOT_LENIENT)

    def planner(self) -> Planner:
        """Plans generation requests."""
        settings = self.settings
        if self.date is not None and settings.template_date is None:
            settings = settings.model_copy(update={"template_date": self.date.isoformat()})
        return Planner(self.tokenizer, self.model, self.info, settings, self.weigh_image, self.files)

    def pooling(self) -> PoolingRules:
        """Plans requests for embeddings and scores."""
        truncates = self.settings.auto_truncate
        return PoolingRules(self.planner(), self.tokenizer, self.model, self.info.hidden_size, auto_truncate=truncates)


class BodyWorker:
    """Runs work on request bodies on the event loop, in a thread or in a worker process, by its cost."""

    def __init__(
        self, tokenizer: Tokenizer, folder: Path, model: ServedModel, settings: Settings, workers: "WorkerPool"
    ) -> None:
        """`folder` is the tokenizer's."""
        self._tokenizer = tokenizer
        self._folder = folder
        self._model = model
        self._settings = settings
        self._workers = workers
        self.fetcher = ImageFetcher(settings)
        """Fetches the images that bodies name by URLs."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samewise-bodies")
        self._pickled: tuple[RunnerInfo | None, bytes] | None = None

    async def run(
        self,
        work: Callable[..., _T],
        body: bytes,
        info: RunnerInfo | None,
        *args: Any,
        sender: Sender,
        num_bytes: int | None = None,
        files: Mapping[str, UploadedFile] = _NO_FILES,
    ) -> _T:
        """Return or raise what `work(context, body, *args)` does; its context has the `files`.

        `work` must be a function that can be imported; its arguments and its result must be picklable. If it raises
        UnfetchedError, it is done again with the images. Senders share the workers fairly. `num_bytes` is the size of
        all input, if it is not the body's. Raises what `WorkerPool.submit` does.
        """
        try:
            return await self._weighed(work, body, info, args, sender, num_bytes, files)
        except UnfetchedError as error:
            files = {**files, **await self.fetcher.fetch(error)}
        return await self._weighed(work, body, info, args, sender, num_bytes, files)

    async def warm_up(self, info: RunnerInfo) -> None:
        """Start a worker process, so that the first costly body does not wait for it."""
        await self._by_worker(0, Sender(""), {}, _nothing, b"", info)

    async def _weighed(
        self,
        work: Callable[..., _T],
        body: bytes,
        info: RunnerInfo | None,
        args: tuple[Any, ...],
        sender: Sender,
        num_bytes: int | None,
        files: Mapping[str, UploadedFile],
    ) -> _T:
        """The result of work in the place for its cost."""
        size = len(body) if num_bytes is None else num_bytes
        try:
            if files or (size < LARGE_BYTES and COSTLY.search(body)):
                return await self._by_worker(size, sender, files, work, body, info, *args)
            return await self._run(size, sender, files, work, body, info, *args)
        except HeavyError as error:
            return await self._run(error.num_bytes, sender, files, work, body, info, *args)
        except TemplateWorkError:
            return await self._by_worker(size, sender, files, work, body, info, *args)

    async def _run(
        self,
        size: int,
        sender: Sender,
        files: Mapping[str, UploadedFile],
        work: Callable[..., _T],
        body: bytes,
        info: RunnerInfo | None,
        *args: Any,
    ) -> _T:
        if size >= LARGE_BYTES:
            return await self._by_worker(size, sender, files, work, body, info, *args)
        is_small = size <= SMALL_BYTES
        most = SMALL_BYTES if is_small else LARGE_BYTES - 1
        context = BodyContext(self._tokenizer, self._model, info, self._settings, sender.date, most)
        if is_small:
            return within(_SMALL_WORK, work, context, body, *args)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, within, _THREAD_WORK, work, context, body, *args)

    async def _by_worker(
        self,
        size: int,
        sender: Sender,
        files: Mapping[str, UploadedFile],
        work: Callable[..., _T],
        body: bytes,
        info: RunnerInfo | None,
        *args: Any,
    ) -> _T:
        limits = Limits.of_size(size)
        if self._model.images is not None:
            limits = limits.with_pixels(self._settings.max_image_megapixels)
        errand = Errand(self._pickled_context(info), work, body, args, sender, limits, files)
        result: _T = await asyncio.wrap_future(self._workers.submit(sender, errand, max(size, SMALL_BYTES)))
        return result

    def close(self) -> None:
        """Accept no more work; work that has begun ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _pickled_context(self, info: RunnerInfo | None) -> bytes:
        if self._pickled is None or self._pickled[0] is not info:
            template = self._tokenizer.chat_template
            sources = None if template is None else template.sources  # the server's: files may have changed since
            self._pickled = info, pickle.dumps((self._folder, sources, self._model, info, self._settings))
        return self._pickled[1]


def read_as(context: BodyContext, body: bytes, schema: type[_Body]) -> _Body:
    """The body by its schema, as work that needs no engine. Raises InvalidRequestError."""
    return validated(schema, body)


def _nothing(context: BodyContext, body: bytes) -> None:
    """Work that only makes the context."""


MAX_WORKERS = 3
"""The most worker processes. One sender may use all but one, so that another sender never waits for it."""
MAX_WAITING_BYTES = 64 << 20
"""The most bytes of one sender's bodies that wait for a worker."""
_IMAGE_BYTES = 20
"""Memory for each pixel of the largest image while it is decoded and made opaque."""
IMAGE_CPU_S = 2
"""CPU time for an image, of which the largest take one second."""
_BASE_CPU_S = 10
_BASE_BYTES = 512 << 20
_BASE_WORK = 2_000_000
"""Units of work for chat templates, and one more for each byte: a few seconds."""
_MEMORY_PER_BYTE = 64
"""Python objects take up to this many times the memory of their JSON."""
_EXPECTED_ENDS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
"""How native code ends a process that ran out of heap or stack memory."""
_ADVICE = "Simplify its schemas, patterns or grammars."
_logger = logging.getLogger("samewise.body_worker")


@dataclass(frozen=True, slots=True)
class Limits:
    """The CPU time and memory that work on one body may take, and the work of chat templates for it."""

    cpu_s: int
    """CPU seconds, in addition to those for images."""
    num_bytes: int
    """Memory in addition to what the worker already has."""
    template_work: int = _BASE_WORK

    @classmethod
    def of_size(cls, size: int) -> "Limits":
        """The limits for a body of this many bytes."""
        return cls(_BASE_CPU_S + (size >> 20), _BASE_BYTES + _MEMORY_PER_BYTE * size, _BASE_WORK + size)

    def with_pixels(self, megapixels: float) -> "Limits":
        """The limits for a body with images of at most this size, which are decoded one after the other.

        Each image raises the limit of CPU time when its turn comes (see BodyContext.allow_image).
        """
        return replace(self, num_bytes=self.num_bytes + int(_IMAGE_BYTES * megapixels * 1_000_000))


@dataclass(frozen=True, slots=True)
class Errand:
    """Picklable work on a body: the worker calls `work(context, body, *args)`."""

    pickled_context: bytes
    """The pickled parts of the context."""
    work: Callable[..., Any]
    body: bytes
    args: tuple[Any, ...]
    sender: Sender
    limits: Limits
    files: Mapping[str, UploadedFile] = field(default_factory=dict)
    """The context's files."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A worker's answer to an errand."""

    value: Any = None
    error: Exception | None = None
    is_last: bool = False
    """Whether the worker has grown large and ends now."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    errand: Errand
    num_bytes: int
    future: "Future[Any]"


class WorkerPool:
    """A pool of worker processes, started on demand. Safe to use in threads and from several event loops.

    The sender with the fewest workers is next, and its foreground bodies go before background ones. The most recently
    used worker goes first: it has cached most of the grammars that recur.
    """

    def __init__(self, most: int = MAX_WORKERS) -> None:
        self._most = most
        self._lock = Lock()
        self._waiting: OrderedDict[Sender, deque[_Waiting]] = OrderedDict()  # by sender
        self._waiting_bytes: Counter[Sender] = Counter()
        self._running: Counter[str] = Counter()  # workers by names of senders
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="samewise-body-worker")

    def submit(self, sender: Sender, errand: Errand, num_bytes: int) -> "Future[Any]":
        """Return the future result of the work.

        Raises RateLimitError if too many of this sender's bytes are waiting. The future raises what the work raises,
        InvalidRequestError if a limit was exceeded, UnavailableError if the pool was closed, and InternalError if the
        process ended in another way.
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
        """Ids of the running processes."""
        return [worker.pid for worker in self._workers if worker.pid]

    def close(self) -> None:
        """End the processes and cancel unfinished work."""
        with self._lock:
            for queue in self._waiting.values():
                for one in queue:
                    one.future.cancel()
            self._waiting.clear()
            workers, self._workers, self._idle = self._workers, [], []
        for worker in workers:
            worker.close()
        self._threads.shutdown()
        for worker in workers:
            worker.end()

    def _assign(self) -> None:
        """Give waiting bodies to free workers. The caller holds the lock."""
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
            self._threads.submit(self._serve, worker, one.errand, one.future, sender.name)

    def _free_worker(self) -> "_Worker | None":
        if self._idle:
            return self._idle.pop()
        if len(self._workers) == self._most:
            return None
        worker = _Worker()
        self._workers.append(worker)
        return worker

    def _serve(self, worker: "_Worker", errand: Errand, future: "Future[Any]", sender: str) -> None:
        """Have a worker do an errand; runs in a thread."""
        is_wanted = future.set_running_or_notify_cancel()
        result, error = None, None
        try:
            result = worker.ask(errand) if is_wanted else None
        except Exception as raised:  # noqa: BLE001 - raised again by the future
            error = raised
        self._done(worker, sender)
        if error is not None:
            future.set_exception(error)
        elif is_wanted:
            future.set_result(result)

    def _done(self, worker: "_Worker", name: str) -> None:
        """Reuse a worker that has finished a body of this sender."""
        with self._lock:
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]
            if worker in self._workers:  # the pool is not closed
                self._idle.append(worker)
                self._assign()


class _Worker:
    """A worker process, started with its first errand, and again after it has ended. One thread at a time uses it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_closed = False

    @property
    def pid(self) -> int:
        """The process's id; 0 if there is none."""
        process = self._process
        return 0 if process is None else process.pid

    def ask(self, errand: Errand) -> Any:
        """Return or raise what the errand's work does. Raises ApiError if the process ends or is closed."""
        message = pickle.dumps(errand)
        if self._process is not None and self._process.poll() is not None:
            self.end()
        if self._is_closed:
            raise UnavailableError(SHUTTING_DOWN)
        connection = self._connection or self._start()
        try:
            connection.send_bytes(message)
            outcome: Outcome = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            pid, code = self.pid, self.end()
            if self._is_closed:
                raise UnavailableError(SHUTTING_DOWN) from None
            raise _failure(pid, code, errand.limits) from None
        if outcome.is_last:
            self.end()
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def close(self) -> None:
        """Kill the process, which ends an `ask` in another thread; `end` reaps it."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> int:
        """End and reap the process. Returns its exit code."""
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if process is None or connection is None:
            return 0
        connection.close()
        return process.wait()

    def _start(self) -> Connection:
        self._process, self._connection = start_connected(isolated_module("server.api.body_worker_process"))
        return self._connection


def _failure(pid: int, code: int, limits: Limits) -> ApiError:
    """The error for a request whose worker process ended."""
    if code == -signal.SIGXCPU:
        return _too_costly(f"more than {limits.cpu_s} s of CPU time", pid)
    if -code in _EXPECTED_ENDS:
        return too_much_memory(limits, pid)
    _logger.error("%s while it checked a request", describe_end(pid, code))
    return InternalError("The worker process that checked this request ended unexpectedly.")


def too_much_memory(limits: Limits, pid: int) -> ApiError:
    """The error for a request that exceeded its memory limit."""
    return _too_costly(f"more than {limits.num_bytes >> 20} MiB of memory", pid)


def _too_costly(what: str, pid: int) -> ApiError:
    _logger.warning("a request took %s to check and is refused (process %d)", what, pid)
    return InvalidRequestError(f"Checking this request took {what}. {_ADVICE}", code="request_too_complex")
