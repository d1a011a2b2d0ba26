"""The engine in a thread of this process, behind the same interface."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from server.engine.loop import LoadedEngine, run
from server.engine.messages import FromEngine, Shutdown, ToEngine
from server.engine.supervisor import EngineLimits, EngineSupervisor

logger = logging.getLogger("samewise.engine")


class InProcessEngine(EngineSupervisor):
    """An EngineClient without a process. An exception in the engine is recovered from like the death of a process;
    a thread that hangs cannot be killed and is left behind.
    """

    def __init__(
        self,
        load: Callable[[], LoadedEngine],
        limits: EngineLimits,
        publish: Callable[[bytes], None] | None = None,
    ) -> None:
        """`load` runs in the engine's thread, once for each start."""
        super().__init__(limits, publish)
        self._load = load

    async def _launch(self) -> "ThreadLink":
        return ThreadLink(self._load)


class QueueChannel:
    """The thread's end of the line."""

    def __init__(self, inbox: "queue.SimpleQueue[ToEngine]", send: Callable[[FromEngine], None]) -> None:
        self._inbox = inbox
        self.send = send

    def receive(self, *, wait: bool) -> Sequence[ToEngine]:
        messages = [self._inbox.get()] if wait else []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._inbox.get_nowait())
        return messages


class ThreadLink:
    """One engine thread. Everything but `_main` and `_emit` runs in the event loop."""

    def __init__(self, load: Callable[[], LoadedEngine]) -> None:
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._outbox: asyncio.Queue[FromEngine] = asyncio.Queue()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name="samewise-engine", daemon=True)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    async def receive(self) -> FromEngine:
        return await self._outbox.get()

    async def exited(self) -> str:
        code = await asyncio.shield(self._ended)
        return f"its thread ended with code {code}; the log has the reason"

    async def close(self, grace_s: float) -> None:
        """A thread cannot be ended by force: it always gets a little time."""
        self.send(Shutdown())
        try:
            async with asyncio.timeout(max(grace_s, 1.0)):
                await asyncio.shield(self._ended)
        except TimeoutError:
            logger.error("The engine's thread is stuck and is left behind.")
        else:
            self._thread.join()

    def _main(self) -> None:
        code = run(self._load, QueueChannel(self._inbox, self._emit))
        self._call(lambda: self._ended.set_result(code))

    def _emit(self, message: FromEngine) -> None:
        self._call(lambda: self._outbox.put_nowait(message))

    def _call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # left behind, and the event loop is closed
            self._loop.call_soon_threadsafe(function)
