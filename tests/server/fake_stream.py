"""An engine client's output stream, fed by a coroutine."""

import asyncio
from collections.abc import AsyncIterator, Callable

from scheduler.interface import RequestOutput


class FakeStream:
    """Implements OutputStream. A task receives the outputs; `ended` is notified when nothing more comes."""

    def __init__(
        self, outputs: AsyncIterator[RequestOutput], wake: Callable[[], None], ended: Callable[[bool], None]
    ) -> None:
        """`ended` is given whether all outputs came."""
        self.error: Exception | None = None
        self._wake = wake
        self._outputs: list[RequestOutput] = []
        self._ended = ended
        self._task = asyncio.ensure_future(self._pump(outputs))

    def take(self) -> list[RequestOutput]:
        taken, self._outputs = self._outputs, []
        return taken

    def close(self) -> None:
        self._task.cancel()

    async def _pump(self, outputs: AsyncIterator[RequestOutput]) -> None:
        complete = False
        try:
            async for output in outputs:
                self._outputs.append(output)
                self._wake()
            complete = True
        except Exception as error:  # noqa: BLE001  (for the consumer)
            self.error = error
        finally:
            self._ended(complete)
            self._wake()
