"""Runs a batch, from the check of its lines to the output files. Each line is a request of the server to itself."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from msgspec import to_builtins

from server.api.batches.lines import Line, batch_error, check_lines, groups_in, read_lines, result_of
from server.api.batches.objects import OPEN, BatchError, BatchErrors, Status
from server.api.batches.results import ResultWriter, StorageRetry, give_up_lines, write_outputs
from server.api.services import ServedModels, Services
from server.engine.client import EngineUnavailableError
from server.errors import RETRY_AFTER_S, NotFoundError
from server.http.loopback import MAX_IN_FLIGHT, Loopback
from server.storage.batches import Batch, BatchTable, LineResult
from server.storage.files import FileStore
from server.text.chat_template import at_second

_T = TypeVar("_T")
_logger = logging.getLogger("samewise.batches")


class BatchJob:
    """The Job of a batch. Each step is on disk before the next one, so that a restart continues there."""

    def __init__(self, batch: Batch, services: Services, files: FileStore) -> None:
        self._batch = batch
        self._services = services
        self._files = files
        self._retry = StorageRetry(batch.id)
        self._writer = ResultWriter(services.storage, batch.id, self._retry)
        self._is_cancelled = asyncio.Event()
        if batch.fields["status"] == "cancelling":
            self._is_cancelled.set()

    @property
    def client(self) -> str:
        return self._batch.client

    @property
    def error(self) -> str:
        """Why the batch waits; empty if it does not."""
        return self._retry.error

    def cancel(self) -> None:
        """Start no more lines, and abort those in flight."""
        self._is_cancelled.set()

    def close(self) -> None:
        self._writer.close()

    async def run(self) -> None:
        try:
            await self._services.models.wait_open()
            if self._batch.fields["in_progress_at"] is None:
                await self._check(await self._input())
            if self._status in ("in_progress", "cancelling"):
                await self._run_lines(await self._input())
            if self._status == "finalizing":
                await self._end()
        except* EngineUnavailableError:
            _logger.info("batch %s continues after the next start", self._batch.id)
        except* FileNotFoundError:
            message = f"The input file '{self._batch.fields['input_file_id']}' was deleted or has expired."
            await self._give_up("input_file_not_found", message)
        except* Exception:
            _logger.exception("batch %s failed", self._batch.id)
            await self._give_up("server_error", "The server had an error. Its log has the details.")
        finally:
            self.close()

    @property
    def _status(self) -> Status:
        status: Status = self._batch.fields["status"]
        return status

    async def _check(self, path: Path) -> None:
        settings = self._services.settings
        max_body_bytes = int(self._services.bodies.max_bytes)
        endpoint = self._batch.fields["endpoint"]
        checked = await self._files.in_turn(check_lines, path, endpoint, settings.max_batch_lines, max_body_bytes)
        if checked.errors:
            await self._fail_for(checked.errors)
        else:
            counts = {"total": checked.num_lines, "completed": 0, "failed": 0}
            await self._become("in_progress", request_counts=counts)

    async def _run_lines(self, path: Path) -> None:
        """Run until all lines have results, the batch is cancelled, or it expires."""
        done = await self._stored(lambda table: table.done(self._batch.id))
        groups = ModelGroups(self._services.models_of(self.client))
        names = await self._files.in_turn(groups_in, path, groups.of) if groups.are_several else [""]
        run = LinesRun(self._batch, len(done), self._services.loopback)

        def of_group(name: str) -> Iterator[Line]:
            lines = read_lines(path, but=done)
            return (line for line in lines if groups.of(line.body) == name) if groups.are_several else lines

        async def run_all() -> None:
            """Side by side, since the lines of a model that is not loaded may wait long for free memory."""
            async with asyncio.TaskGroup() as tasks:
                for name in names:
                    tasks.create_task(run.run(of_group(name), self._writer, groups.num_at_a_time(name), name))

        lines = asyncio.create_task(run_all())
        cancelled = asyncio.create_task(self._is_cancelled.wait())
        left_s = max(0.0, self._batch.fields["expires_at"] - time.time())
        try:
            await asyncio.wait([lines, cancelled], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if is_done := lines.done():
                lines.result()
        finally:
            for task in (lines, cancelled):
                task.cancel()
            await asyncio.gather(lines, cancelled, return_exceptions=True)
        outcome: Status = "completed" if is_done else "cancelled" if self._is_cancelled.is_set() else "expired"
        await self._become("finalizing", outcome=outcome)

    async def _end(self) -> None:
        """Write the output files, then the status that names them."""
        outcome: Status = self._batch.fields["outcome"]
        if outcome in ("cancelled", "expired"):
            with suppress(FileNotFoundError):  # without the input, lines that were not run are unknown
                path = await self._input()
                await self._retry.run(lambda: give_up_lines(self._batch, path, self._services.storage))
        files = await self._retry.run(lambda: write_outputs(self._batch, self._files, self._services.storage))
        answered, failed = await self._stored(lambda table: table.counts(self._batch.id))
        counts = {**self._batch.fields["request_counts"], "completed": answered, "failed": failed}
        await self._become(outcome, request_counts=counts, **files)
        _logger.info("batch %s is %s: %d answers, %d errors", self._batch.id, outcome, answered, failed)

    async def _give_up(self, code: str, message: str) -> None:
        """End the batch with this error. Lines that were answered keep their answers."""
        errors = [batch_error(code, message)]
        if self._batch.fields["in_progress_at"] is None:
            await self._fail_for(errors)
        else:
            await self._become("finalizing", outcome="failed", errors=to_builtins(BatchErrors(data=errors)))
            await self._end()

    async def _fail_for(self, errors: Sequence[BatchError]) -> None:
        await self._become("failed", errors=to_builtins(BatchErrors(data=errors)))
        _logger.info("batch %s cannot be run: %s", self._batch.id, errors[0].message)

    async def _become(self, status: Status, **fields: Any) -> None:
        """Change the batch on disk, without undoing a concurrent cancellation."""
        now = int(time.time())

        def put(table: BatchTable) -> Batch:
            found = table.get(self._batch.id, self.client)
            before = self._batch.fields if found is None else found.fields
            is_cancelling = status == "in_progress" and before["status"] == "cancelling"
            changed = {**before, **fields, f"{status}_at": now, "status": "cancelling" if is_cancelling else status}
            batch = replace(self._batch, fields=changed, is_open=status in OPEN)
            table.put(batch)
            return batch

        self._batch = await self._stored(put)

    async def _stored(self, work: Callable[[BatchTable], _T]) -> _T:
        return await self._retry.run(lambda: self._services.storage.on(BatchTable, work))

    async def _input(self) -> Path:
        """The path of the input file. Raises FileNotFoundError."""
        found = await self._files.find(self.client, self._batch.fields["input_file_id"])
        if found is None:
            raise FileNotFoundError(2, "it was deleted")
        return self._files.path_of(found)


_READ_BYTES = 1 << 20
"""Bytes of bodies that a thread reads at a time; a larger body is read alone."""
_LONGEST_WAIT_S = 60.0
"""Longest time before a refused line is retried."""
_PROGRESS = 10
"""The number of times that the log reports a batch's progress."""


