"""Runs the lines of a batch: each is a request of the server to itself, in the room that others leave."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence

from server.api.batches.lines import Line, result_of
from server.api.batches.writer import ResultWriter
from server.errors import RETRY_AFTER_S
from server.http.loopback import Loopback
from server.storage.batches import Batch, LineResult

_READ_BYTES = 1 << 20
"""Bodies that are read at a time, or one that is larger; reading is done in a thread."""
_LONGEST_WAIT_S = 60.0
"""Before a line that was refused for now is tried again."""
_PROGRESS = 10
"""Lines in the log that tell of a batch's progress."""
_logger = logging.getLogger("samewise.batches")


class LinesRun:
    """Those of one batch that have no results yet."""

    def __init__(self, batch: Batch, lines: Iterator[Line], num_done: int, loopback: Loopback) -> None:
        self._batch = batch
        self._unread = lines
        self._loopback = loopback
        self._num_done = num_done

    async def run(self, writer: ResultWriter, num_at_a_time: int) -> None:
        """Returns when all have results, and these are written."""
        self._log()
        lines = self._lines()
        turn = asyncio.Lock()

        async def work() -> None:
            while True:
                async with turn:
                    line = await anext(lines, None)
                if line is None:
                    return
                await writer.write(await self._result(line))
                self._count()

        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_a_time):
                group.create_task(work())

    async def _lines(self) -> AsyncIterator[Line]:
        while page := await asyncio.to_thread(self._page):
            for line in page:
                yield line

    def _page(self) -> Sequence[Line]:
        """The next lines; empty at the end."""
        page: list[Line] = []
        num_bytes = 0
        while num_bytes < _READ_BYTES and (line := next(self._unread, None)) is not None:
            page.append(line)
            num_bytes += len(line.body)
        return page

    async def _result(self, line: Line) -> LineResult:
        """What comes of a line; one that is refused for now is tried again."""
        while True:
            answer = await self._loopback.post(self._batch.fields["endpoint"], line.body, self._batch.client)
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
