"""An engine process that has imported everything and waits for a model, so that a load on demand starts at once."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from model_runner.model_needs import ModelNeeds
from model_runner.processes import Backoff, private_memory
from server.engine.messages import Plan, PlanFailed, Planned, Warmed
from server.engine.process import OpenLink, ProcessLink

logger = logging.getLogger("samewise.models")

TURN_S = 10.0
"""Seconds, its process's start included, until a plan lets the next one begin in another process."""
_HEADS_COPIES = 4
"""How often a plan may hold the heads: as they are stored, and in float32."""
_TRIES = 2
"""How often a plan is made if the process dies meanwhile."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The most that a plan may take. Files of strangers decide how long it runs, and it may never end."""

    turn_s: float = TURN_S
    longest_s: float = 120.0
    most_bytes: int = 3 << 30
    """Private memory of its process, without heads, which a plan reads."""
    check_s: float = 0.1
    """Seconds between two looks at its memory."""


class PlanError(Exception):
    """A model cannot be served, or not with so much memory. The message is for the person who configured it."""

    def __init__(self, message: str, *, may_pass: bool = True) -> None:
        """`may_pass`: whether the model may be served later with the same settings."""
        super().__init__(message)
        self.may_pass = may_pass


class SpareWorker:
    """Keeps one engine process that waits, and replaces it when it dies. All calls come from one event loop."""

    def __init__(
        self, open_link: OpenLink | None = None, backoff: Backoff | None = None, limits: PlanLimits | None = None
    ) -> None:
        """`open_link` starts a process that will send `Warmed`."""
        self._limits = limits or PlanLimits()
        self._open_link = open_link or partial(ProcessLink.open, warm=True)
        self._backoff = backoff or Backoff()
        self._link: ProcessLink | None = None
        self._num_bytes: int | None = None
        self._warm: ProcessLink | None = None
        """The last process that has imported everything."""
        self._planning, self._starting = asyncio.Lock(), asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The id of the waiting process; None if there is none."""
        return None if self._link is None else self._link.pid

    @property
    def num_bytes(self) -> int | None:
        """Private memory of a process that waits; None until the first one has imported everything."""
        return self._num_bytes

    @property
    def is_warm(self) -> bool:
        """Whether a process waits that has imported everything."""
        return self._link is not None and self._link is self._warm

    def refill(self) -> None:
        """Have a process wait, if none does. Call it while no engine loads, because the imports take a core."""
        self._keep(None)

    async def take(self) -> ProcessLink:
        """The waiting process, also if it still imports; otherwise a new one. It belongs to the caller.

        No other will wait before the next `refill`. Raises OSError if none can be started.
        """
        link = await self._release()
        if link is not None and link.is_alive:
            return link
        if link is not None:
            await link.close(0.0)
        return await self._start()

    async def plan(self, asked: Plan) -> ModelNeeds:
        """Memory that a model needs. The process that answers waits afterwards.

        Plans are made one at a time, but none waits for one that takes longer than its turn.

        Raises:
            PlanError: if the model cannot be served, if its plan exceeds a limit, or if the process dies at each try.
            OSError: if no process can be started.
        """
        async with self._turn():
            for _ in range(_TRIES):
                link = await self.take()
                answer = await self._answer(link, asked)
                if not isinstance(answer, str):
                    break
                logger.warning("A process ended while it planned %s: %s", asked.config.runner.model, answer)
        match answer:
            case Planned(needs):
                return needs
            case PlanFailed(message, may_pass):
                raise PlanError(message, may_pass=may_pass)
        raise PlanError(f"{asked.config.runner.model} cannot be planned: {answer}")

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Context of one plan at a time, until its turn is over."""
        await self._planning.acquire()
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._planning.release()

        timer = asyncio.get_running_loop().call_later(self._limits.turn_s, end)
        try:
            yield
        finally:
            timer.cancel()
            end()

    async def close(self) -> None:
        """End the waiting process; no other will wait."""
        self._is_closed = True
        link = await self._release()
        if link is not None:
            await link.close(0.0)

    def _keep(self, link: ProcessLink | None) -> bool:
        """Keep this process, or a new one. Returns False if there is one already, or none is wanted."""
        if self._is_closed or (self._keeper is not None and not self._keeper.done()):
            return False
        self._link = link or self._link
        self._keeper = asyncio.create_task(self._replace(), name="samewise-spare-worker")
        return True

    async def _release(self) -> ProcessLink | None:
        """The waiting process, which is not kept any more."""
        while (keeper := self._keeper) is not None:
            keeper.cancel()
            await asyncio.wait([keeper])
            if self._keeper is keeper:  # nobody else has released it meanwhile
                self._keeper = None
        link, self._link = self._link, None
        return link

    async def _answer(self, link: ProcessLink, asked: Plan) -> Planned | PlanFailed | str:
        """The answer of a process, which then waits; or how the process ended."""
        link.send(asked)
        answering = asyncio.ensure_future(self._read(link))
        exiting = asyncio.ensure_future(link.exited())
        exceeding = asyncio.ensure_future(self._exceeded(link, asked))
        is_kept = False
        try:
            done, _ = await asyncio.wait((answering, exiting, exceeding), return_when=asyncio.FIRST_COMPLETED)
            if answering in done:
                is_kept = self._keep(link)
                return answering.result()
            return exiting.result() if exiting in done else exceeding.result()
        finally:
            answering.cancel()
            exiting.cancel()
            exceeding.cancel()
            if not is_kept:
                await link.close(0.0)

    async def _exceeded(self, link: ProcessLink, asked: Plan) -> PlanFailed:
        """Returns when a plan exceeds a limit."""
        limits, loop = self._limits, asyncio.get_running_loop()
        most = limits.most_bytes + _HEADS_COPIES * _heads_bytes(asked)
        end = loop.time() + limits.longest_s
        while loop.time() < end:
            if _memory_of(link) > most:
                return PlanFailed(f"planning it takes more than {most >> 20:,} MiB of memory")
            await asyncio.sleep(limits.check_s)
        return PlanFailed(f"planning it takes more than {limits.longest_s:g} s")

    async def _read(self, link: ProcessLink) -> Planned | PlanFailed:
        """Note what the process says until it answers a plan."""
        while True:
            match await link.receive():
                case Warmed(num_bytes):
                    self._num_bytes, self._warm = num_bytes, link
                case Planned() | PlanFailed() as answer:
                    return answer

    async def _replace(self) -> None:
        """Wait with a process, and start another whenever it dies, until that is pointless."""
        failures = 0
        while (delay := self._backoff.delay(failures)) is not None:
            await asyncio.sleep(delay)
            start = asyncio.get_running_loop().time()
            ending = await self._wait()
            stayed_up = self._backoff.stayed_up(0, asyncio.get_running_loop().time() - start)
            failures = 1 if stayed_up else failures + 1
            logger.warning("The spare engine process ended: %s", ending)
        logger.error(
            "No spare engine process waits any more: %d ended in a row. Loads on demand take longer.", failures
        )
        self._keeper = None

    async def _start(self) -> ProcessLink:
        """Start a process. One at a time, because the event loop stands for 10 ms while the system copies this one."""
        async with self._starting:
            return await self._open_link()

    async def _wait(self) -> str:
        """Have a process wait. Returns how it ended; once cancelled, it is left to `_release`."""
        if self._link is None:
            try:
                self._link = await self._start()
            except OSError as error:
                return str(error)
        reading = asyncio.ensure_future(self._read(self._link))
        try:
            ending = await self._link.exited()
        finally:
            reading.cancel()
        link, self._link = self._link, None
        await link.close(0.0)
        return ending


def _memory_of(link: ProcessLink) -> int:
    """Private memory of a process; 0 once it has ended."""
    try:
        return private_memory(link.pid)
    except OSError:
        return 0


def _heads_bytes(asked: Plan) -> int:
    """Bytes of the files of a plan's heads."""
    with suppress(OSError):
        return sum(path.stat().st_size for folder in asked.config.runner.heads for path in folder.iterdir())
    return 0
