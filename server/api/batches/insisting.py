"""Work on the storage that is tried again until there is room for it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from server.errors import RETRY_AFTER_S
from server.storage.storage import NotStoredError

_T = TypeVar("_T")
_LONGEST_WAIT_S = 60.0
"""Between two tries."""
_logger = logging.getLogger("samewise.batches")


class Insisting:
    """A batch that was accepted is not given up because a disk is full: it goes on when there is room again."""

    def __init__(self, batch_id: str) -> None:
        self._batch_id = batch_id
        self.trouble = ""
        """Why it does not go on for now; empty if it does."""

    async def do(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """The result of the work, once it succeeds."""
        wait_s = RETRY_AFTER_S
        while True:
            try:
                result = await work()
            except NotStoredError as error:
                if not self.trouble:
                    _logger.error("batch %s does not go on: %s", self._batch_id, error.message)
                self.trouble = error.message
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            else:
                self.trouble = ""
                return result
