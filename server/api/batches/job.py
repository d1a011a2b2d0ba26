"""A batch that is being run, from the check of its lines to its files."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from server.api.batches.insisting import Insisting
from server.api.batches.lines import Fields, batch_error, check_lines, error_list, read_lines
from server.api.batches.lines_run import LinesRun
from server.api.batches.objects import OPEN, Status
from server.api.batches.output import give_up_lines, write_outputs
from server.api.batches.writer import ResultWriter
from server.api.services import Services
from server.engine.client import EngineUnavailableError
from server.storage.batches import Batch, BatchTable
from server.storage.files import FileStore

_T = TypeVar("_T")
_logger = logging.getLogger("samewise.batches")


class BatchJob:
    """One of them (a Job). All that has happened is on disk before it is told, so it goes on wherever it was."""

    def __init__(self, batch: Batch, services: Services, files: FileStore) -> None:
        self._batch = batch
        self._services = services
        self._files = files
        self._insisting = Insisting(batch.id)
        self._writer = ResultWriter(services.storage, batch.id, self._insisting)
        self._is_unwanted = asyncio.Event()
        if batch.fields["status"] == "cancelling":
            self._is_unwanted.set()

    @property
    def client(self) -> str:
        """See Job."""
        return self._batch.client

    @property
    def trouble(self) -> str:
        """Why it does not go on for now; empty if it does."""
        return self._insisting.trouble

    def cancel(self) -> None:
        """Begin with no more lines, and end those that are under way."""
        self._is_unwanted.set()

    def close(self) -> None:
        """See Job."""
        self._writer.close()

    async def run(self) -> None:
        """See Job."""
        try:
            await self._services.engine.wait_ready()
            if self._batch.fields["in_progress_at"] is None:
                await self._check(await self._input())
            if self._status in ("in_progress", "cancelling"):
                await self._run_lines(await self._input())
            if self._status == "finalizing":
                await self._end()
        except* EngineUnavailableError:
            _logger.info("batch %s is left for the next start", self._batch.id)
        except* FileNotFoundError:
            message = f"The input file '{self._batch.fields['input_file_id']}' is gone."
            await self._give_up("input_file_not_found", message)
        except* Exception:
            _logger.exception("batch %s cannot go on", self._batch.id)
            await self._give_up("server_error", "The server had an error; its log has more.")
        finally:
            self.close()

    @property
    def _status(self) -> Status:
        status: Status = self._batch.fields["status"]
        return status

    async def _check(self, path: Path) -> None:
        settings = self._services.settings
        max_body_bytes = int(settings.max_body_mib * (1 << 20))
        endpoint = self._batch.fields["endpoint"]
        checked = await self._files.in_turn(check_lines, path, endpoint, settings.max_batch_lines, max_body_bytes)
        if checked.errors:
            await self._fail_for(checked.errors)
        else:
            counts = {"total": checked.num_lines, "completed": 0, "failed": 0}
            await self._become("in_progress", request_counts=counts)

    async def _run_lines(self, path: Path) -> None:
        """Until all have results, or the batch is not wanted any more, or its time is over."""
        done = await self._stored(lambda table: table.done(self._batch.id))
        run = LinesRun(self._batch, read_lines(path, but=done), len(done), self._services.loopback)
        lines = asyncio.create_task(run.run(self._writer, self._services.engine.info.max_num_seqs))
        unwanted = asyncio.create_task(self._is_unwanted.wait())
        left_s = max(0.0, self._batch.fields["expires_at"] - time.time())
        try:
            await asyncio.wait([lines, unwanted], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if is_done := lines.done():
                lines.result()
        finally:
            for task in (lines, unwanted):
                task.cancel()
            await asyncio.gather(lines, unwanted, return_exceptions=True)
        outcome: Status = "completed" if is_done else "cancelled" if self._is_unwanted.is_set() else "expired"
        await self._become("finalizing", outcome=outcome)

    async def _end(self) -> None:
        """Write the files, then that they are there."""
        outcome: Status = self._batch.fields["outcome"]
        if outcome in ("cancelled", "expired"):
            with suppress(FileNotFoundError):  # then nobody can tell which lines were not run
                path = await self._input()
                await self._insisting.do(lambda: give_up_lines(self._batch, path, self._services.storage))
        files = await self._insisting.do(lambda: write_outputs(self._batch, self._files, self._services.storage))
        answered, failed = await self._stored(lambda table: table.counts(self._batch.id))
        counts = {**self._batch.fields["request_counts"], "completed": answered, "failed": failed}
        await self._become(outcome, request_counts=counts, **files)
        _logger.info("batch %s is %s: %d answers, %d errors", self._batch.id, outcome, answered, failed)

    async def _give_up(self, code: str, message: str) -> None:
        """End it for this reason, with what was answered."""
        errors = [batch_error(code, message)]
        if self._batch.fields["in_progress_at"] is None:
            await self._fail_for(errors)
        else:
            await self._become("finalizing", outcome="failed", errors=error_list(errors))
            await self._end()

    async def _fail_for(self, errors: Sequence[Fields]) -> None:
        await self._become("failed", errors=error_list(errors))
        _logger.info("batch %s cannot be run: %s", self._batch.id, errors[0]["message"])

    async def _become(self, status: Status, **fields: Any) -> None:
        """Change the batch on disk. If its end was asked for meanwhile, going on does not undo that."""
        now = int(time.time())

        def put(table: BatchTable) -> Batch:
            found = table.get(self._batch.id, self.client)
            before = self._batch.fields if found is None else found.fields
            goes_on = status == "in_progress" and before["status"] == "cancelling"
            changed = {**before, **fields, f"{status}_at": now, "status": "cancelling" if goes_on else status}
            batch = replace(self._batch, fields=changed, is_open=status in OPEN)
            table.put(batch)
            return batch

        self._batch = await self._stored(put)

    async def _stored(self, work: Callable[[BatchTable], _T]) -> _T:
        return await self._insisting.do(lambda: self._services.storage.on_batches(work))

    async def _input(self) -> Path:
        """Where the input is. Raises FileNotFoundError."""
        found = await self._files.find(self.client, self._batch.fields["input_file_id"])
        if found is None:
            raise FileNotFoundError(2, "it was deleted")
        return self._files.path_of(found)
