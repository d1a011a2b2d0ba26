"""Writes down what comes of a batch's lines, as fast as the storage takes it."""

import asyncio

from server.api.batches.insisting import Insisting
from server.storage.batches import LineResult
from server.storage.storage import Storage


class ResultWriter:
    """One transaction for all that came during the last one."""

    def __init__(self, storage: Storage, batch_id: str, insisting: Insisting) -> None:
        self._storage = storage
        self._batch_id = batch_id
        self._insisting = insisting
        self._waiting: list[tuple[LineResult, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def write(self, result: LineResult) -> None:
        """Returns when it is on disk."""
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((result, written))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write())
        await written

    def close(self) -> None:
        """Write no more: what is not written has not happened."""
        if self._task is not None:
            self._task.cancel()

    async def _write(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            results = [result for result, _ in taken]
            await self._insisting.do(
                lambda results=results: self._storage.on_batches(  # type: ignore[misc]
                    lambda table: table.add_results(self._batch_id, results)
                )
            )
            for _, written in taken:
                if not written.done():
                    written.set_result(None)
        self._task = None
