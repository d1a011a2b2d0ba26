"""From the bytes of a body to a plan, without keeping the event loop: the larger, the further away from it.

Parsing, validating and encoding hold the interpreter's lock for long stretches, so a thread protects nobody from a body
of megabytes. Those are taken in by a process of their own, started when the first one comes. Those of kilobytes have
one thread for all: several would pass the lock among each other while the event loop waits for it.
"""

import asyncio
import re
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from model_runner.info import RunnerInfo
from model_runner.parent import die_with_parent
from server.config import Settings
from server.errors import InternalError
from server.generation.planning.planner import Planner
from server.generation.pooling.rules import PoolingRules
from server.generation.served_model import ServedModel
from server.text.tokenizer import Tokenizer

_T = TypeVar("_T")
SMALL_BYTES = 4 << 10
"""Bodies up to this size take less time than handing them over."""
LARGE_BYTES = 192 << 10
"""Bodies from this size on go to another process."""
SLOW = re.compile(
    rb"dry_sequence_breakers|response_format|json_schema|output_config|output_format|structured_outputs|guided_|tools|"
    rb"functions|\\u00"
)
"""What takes a while, however short it is: breakers are looked for in the whole vocabulary, and grammars are compiled.
A name may have escapes."""
MAX_PROCESSES = 2


class HeavyError(Exception):
    """A body means more work than there may be where it is; it is done elsewhere then."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"As much work as {num_bytes} bytes of text.")
        self.num_bytes = num_bytes


@dataclass(frozen=True, slots=True)
class IntakeContext:
    """What a body meets."""

    tokenizer: Tokenizer
    model: ServedModel
    info: RunnerInfo
    settings: Settings
    most_bytes: int | None = None
    """Of text that may be worked on at this place; None: any number."""

    def weigh(self, num_bytes: int) -> None:
        """Raises HeavyError if there is as much to do here as for so many bytes, and that is too much."""
        if self.most_bytes is not None and num_bytes > self.most_bytes:
            raise HeavyError(num_bytes)

    def planner(self) -> Planner:
        """For the plans of requests."""
        return Planner(self.tokenizer, self.model, self.info, self.settings)

    def pooling(self) -> PoolingRules:
        """For the plans of requests for numbers."""
        return PoolingRules(self.planner(), self.tokenizer, self.model, self.info.hidden_size)


class Intake:
    """Does work on bodies where it keeps nobody else waiting."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, model: ServedModel, settings: Settings) -> None:
        """`folder` is where the tokenizer came from."""
        self._tokenizer = tokenizer
        self._folder = folder
        self._model = model
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samewise-intake")
        self._processes: ProcessPoolExecutor | None = None

    async def run(
        self, work: Callable[..., _T], body: bytes, info: RunnerInfo, *args: Any, num_bytes: int | None = None
    ) -> _T:
        """What `work` returns or raises, given an IntakeContext, the body and the other arguments.

        It must be a function that can be imported, and all of this must be picklable. `num_bytes` is the size of it
        all, if that is not the body's. Raises InternalError if the process of a large body ended before it was done.
        """
        size = len(body) if num_bytes is None else num_bytes
        try:
            return await self._run(size, work, body, info, *args)
        except HeavyError as error:
            return await self._run(error.num_bytes, work, body, info, *args)

    async def _run(self, size: int, work: Callable[..., _T], body: bytes, info: RunnerInfo, *args: Any) -> _T:
        if size >= LARGE_BYTES:
            return await self._elsewhere(work, body, info, *args)
        is_small = size <= SMALL_BYTES and not SLOW.search(body)
        most = SMALL_BYTES if is_small else LARGE_BYTES - 1
        context = IntakeContext(self._tokenizer, self._model, info, self._settings, most)
        if is_small:
            return work(context, body, *args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, context, body, *args)

    def close(self) -> None:
        """Take nothing more in; what has begun ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.shutdown(wait=False, cancel_futures=True)

    async def _elsewhere(self, work: Callable[..., _T], body: bytes, info: RunnerInfo, *args: Any) -> _T:
        if self._processes is None:
            context = get_context("spawn")  # a fork would inherit locks that other threads hold
            self._processes = ProcessPoolExecutor(MAX_PROCESSES, mp_context=context, initializer=_begin)
        place = (self._folder, self._model, info, self._settings)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._processes, _work, place, work, body, args)
        except BrokenProcessPool:
            self._processes = None
            raise InternalError("The process that takes in large bodies ended while it had this one.") from None


def _begin() -> None:
    """In a new process: its parent alone decides when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()


def _work(
    place: tuple[Path, ServedModel, RunnerInfo, Settings], work: Callable[..., _T], body: bytes, args: tuple[Any, ...]
) -> _T:
    folder, model, info, settings = place
    return work(IntakeContext(_tokenizer(folder), model, info, settings), body, *args)


@cache
def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)
