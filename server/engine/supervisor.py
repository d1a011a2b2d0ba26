"""Supervisor of engines: replaces those that die and keeps their requests' streams open.

It knows neither processes nor sockets.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from model_runner.processes import Backoff
from model_runner.runner_interface import RunnerInfo
from scheduler.interface import BACKGROUND, ChoiceHistory, EngineRequest, EngineStats
from server.engine.client import EngineState, EngineUnavailableError, QueueFullError, RequestFailedError
from server.engine.live_requests import Follower, LiveRequest, LiveRequests
from server.engine.messages import (
    Abort,
    Aborted,
    Explain,
    Explained,
    FromEngine,
    LoadFailed,
    Ready,
    Rejected,
    StepDone,
    Submit,
    ToEngine,
)
from server.engine.step_log import StepLog
from server.errors import SHUTTING_DOWN

logger = logging.getLogger("samewise.engine")

WATCHDOG_TICKS = 10
SHUTDOWN_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the client on its callers and its engine."""

    max_waiting: int
    """Choices that may be in flight beyond the engine's `max_num_seqs`."""
    engine_timeout_s: float
    """A silent engine with work is killed and replaced after this many seconds."""
    backoff: Backoff = field(default_factory=Backoff)


class EngineLink(Protocol):
    """The connection to one engine, from its start to its end. The next engine gets another link."""

    def send(self, message: ToEngine) -> None:
        """Never blocks. Messages to a dead engine are lost."""
        ...

    async def receive(self) -> FromEngine:
        """The next message. Waits forever once the engine is dead."""
        ...

    async def exited(self) -> str:
        """Returns how the engine ended, once it has ended by itself."""
        ...

    async def close(self, grace_s: float) -> None:
        """Ask the engine to end, kill it after `grace_s`, and release all resources."""
        ...


