"""Worlds for a host of models: fake engines load and answer in virtual time, so that hours pass in milliseconds."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from model_runner.runner_interface import RunnerInfo
from server.engine.client import EngineState, EngineUnavailableError
from server.engine.step_log import StepLog
from server.engine.supervisor import EngineSupervisor
from server.models.host import ModelHost
from server.models.hosted_model import HostedModel, Residency
from server.models.ledger import Ledger, Ledgers
from server.models.spare import PlanError
from tests.server.fake_engine import FakeEngine


class _JumpingSelector(selectors.DefaultSelector):
    """Never sleeps: a wait moves the clock instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout is not None and timeout > 0:
            self.now += timeout
        return found


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _JumpingSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def hold_up(seconds: float) -> None:
    """Let time pass within a turn of the running event loop, as a long computation does."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _VirtualLoop)
    loop.selector.now += seconds


def in_virtual_time(world: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in which waiting takes no time."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        runner.run(world)


class LoadableEngine(FakeEngine):
    """An engine that loads for a while, or fails."""

    def __init__(self, load_s: float, failure: str | None, steps: StepLog, stop_s: float) -> None:
        super().__init__(steps=steps)
        self.state = EngineState.STARTING
        self.stopped_for: str | None = None
        self._load_s = load_s
        self._failure = failure
        self._stop_s = stop_s
        self._end = asyncio.Event()

    async def start(self) -> None:
        pass

    async def wait_ready(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._load_s):
                await self._end.wait()
        if self._failure is not None or self._end.is_set():
            self.state = EngineState.FAILED
            self._end.set()
            raise EngineUnavailableError(self._failure or "stopped")
        self.state = EngineState.READY

    async def ended(self) -> str:
        await self._end.wait()
        return "it crashed"

    async def stop(self, reason: str = "") -> None:
        self.stopped_for = reason
        self._end.set()
        await asyncio.sleep(self._stop_s)

    def crash(self) -> None:
        """Fail for good."""
        self.state = EngineState.FAILED
        self._end.set()


class FakeSource:
    """A ModelSource of LoadableEngines."""

    def __init__(
        self,
        num_bytes: int,
        load_s: float = 1.0,
        failures: Sequence[str] = (),
        refusal: str = "",
        stop_s: float = 0.0,
        plan_s: float = 0.0,
    ) -> None:
        """The first loads fail with these `failures`; `refusal` fails the plan; an engine takes `stop_s` to end."""
        self._plan_s = plan_s
        self.num_bytes = num_bytes
        self.ledger = Ledger(0)
        self.planned: RunnerInfo | None = None
        self.engines: list[LoadableEngine] = []
        self._load_s = load_s
        self._failures = list(failures)
        self._refusal = refusal
        self._stop_s = stop_s

    async def plan(self) -> int:
        if self._plan_s:
            await asyncio.sleep(self._plan_s)
        if self._refusal:
            raise PlanError(self._refusal)
        return self.num_bytes

    def make_engine(self, steps: StepLog) -> EngineSupervisor:
        failure = self._failures.pop(0) if self._failures else None
        self.engines.append(LoadableEngine(self._load_s, failure, steps, self._stop_s))
        return cast(EngineSupervisor, self.engines[-1])


class NoSpare:
    """Counts how often it was asked to wait."""

    num_refills = 0
    is_warm = False

    def refill(self) -> None:
        self.num_refills += 1

    async def close(self) -> None:
        pass


def host_of(
    budget: int, sources: Mapping[str, FakeSource], residency: Callable[[str], Residency] = lambda _: Residency()
) -> tuple[ModelHost, dict[str, HostedModel]]:
    """A host of these models, not started."""
    ledgers = Ledgers(budget)
    host = ModelHost(ledgers, NoSpare())
    for source in sources.values():
        source.ledger = ledgers.host
    return host, {name: host.add(name, source, residency(name)) for name, source in sources.items()}


async def request(model: HostedModel, seconds: float, *, is_background: bool = False) -> float:
    """Use a model for a while, as a request does. Returns how long it waited."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with model.use(100, is_background=is_background):
        waited = loop.time() - start
        assert model.state is EngineState.READY
        await asyncio.sleep(seconds)
        assert model.state is EngineState.READY, "a request was cut"
    return waited
