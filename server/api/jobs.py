"""Work that goes on without the client that asked for it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

_logger = logging.getLogger("samewise.jobs")
Work = Callable[[], Coroutine[Any, Any, None]]


class Job(Protocol):
    """One piece of such work."""

    @property
    def client(self) -> str:
        """Who asked for it."""
        ...

    async def run(self) -> None:
        """All of it. If it is cancelled, the server ends, and what was promised is still to be done."""
        ...

    def close(self) -> None:
        """Give back what it holds; also if it never ran, or has ended."""
        ...


class Jobs:
    """Those that are running, by their ids."""

    def __init__(self) -> None:
        self._running: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, job_id: str, job: Job) -> None:
        """Begin with it; it is found until it has ended."""
        self._running[job_id] = job
        self.spawn(lambda: self._run(job_id, job))

    def spawn(self, work: Work) -> None:
        """Do something that nobody waits for."""
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def get(self, job_id: str, client: str) -> Job | None:
        """The client's job of this id."""
        job = self._running.get(job_id)
        return job if job is not None and job.client == client else None

    async def close(self) -> None:
        """Leave all of them as they are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for job in self._running.values():
            job.close()  # those that were cancelled before they ran

    async def _run(self, job_id: str, job: Job) -> None:
        try:
            await job.run()
        finally:
            del self._running[job_id]


async def _logged(work: Work) -> None:
    """The work, whose failure is seen by nobody but who reads the log."""
    try:
        await work()
    except Exception:
        _logger.exception("work in the background failed")
