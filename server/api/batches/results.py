"""Results of a batch: each is stored when its line ends, and they become files when the batch ends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from server.api.batches.lines import read_lines, unanswered
from server.api.files import LIVES_S
from server.errors import RETRY_AFTER_S
from server.storage.batches import Batch, BatchTable, LineResult
from server.storage.files import FileStore, NewFile, Selection
from server.storage.storage import NotStoredError, Storage

_T = TypeVar("_T")
_logger = logging.getLogger("samewise.batches")
_AT_A_TIME = 1000
BATCH_OUTPUT = "batch_output"
"""The purpose of output files."""
_WHY = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}
_LONGEST_PAUSE_S = 60.0
"""Longest time between two attempts."""


class StorageRetry:
    """Retries work on the storage: an accepted batch waits while the disk is full, and does not fail."""

    def __init__(self, batch_id: str) -> None:
        self._batch_id = batch_id
        self.error = ""
        """Why the batch waits; empty if it does not."""

    async def run(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of the work once it succeeds."""
        wait_s = RETRY_AFTER_S
        while True:
            try:
                result = await work()
            except NotStoredError as error:
                if not self.error:
                    _logger.error("batch %s waits for the storage: %s", self._batch_id, error.message)
                self.error = error.message
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_PAUSE_S)
            else:
                self.error = ""
                return result


class ResultWriter:
    """Stores the results of a batch. Results that arrive during one transaction share the next one."""

    def __init__(self, storage: Storage, batch_id: str, retry: StorageRetry) -> None:
        self._storage = storage
        self._batch_id = batch_id
        self._retry = retry
        self._waiting: list[tuple[LineResult, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def write(self, result: LineResult) -> None:
        """Store a result; returns when it is on disk."""
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((result, written))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write())
        await written

    def close(self) -> None:
        """Stop writing. Lines whose results are not written will run again."""
        if self._task is not None:
            self._task.cancel()

    async def _write(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            results = [result for result, _ in taken]
            await self._retry.run(
                lambda results=results: self._storage.on(
                    BatchTable,  # type: ignore[misc]
                    lambda table: table.add_results(self._batch_id, results),
                )
            )
            for _, written in taken:
                if not written.done():
                    written.set_result(None)
        self._task = None


async def give_up_lines(batch: Batch, path: Path, storage: Storage) -> None:
    """Give each line without a result an error that says why. Raises FileNotFoundError."""
    code, message = _WHY[batch.fields["outcome"]]
    lines = read_lines(path, await storage.on(BatchTable, lambda table: table.done(batch.id)))

    def next_page() -> Sequence[LineResult]:
        return [unanswered(batch.id, line, code, message) for line in islice(lines, _AT_A_TIME)]

    while page := await asyncio.to_thread(next_page):
        await storage.on(BatchTable, lambda table, page=page: table.add_results(batch.id, page))  # type: ignore[misc]


async def write_outputs(batch: Batch, files: FileStore, storage: Storage) -> Mapping[str, str | None]:
    """Write the files of answers and errors, unless empty or already written, and return their ids."""
    return {
        "output_file_id": await _write(batch, files, _pieces(batch, storage, is_error=False), "output"),
        "error_file_id": await _write(batch, files, _pieces(batch, storage, is_error=True), "errors"),
    }


async def _write(batch: Batch, files: FileStore, pieces: AsyncIterator[bytes], name: str) -> str | None:
    filename = f"{batch.id}_{name}.jsonl"
    for record in await files.list(batch.client, Selection(purpose=BATCH_OUTPUT)) or ():
        if record.filename == filename:
            return record.id  # written before an interruption
    first = await anext(pieces, None)
    if first is None:
        return None

    async def all_pieces() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    after = batch.fields["output_expires_after"]
    new = NewFile(batch.client, filename, BATCH_OUTPUT, LIVES_S if after is None else after["seconds"])
    return (await files.store(new, all_pieces())).id


async def _pieces(batch: Batch, storage: Storage, *, is_error: bool) -> AsyncIterator[bytes]:
    after = -1
    while page := await storage.on(
        BatchTable,
        lambda table, after=after: table.results(batch.id, is_error=is_error, after=after),  # type: ignore[misc]
    ):
        yield b"".join(one.body + b"\n" for one in page)
        after = page[-1].line
