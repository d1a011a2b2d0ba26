"""One of several models: its engine comes and goes, its name stays."""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from model_runner.runner_interface import RunnerInfo
from scheduler.interface import ChoiceHistory, EngineRequest, EngineStats
from server.engine.client import EngineState, EngineUnavailableError, OutputStream
from server.engine.live_requests import Follower
from server.engine.step_log import StepLog
from server.engine.supervisor import EngineSupervisor
from server.models.ledger import Ledger
from server.models.residence import ModelStatus, Shared, StayBounds, Wish, no_wish, standing_of
from server.models.total_stats import at_rest, total

RESIDENCE_LOADS = 3.0
"""A model stays for so many times the duration of its load."""


class Phase(StrEnum):
    """Where a model is between the disk and its engine."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class Leaving(StrEnum):
    """Why a model is unloaded."""

    ROOM = "room"
    """Another model needs its memory."""
    IDLE = "idle"
    OPERATOR = "operator"
    FAILURE = "failure"
    """Its engine did not start, or died for good."""


@dataclass(frozen=True, slots=True)
class Residency:
    """How long a model stays loaded, as the settings have it."""

    is_loaded_at_start: bool = False
    is_pinned: bool = False
    """Whether it is never unloaded to make room."""
    idle_s: float | None = None
    """Seconds after its last request until it is unloaded; None: it stays until its memory is needed."""
    max_waiting: int = 1024
    """Requests that may wait until it is loaded."""
    load_timeout_s: float = 600.0
    """Seconds that a request waits."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """A request that waits until its model is loaded."""

    granted: asyncio.Future[None]
    num_bytes: int
    """Size of its body."""
    since: float
    """When it began to wait, on the clock of the event loop."""
    is_background: bool
    """Whether it may only take memory that is free."""

    @property
    def is_granted(self) -> bool:
        """Whether the model is loaded, and the request counts as a use of it."""
        return self.granted.done() and not self.granted.cancelled() and self.granted.exception() is None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a model could not be loaded, or has failed."""

    reason: str
    """For the operator; it may name files and processes."""
    told: str
    """The words for clients in its place."""
    retry_at: float
    """When a request may try again, on the clock of the event loop; infinite if the settings are to blame."""
    count: int
    """Failures in a row."""


class ModelSource(Protocol):
    """Where a model's engine comes from."""

    @property
    def ledger(self) -> Ledger:
        """The ledger of the engine's device, which is known once the engine is planned."""
        ...

    @property
    def planned(self) -> RunnerInfo | None:
        """As in Residence; None until `plan` has found it out."""
        ...

    async def plan(self) -> int:
        """The bytes that the model's engine takes. Raises PlanError if it cannot be served, and OSError."""
        ...

    def make_engine(self, steps: StepLog) -> EngineSupervisor:
        """A new engine, which is not started; it adds its steps to the log."""
        ...


