"""From the bytes of a body to a plan, without blocking the event loop: the costlier, the further away from it.

Parsing, validating and encoding hold the interpreter's lock for long stretches, so a thread protects nobody from a body
of megabytes, and nothing protects a process from a grammar that takes all its memory. Both go to worker processes with
limits. Bodies of kilobytes share one thread: several would pass the lock among each other while the event loop waits.
"""

import asyncio
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from model_runner.info import RunnerInfo
from server.api.body_workers import BodyWorkers, Errand, Limits
from server.api.fields.rules import LENIENT
from server.config import Settings
from server.generation.planning.planner import Planner
from server.generation.pooling import PoolingRules
from server.generation.served_model import ServedModel
from server.http.json_body import validated
from server.telemetry.request_trace import Sender
from server.text.tokenizer import Tokenizer

_T = TypeVar("_T")
_Body = TypeVar("_Body", bound=BaseModel)
SMALL_BYTES = 4 << 10
"""Bodies up to this size take less time than handing them over."""
LARGE_BYTES = 192 << 10
"""Bodies from this size on go to worker processes."""
COSTLY = re.compile(
    rb"dry_sequence_breakers|response_format|json_schema|output_config|output_format|structured_outputs|guided_|tools|"
    rb"functions|\"(?:regex|grammar|ebnf)\"|\\u00"
)
"""What may take long, however short it is: breakers are looked for in the whole vocabulary, and grammars are compiled.
A name may have escapes."""


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
    engine: RunnerInfo | None
    """None where the work does not need it."""
    settings: Settings
    most_bytes: int | None = None
    """Of text that may be worked on at this place; None: any number."""

    @property
    def info(self) -> RunnerInfo:
        """What the engine knows about the model."""
        assert self.engine is not None, "who gives work that needs it gives it"
        return self.engine

    def weigh(self, num_bytes: int) -> None:
        """Raises HeavyError if there is as much to do here as for so many bytes, and that is too much."""
        if self.most_bytes is not None and num_bytes > self.most_bytes:
            raise HeavyError(num_bytes)

    def validated(self, schema: type[_Body], body: bytes) -> _Body:
        """The body as the schema has it, for an answer that reports what was left out of it.

        Raises InvalidRequestError; for unknown names only where the server is not lenient.
        """
        return validated(schema, body, LENIENT if self.settings.lenient else None)

    def planner(self) -> Planner:
        """For the plans of requests."""
        return Planner(self.tokenizer, self.model, self.info, self.settings)

    def pooling(self) -> PoolingRules:
        """For the plans of requests for numbers."""
        return PoolingRules(self.planner(), self.tokenizer, self.model, self.info.hidden_size)


class Intake:
    """Does work on bodies where it keeps nobody else waiting."""

    def __init__(
        self, tokenizer: Tokenizer, folder: Path, model: ServedModel, settings: Settings, workers: BodyWorkers
    ) -> None:
        """`folder` is where the tokenizer came from."""
        self._tokenizer = tokenizer
        self._folder = folder
        self._model = model
        self._settings = settings
        self._workers = workers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samewise-intake")
        self._place: tuple[RunnerInfo | None, bytes] | None = None

    async def run(
        self,
        work: Callable[..., _T],
        body: bytes,
        info: RunnerInfo | None,
        *args: Any,
        sender: Sender,
        num_bytes: int | None = None,
    ) -> _T:
        """What `work` returns or raises, given an IntakeContext, the body and the other arguments.

        It must be a function that can be imported, and all of this must be picklable. `sender` is whom the body is
        from: senders share the workers fairly. `num_bytes` is the size of it all, if that is not the body's. Raises
        what `BodyWorkers.submit` does.
        """
        size = len(body) if num_bytes is None else num_bytes
        if size < LARGE_BYTES and COSTLY.search(body):
            size = LARGE_BYTES
        try:
            return await self._run(size, sender, work, body, info, *args)
        except HeavyError as error:
            return await self._run(error.num_bytes, sender, work, body, info, *args)

    async def warm_up(self, info: RunnerInfo) -> None:
        """Start a worker process, so that the first costly body need not wait for that."""
        await self._by_worker(0, Sender(""), _nothing, b"", info)

    async def _run(
        self, size: int, sender: Sender, work: Callable[..., _T], body: bytes, info: RunnerInfo | None, *args: Any
    ) -> _T:
        if size >= LARGE_BYTES:
            return await self._by_worker(size, sender, work, body, info, *args)
        is_small = size <= SMALL_BYTES
        most = SMALL_BYTES if is_small else LARGE_BYTES - 1
        context = IntakeContext(self._tokenizer, self._model, info, self._settings, most)
        if is_small:
            return work(context, body, *args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, context, body, *args)

    async def _by_worker(
        self, size: int, sender: Sender, work: Callable[..., _T], body: bytes, info: RunnerInfo | None, *args: Any
    ) -> _T:
        errand = Errand(self._pickled_place(info), work, body, args, sender.name, Limits.of_size(size))
        result: _T = await asyncio.wrap_future(self._workers.submit(sender, errand, size))
        return result

    def close(self) -> None:
        """Take nothing more in; what has begun ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _pickled_place(self, info: RunnerInfo | None) -> bytes:
        if self._place is None or self._place[0] is not info:
            self._place = info, pickle.dumps((self._folder, self._model, info, self._settings))
        return self._place[1]


def read_as(context: IntakeContext, body: bytes, schema: type[_Body]) -> _Body:
    """The body as the schema has it, as work that needs no engine. Raises InvalidRequestError."""
    return validated(schema, body)


def _nothing(context: IntakeContext, body: bytes) -> None:
    """An errand that only has the context made."""
