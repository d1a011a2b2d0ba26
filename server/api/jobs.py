"""Background jobs: work that continues without the client that asked for it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

_logger = logging.getLogger("samewise.jobs")
Work = Callable[[], Coroutine[Any, Any, None]]


class Job(Protocol):
    """Background work of a client."""

    @property
    def client(self) -> str:
        """The client that asked for the work."""
        ...

    async def run(self) -> None:
        """Do all of the work. It is cancelled when the server stops, and continues after the next start."""
        ...

    def close(self) -> None:
        """Release all resources. May be called before the job ran and after it has ended."""
        ...


class Jobs:
    """The running jobs, by id."""

    def __init__(self) -> None:
        self._running: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, job_id: str, job: Job) -> None:
        """Start a job, which `get` finds until it has ended."""
        self._running[job_id] = job
        self.spawn(lambda: self._run(job_id, job))

    def spawn(self, work: Work) -> None:
        """Start work in a background task, and log its failure."""
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def get(self, job_id: str, client: str) -> Job | None:
        """The client's running job with this id."""
        job = self._running.get(job_id)
        return job if job is not None and job.client == client else None

    async def close(self) -> None:
        """Abort all jobs; they continue after the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for job in self._running.values():
            job.close()  # a task that was cancelled before it ran has not closed it

    async def _run(self, job_id: str, job: Job) -> None:
        try:
            await job.run()
        finally:
            del self._running[job_id]


async def _logged(work: Work) -> None:
    """Do the work, and log an exception."""
    try:
        await work()
    except Exception:
        _logger.exception("background work failed")