class ModelGroups:
    """The lines of a batch by the models that answer them."""

    def __init__(self, models: ServedModels) -> None:
        """`models` are those that the batch's client may use."""
        self._models = models
        self._count = len(list(models))
        self.are_several = self._count > 1

    def of(self, body: bytes) -> str:
        """The name of the model that a body needs; empty if there is none, and the line's answer is an error."""
        try:
            return self._models.of_body(body).model.name
        except NotFoundError:
            return ""

    def num_at_a_time(self, name: str) -> int:
        """How many lines of a group run at a time: as many as its model can compute."""
        if not name and self._count != 1:
            return 1
        info = (self._models.find(name) if name else self._models.default).known_info
        return MAX_IN_FLIGHT if info is None else info.max_num_seqs


class LinesRun:
    """Runs the lines of a batch that have no results yet, with idle capacity."""

    def __init__(self, batch: Batch, num_done: int, loopback: Loopback) -> None:
        self._batch = batch
        self._loopback = loopback
        self._num_done = num_done
        self._log()

    async def run(self, unread: Iterator[Line], writer: ResultWriter, num_at_a_time: int, group: str = "") -> None:
        """Run these lines, which are a group of the batch's; returns when their results are stored."""
        lines = _lines(unread)
        turn = asyncio.Lock()

        async def work() -> None:
            while True:
                async with turn:
                    line = await anext(lines, None)
                if line is None:
                    return
                await writer.write(await self._result(line, group))
                self._count()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_at_a_time):
                tasks.create_task(work())

    async def _result(self, line: Line, group: str) -> LineResult:
        """The result of a line, which is retried while the server refuses it for now."""
        batch = self._batch
        date = at_second(batch.fields["created_at"])  # all lines have one date, also after midnight or a restart
        while True:
            answer = await self._loopback.post(batch.fields["endpoint"], line.body, batch.client, group, date)
            if answer.retry_after_s is None:
                return result_of(self._batch.id, line, answer)
            await asyncio.sleep(min(max(answer.retry_after_s, RETRY_AFTER_S), _LONGEST_WAIT_S))

    def _count(self) -> None:
        total = self._batch.fields["request_counts"]["total"]
        self._num_done += 1
        if self._num_done * _PROGRESS // total > (self._num_done - 1) * _PROGRESS // total:
            self._log()

    def _log(self) -> None:
        total = self._batch.fields["request_counts"]["total"]
        _logger.info("batch %s: %d of %d lines are done", self._batch.id, self._num_done, total)


async def _lines(unread: Iterator[Line]) -> AsyncIterator[Line]:
    while page := await asyncio.to_thread(_page, unread):
        for line in page:
            yield line


def _page(unread: Iterator[Line]) -> Sequence[Line]:
    """The next lines; none at the end."""
    page: list[Line] = []
    num_bytes = 0
    while num_bytes < _READ_BYTES and (line := next(unread, None)) is not None:
        page.append(line)
        num_bytes += len(line.body)
    return page