class Host(Protocol):
    """The part of a host that its models call."""

    def shared(self) -> Shared:
        """The memory and the process that all models share."""
        ...

    @property
    def is_closing(self) -> bool:
        """Whether the server stops."""
        ...

    def use(
        self, model: "HostedModel", num_bytes: int, *, is_background: bool, wish: Wish
    ) -> AbstractAsyncContextManager[None]:
        """Context in which the model is loaded."""
        ...

    async def load(self, model: "HostedModel") -> None:
        """Load the model, and return when it is loaded. Raises EngineUnavailableError if that fails."""
        ...

    async def unload(self, model: "HostedModel", *, grace_s: float | None) -> None:
        """Let the requests in flight finish for `grace_s` (None: as long as they need), and unload the model."""
        ...

    def released(self, model: "HostedModel", wish_s: float | None) -> None:
        """The model is used less than before; who used it wants it to stay for so long."""
        ...

    def watch(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` whenever the status of a model may have changed. Returns the function that ends that."""
        ...


@dataclass(slots=True, eq=False)
class HostedModel:
    """An EngineClient for as long as the server runs, and the Residence of its model.

    Its host alone changes its phase.
    """

    name: str
    source: ModelSource
    residency: Residency
    host: Host
    phase: Phase = Phase.UNLOADED
    engine: EngineSupervisor | None = None
    """None while it is unloaded."""
    num_uses: int = 0
    """Requests that are planned or run, and everything else that keeps it loaded."""
    waiters: deque[Waiter] = field(default_factory=deque)
    """In the order of their arrival."""
    num_bytes: int | None = None
    """The memory that it takes while it is loaded; None: not known yet."""
    is_planning: bool = False
    wished_at: float | None = None
    """When an operator asked to load it, so that it is loaded without a waiter."""
    wishers: list[asyncio.Future[None]] = field(default_factory=list)
    """Operators who wait for that load."""
    is_yielding: bool = False
    """Whether it takes no new requests because another model needs its memory."""
    leavers: set[object] = field(default_factory=set)
    """Operators who unload it once it is idle, so that it takes no new requests."""
    load_began: float = 0.0
    """When its last load began, on the clock of the event loop, as the following times are."""
    loaded_at: float = 0.0
    load_s: float = 0.0
    """How long its last load took."""
    last_used: float = 0.0
    """When its last request ended, on the clock of the event loop."""
    stays_until: float = 0.0
    """When it is unloaded if no request comes, by the wish of a request that ends last."""
    num_loads: int = 0
    loads_s: float = 0.0
    """How long all its loads took together."""
    unloads: Counter[Leaving] = field(default_factory=Counter)
    failure: Failure | None = None
    became_loaded: asyncio.Event = field(default_factory=asyncio.Event)
    became_settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has been loaded, has failed, or was unloaded by an operator."""
    became_idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its last request has ended, when it is unloaded, and when an operator wants it to stay."""
    steps: StepLog = field(default_factory=StepLog)
    _last_info: RunnerInfo | None = None
    _earlier_stats: EngineStats = field(default_factory=EngineStats)
    _earlier_restarts: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it takes new requests now."""
        return self.phase is Phase.LOADED and not self.is_yielding and not self.leavers

    @property
    def is_idle(self) -> bool:
        """Whether nothing uses it and nothing waits for it."""
        return not self.num_uses and not self.waiters

    @property
    def wanted_since(self) -> float | None:
        """Since when somebody wants it loaded, even if others must go for it; None if nobody does."""
        if self.phase is not Phase.UNLOADED:
            return None
        times = [one.since for one in self.waiters if not one.is_background]
        return min(times if self.wished_at is None else [*times, self.wished_at], default=None)

    @property
    def unused_at(self) -> float | None:
        """When it is unloaded if no request comes; None for never."""
        if self.phase is not Phase.LOADED or not self.is_idle or math.isinf(self.stays_until):
            return None
        return self.stays_until

    def is_unused(self, now: float) -> bool:
        """Whether no request came for longer than the model stays then."""
        return self.unused_at is not None and now >= self.unused_at

    def became_ready(self, now: float) -> None:
        """Its engine is ready."""
        self.phase, self.failure = Phase.LOADED, None
        self.loaded_at, self.load_s = now, now - self.load_began
        self.stays_until = now + self.stay_bounds.stay_of(0.0 if self.waiters else None)  # waiters have wishes
        self.num_loads += 1
        self.loads_s += self.load_s
        self.end_wishes(None)
        self.became_loaded.set()
        self.became_settled.set()

    def end_wishes(self, failure: str | None) -> None:
        """No operator's load is pending any more: it is loaded, or it is not for this reason."""
        self.wished_at = None
        wishers, self.wishers = self.wishers, []
        for one in wishers:
            if one.done():
                continue  # who waited has left
            if failure is None:
                one.set_result(None)
            else:
                one.set_exception(EngineUnavailableError(failure))

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Returns when this is so, which `became_idle` may bring about."""
        while not is_so():
            self.became_idle.clear()
            await self.became_idle.wait()

    def became_unloaded(self) -> None:
        """Its engine has ended; its counts are kept."""
        self.phase, self.is_yielding = Phase.UNLOADED, False
        self.became_loaded.clear()
        self.became_idle.set()
        if self.engine is not None:
            self._last_info = self.last_info
            self._earlier_stats = at_rest(self.stats)
            self._earlier_restarts += self.engine.num_restarts
            self.engine = None

    @property
    def last_info(self) -> RunnerInfo | None:
        """Facts about the model from its engine, or from the last one."""
        try:
            return self._last_info if self.engine is None else self.engine.info
        except EngineUnavailableError:
            return self._last_info

    @property
    def is_permanent(self) -> bool:
        return False

    @property
    def is_needed(self) -> bool:
        return self.residency.is_loaded_at_start

    @property
    def is_closed(self) -> bool:
        return self.host.is_closing

    @property
    def is_ready(self) -> bool:
        if self.phase is Phase.LOADED:
            return self.state is EngineState.READY
        return self.num_loads > 0 and self.failure is None

    @property
    def shared(self) -> Callable[[], Shared]:
        return self.host.shared

    @property
    def planned(self) -> RunnerInfo | None:
        return self.source.planned

    @property
    def status(self) -> ModelStatus:
        info = self.last_info or self.planned
        return ModelStatus(
            standing_of(self.state),
            None if self.failure is None else self.failure.told,
            self._progress,
            self.num_bytes,
            len(self.waiters),
            None if info is None else info.max_model_len,
            self._stays_s,
        )

    @property
    def _stays_s(self) -> float | None:
        if self.phase is not Phase.LOADED:
            return None
        stays_s = self.stay_bounds.most_s if self.num_uses else self.stays_until - asyncio.get_running_loop().time()
        return None if math.isinf(stays_s) else max(stays_s, 0.0)

    @property
    def residence_s(self) -> float:
        """Seconds that it stays after a load, unless a request for another model has waited longer than that."""
        return RESIDENCE_LOADS * self.load_s

    @property
    def stay_bounds(self) -> StayBounds:
        if self.residency.is_pinned:
            return StayBounds(fixed="it is pinned")
        return StayBounds(
            least_s=self.residence_s, most_s=math.inf if self.residency.idle_s is None else self.residency.idle_s
        )

    @property
    def _progress(self) -> float | None:
        if self.phase is not Phase.LOADING or not self.load_s:
            return None
        return round(min((asyncio.get_running_loop().time() - self.load_began) / self.load_s, 0.99), 2)

    def use(self, num_bytes: int, *, is_background: bool, wish: Wish = no_wish) -> AbstractAsyncContextManager[None]:
        return self.host.use(self, num_bytes, is_background=is_background, wish=wish)

    def hold(self, wish: Wish = no_wish) -> Callable[[], None]:
        self.num_uses += 1
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self.num_uses -= 1
                self.host.released(self, wish())

        return release

    async def wait_settled(self) -> None:
        if self.residency.is_loaded_at_start:
            await self.became_settled.wait()

    async def load(self) -> None:
        await self.host.load(self)

    async def unload(self, *, grace_s: float | None) -> None:
        await self.host.unload(self, grace_s=grace_s)

    def watch(self, wake: Callable[[], None]) -> Callable[[], None]:
        return self.host.watch(wake)

    @property
    def state(self) -> EngineState:
        match self.phase:
            case Phase.UNLOADED:
                return EngineState.UNLOADED
            case Phase.LOADING:
                return EngineState.STARTING
            case Phase.UNLOADING:
                return EngineState.DRAINING
        return EngineState.UNLOADED if self.engine is None else self.engine.state

    @property
    def info(self) -> RunnerInfo:
        info = self.last_info
        if info is None:
            raise EngineUnavailableError(f"The model {self.name} has not been loaded yet.")
        return info

    @property
    def stats(self) -> EngineStats:
        return self._earlier_stats if self.engine is None else total(self._earlier_stats, self.engine.stats)

    @property
    def num_held(self) -> int:
        return len(self.waiters) + (0 if self.engine is None else self.engine.num_held)

    @property
    def num_background_held(self) -> int:
        waiting = sum(one.is_background for one in self.waiters)
        return waiting + (0 if self.engine is None else self.engine.num_background_held)

    @property
    def num_restarts(self) -> int:
        return self._earlier_restarts + (0 if self.engine is None else self.engine.num_restarts)

    async def start(self) -> None:
        await self.load()

    async def wait_ready(self) -> None:
        await self.became_loaded.wait()
        if self.engine is not None:
            await self.engine.wait_ready()

    def submit(self, request: EngineRequest, wake: Callable[[], None], follower: Follower) -> OutputStream:
        if self.engine is None:
            raise EngineUnavailableError(f"The model {self.name} is not loaded.")
        return self.engine.submit(request, wake, follower)

    async def explain(self, request_id: str) -> Sequence[ChoiceHistory]:
        return () if self.engine is None else await self.engine.explain(request_id)

    def abort_choice(self, request_id: str, choice: int) -> None:
        if self.engine is not None:
            self.engine.abort_choice(request_id, choice)

    async def ended(self) -> str:
        return "The model is not loaded." if self.engine is None else await self.engine.ended()

    async def drain(self, grace_s: float) -> None:
        await self.unload(grace_s=grace_s)

    async def stop(self) -> None:
        await self.unload(grace_s=0.0)