class EngineSupervisor(ABC):
    """An EngineClient; a subclass launches the engines."""

    def __init__(
        self, limits: EngineLimits, publish: Callable[[bytes], None] | None = None, steps: StepLog | None = None
    ) -> None:
        """`publish` gets the engines' prefix-cache events and must not block. Without it, they are dropped.

        Steps are added to the log `steps`.
        """
        self._limits = limits
        self._publish = publish or _drop
        self._requests = LiveRequests()
        self._link: EngineLink | None = None  # to an engine that is ready
        self._info: RunnerInfo | None = None
        self._ready_since: float | None = None  # of the engine that runs, on the clock of the event loop
        self._stats = EngineStats()
        self._steps = steps or StepLog()
        self._num_restarts = 0
        self._num_messages = 0
        self._failure: str | None = None
        self._draining = False
        self._stopping = False
        self._settled = asyncio.Event()  # ready, failed or stopped
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    async def _launch(self) -> EngineLink:
        """Start an engine that will send Ready or LoadFailed. Raises OSError if it cannot be started."""

    @property
    def state(self) -> EngineState:
        if self._failure is not None:
            return EngineState.FAILED
        if self._draining:
            return EngineState.DRAINING
        if self._link is not None:
            return EngineState.READY
        return EngineState.STARTING if self._info is None else EngineState.RESTARTING

    @property
    def info(self) -> RunnerInfo:
        if self._info is None:
            raise self._failed() if self._failure else EngineUnavailableError("The engine is still loading the model.")
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def steps(self) -> StepLog:
        return self._steps

    @property
    def num_held(self) -> int:
        return self._requests.num_held

    @property
    def num_background_held(self) -> int:
        return self._requests.num_background_held

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    async def start(self) -> None:
        if self._task is not None:
            raise RuntimeError("the engine was started before")
        self._task = asyncio.create_task(self._supervise(), name="samewise-engine-supervisor")

    async def wait_ready(self) -> None:
        while self.state is not EngineState.READY:
            await self._settled.wait()
            self._refuse_unless_open()

    def submit(self, request: EngineRequest, wake: Callable[[], None], follower: Follower) -> "SupervisedStream":
        """Start a request. Raises ValueError if its id is in use, and the errors of `EngineClient.submit`."""
        self._admit(request)
        live = self._requests.add(request, wake, follower)
        self._submit_released()
        return SupervisedStream(live, self._abort)

    def _abort(self, live: LiveRequest) -> None:
        if self._requests.abort(live):
            self._send(Abort(live.request_id))
        self._submit_released()

    def abort_choice(self, request_id: str, choice: int) -> None:
        if self._requests.abort_choice(request_id, choice):
            self._send(Abort(request_id, choice))
        self._submit_released()

    async def explain(self, request_id: str) -> Sequence[ChoiceHistory]:
        if self._link is None:
            return ()
        return await self._requests.explain(request_id, lambda: self._send(Explain(request_id)))

    async def drain(self, grace_s: float) -> None:
        self._draining = True
        self._end_background()
        logger.info("Draining: %d requests in flight have %g s to finish.", len(self._requests), grace_s)
        try:
            async with asyncio.timeout(grace_s):
                await self._requests.wait_empty()
        except TimeoutError:
            logger.warning("Draining: %d requests did not finish in time and fail now.", len(self._requests))
        await self.stop()

    async def ended(self) -> str:
        """Returns why no engine will be started again, once that is so."""
        if self._task is not None:
            await asyncio.wait([self._task])
        return self._failure or SHUTTING_DOWN

    async def stop(self, reason: str = SHUTTING_DOWN) -> None:
        """End the engine at once; requests in flight fail for this reason."""
        self._draining = True
        self._requests.fail_all(EngineUnavailableError(reason))
        if self._task is not None:
            if not self._stopping:
                self._stopping = True
                self._task.cancel()
            await asyncio.wait([self._task])
        self._settled.set()

    def _end_background(self) -> None:
        """Abort background requests on shutdown: no client waits for them, and their sender resubmits them."""
        error = EngineUnavailableError(SHUTTING_DOWN)
        for live in self._requests.in_background():
            self._abort(live)
            live.fail(error)

    def _admit(self, request: EngineRequest) -> None:
        self._refuse_unless_open()
        if request.tier >= BACKGROUND:
            return  # its sender limits it
        limit = self.info.max_num_seqs + self._limits.max_waiting
        refusal = self._requests.places.refusal(request.client, request.weight, request.num_drawn, limit)
        if refusal:
            raise QueueFullError(refusal)

    def _refuse_unless_open(self) -> None:
        match self.state:
            case EngineState.FAILED:
                raise self._failed()
            case EngineState.DRAINING:
                raise EngineUnavailableError(SHUTTING_DOWN)
            case EngineState.STARTING:
                raise EngineUnavailableError("The engine is still loading the model.")

    def _send(self, message: ToEngine) -> None:
        if self._link is not None:
            self._link.send(message)

    def _submit_released(self) -> None:
        if self._link is not None:
            for request in self._requests.release():
                self._link.send(Submit(request))

    async def _supervise(self) -> None:
        """Run engines, one after the other, until restarting them is pointless."""
        try:
            self._fail(await self._run_engines())
        except Exception:
            logger.exception("The engine's supervisor failed; all requests fail with it.")
            self._fail("The engine's supervisor failed. The server's log has the traceback.")

    async def _run_engines(self) -> str:
        """Returns why no other engine will be started."""
        failures = 0
        while True:
            stayed_up, ending = await self._run_engine()
            if self._info is None:
                return f"The engine did not start: {ending}"
            died_of_request = self._judge(ending)
            failures = 0 if stayed_up or died_of_request else failures + 1
            delay = self._limits.backoff.delay(failures)
            if delay is None:
                return f"The engine failed {failures} times in a row before its first step. Last failure: {ending}"
            self._num_restarts += 1
            await asyncio.sleep(delay)

    async def _run_engine(self) -> tuple[bool, str]:
        """Run one engine from launch to end. Returns whether it stayed up, and how it ended."""
        self._ready_since = None
        try:
            link = await self._launch()
        except OSError as error:
            return False, str(error)
        try:
            ending = await _first(self._read(link), link.exited(), self._watch())
            return self._has_stayed_up(), ending
        finally:
            gentle = self._stopping and self._link is not None
            self._link = None
            self._requests.engine_ended()
            self._stats = self._stats.ended()
            self._settled.clear()
            await link.close(SHUTDOWN_GRACE_S if gentle else 0.0)

    async def _read(self, link: EngineLink) -> str:
        """Apply the engine's messages. Returns only if it could not load the model."""
        while True:
            match await link.receive():
                case StepDone(outputs, stats, kv_events):
                    self._steps.note(self._stats, stats)
                    self._stats = stats
                    if kv_events is not None:
                        self._publish(kv_events)
                    if self._requests.apply(outputs):
                        self._submit_released()
                case Rejected(request_id, reason):
                    self._requests.fail(request_id, RequestFailedError(reason))
                    self._submit_released()
                case Aborted(request_id, choice, histories):
                    self._requests.aborted(request_id, choice, histories)
                case Explained(request_id, histories):
                    self._requests.explained(request_id, histories)
                case Ready(info):
                    self._become_ready(link, info)
                case LoadFailed(message):
                    return message
            self._num_messages += 1

    async def _watch(self) -> str:
        """Returns when the engine has had work but sent nothing for the whole timeout.

        Counts ticks instead of time, so that a pause of this process is not held against the engine.
        """
        silent_ticks, seen = 0, self._num_messages
        while silent_ticks <= WATCHDOG_TICKS:  # one more, because the first may be partial
            await asyncio.sleep(self._limits.engine_timeout_s / WATCHDOG_TICKS)
            silent = self._requests.num_submitted > 0 and self._num_messages == seen
            silent_ticks = silent_ticks + 1 if silent else 0
            seen = self._num_messages
        return f"killed after {self._limits.engine_timeout_s:g} s of silence with work to do (engine_timeout_s)"

    def _become_ready(self, link: EngineLink, info: RunnerInfo) -> None:
        self._info = info
        self._link = link
        self._stats = EngineStats()
        self._ready_since = asyncio.get_running_loop().time()
        self._settled.set()
        logger.info("The engine is ready; %d requests are waiting for it.", len(self._requests))
        self._submit_released()

    def _has_stayed_up(self) -> bool:
        if self._ready_since is None:
            return False
        ready_s = asyncio.get_running_loop().time() - self._ready_since
        return self._limits.backoff.stayed_up(self._stats.steps, ready_s)

    def _judge(self, ending: str) -> bool:
        """Find out which live requests continue after the engine's death. Returns True if one of them is to blame."""
        error = RequestFailedError(
            "The engine crashed repeatedly on this request, so it was not retried again. Other requests continue."
        )
        crash = self._requests.crashed(error)
        logger.error(
            "The engine ended: %s. Requests that will continue: %s",
            ending,
            ", ".join(crash.victims) or "none",
        )
        if crash.culprit is not None:
            logger.error("Request %s was in the engine at repeated crashes and fails now.", crash.culprit)
        return crash.culprit is not None

    def _fail(self, reason: str) -> None:
        logger.error("%s (requests that fail with it: %d)", reason, len(self._requests))
        self._failure = reason
        self._requests.fail_all(self._failed())
        self._settled.set()

    def _failed(self) -> EngineUnavailableError:
        return EngineUnavailableError(self._failure or "", "It has failed. The server's log says why.")


class SupervisedStream:
    """The consumer's end of a live request. Implements OutputStream."""

    def __init__(self, live: LiveRequest, abort: Callable[[LiveRequest], None]) -> None:
        self.take = live.take
        self._live = live
        self._abort = abort

    @property
    def error(self) -> Exception | None:
        return self._live.error

    @property
    def num_unfinished(self) -> int:
        """Choices that will have more outputs."""
        return self._live.num_unfinished

    def close(self) -> None:
        self._abort(self._live)


def _drop(batch: bytes) -> None:
    """Used when KV events are not published."""


async def _first(*coroutines: Coroutine[Any, Any, str]) -> str:
    """Run all until one is done, and cancel the others. Returns the result of the first that is done, in this order."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task.result() for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
