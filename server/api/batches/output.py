"""What a batch leaves behind: a file of answers, one of errors."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from server.api.batches.lines import read_lines, unanswered
from server.api.files.upload import LIVES_S
from server.storage.batches import Batch, LineResult
from server.storage.files import FileStore, NewFile
from server.storage.files_table import Selection
from server.storage.storage import Storage

_AT_A_TIME = 1000
BATCH_OUTPUT = "batch_output"
"""Purpose of the files."""
_WHY = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}


async def give_up_lines(batch: Batch, path: Path, storage: Storage) -> None:
    """Lines without results get an error that says why. Raises FileNotFoundError."""
    code, message = _WHY[batch.fields["outcome"]]
    lines = read_lines(path, await storage.on_batches(lambda table: table.done(batch.id)))

    def next_page() -> Sequence[LineResult]:
        return [unanswered(batch.id, line, code, message) for line in islice(lines, _AT_A_TIME)]

    while page := await asyncio.to_thread(next_page):
        await storage.on_batches(lambda table, page=page: table.add_results(batch.id, page))  # type: ignore[misc]


async def write_outputs(batch: Batch, files: FileStore, storage: Storage) -> Mapping[str, str | None]:
    """Write the files that there is something for, unless that was done before, and return their ids."""
    return {
        "output_file_id": await _write(batch, files, _pieces(batch, storage, is_error=False), "output"),
        "error_file_id": await _write(batch, files, _pieces(batch, storage, is_error=True), "errors"),
    }


async def _write(batch: Batch, files: FileStore, pieces: AsyncIterator[bytes], name: str) -> str | None:
    filename = f"{batch.id}_{name}.jsonl"
    for record in await files.list(batch.client, Selection(purpose=BATCH_OUTPUT)) or ():
        if record.filename == filename:
            return record.id  # an end that was cut short has written it
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
    while page := await storage.on_batches(
        lambda table, after=after: table.results(batch.id, is_error=is_error, after=after)  # type: ignore[misc]
    ):
        yield b"".join(one.body + b"\n" for one in page)
        after = page[-1].line
