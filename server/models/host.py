"""The host of several models: decides which are loaded, and whose requests wait."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from server.engine.client import EngineState, EngineUnavailableError
from server.errors import SHUTTING_DOWN, ApiError, MisconfiguredError, RateLimitError, UnavailableError
from server.models.hosted_model import Failure, HostedModel, Leaving, ModelSource, Phase, Residency, Waiter
from server.models.ledger import Ledgers
from server.models.residence import Shared, Wish, no_wish
from server.models.spare import TURN_S, PlanError

_logger = logging.getLogger("samewise.models")

YIELD_AFTER_S = 5.0
"""A request that has waited for so long makes a busy model take no new requests."""
MAX_WAITING_BYTES = 256 << 20
"""Bodies of requests that wait for models, all together."""
_FIRST_RETRY_S, _LAST_RETRY_S = 5.0, 300.0
_UNLOADED = "an operator unloaded it"
_IN_LOG = "It could not be loaded, or its engine failed. The server's log says why."
"""The words for clients in place of a reason that may name files and processes."""


class Spare(Protocol):
    """A process that waits for the next load."""

    @property
    def is_warm(self) -> bool:
        """Whether one waits that has imported everything."""
        ...

    def refill(self) -> None:
        """Have a process wait, if none does."""
        ...

    async def close(self) -> None:
        """End the waiting process."""
        ...


class ModelHost:
    """Loads models when requests want them, and unloads others to make room.

    All decisions are made by `_decide`, on the event loop, after every change and when a time has come.
    """

    def __init__(self, ledgers: Ledgers, spare: Spare) -> None:
        self.models: list[HostedModel] = []
        """In the order of the settings."""
        self._ledgers = ledgers
        self._spare = spare
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting_bytes = 0
        self._decision: asyncio.Handle | None = None
        """The next call of `_decide`."""
        self._watchers: dict[object, Callable[[], None]] = {}
        self.is_closing = False
        """Whether the server stops."""

    def add(self, name: str, source: ModelSource, residency: Residency) -> HostedModel:
        """Add a model, which is not loaded yet."""
        model = HostedModel(name, source, residency, self)
        self.models.append(model)
        return model

    def shared(self) -> Shared:
        """The memory and the process that all models share."""
        return Shared(self._ledgers.total, self._spare.is_warm)

    @property
    def state(self) -> EngineState:
        """FAILED if a model that is loaded at the start cannot be; READY when all of these are loaded."""
        first = [model for model in self.models if model.residency.is_loaded_at_start]
        if any(model.failure is not None and not model.num_loads for model in first):
            return EngineState.FAILED
        return EngineState.READY if all(model.num_loads for model in first) else EngineState.STARTING

    async def start(self) -> None:
        """Begin to plan all models, and to load those that are loaded at the start."""
        now = asyncio.get_running_loop().time()
        for model in self.models:
            model.wished_at = now if model.residency.is_loaded_at_start else None
        self._spawn(self._plan_all())

    async def wait_ready(self) -> None:
        """Returns when all models that are loaded at the start are loaded. Raises EngineUnavailableError."""
        for model in self.models:
            if model.residency.is_loaded_at_start:
                await model.became_settled.wait()
                if model.failure is not None and not model.num_loads:
                    raise EngineUnavailableError(f"{model.name}: {model.failure.reason}")

    @asynccontextmanager
    async def use(
        self, model: HostedModel, num_bytes: int, *, is_background: bool, wish: Wish = no_wish
    ) -> AsyncIterator[None]:
        """Context in which the model is loaded; entering it waits for that, with a body of `num_bytes` in memory.

        Raises UnavailableError if it cannot be loaded, or not in time, and RateLimitError if too many requests wait.
        """
        if model.is_open and not self.is_closing:
            model.num_uses += 1
        else:
            await self._wait(model, num_bytes, is_background=is_background)
        try:
            yield
        finally:
            model.num_uses -= 1
            self.released(model, wish())

    def watch(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` whenever the status of a model may have changed. Returns the function that ends that."""
        key = object()
        self._watchers[key] = wake

        def end() -> None:
            self._watchers.pop(key, None)

        return end

    async def load(self, model: HostedModel) -> None:
        """Load the model, and return when it is loaded. Raises EngineUnavailableError if that fails."""
        if self.is_closing:
            raise EngineUnavailableError(SHUTTING_DOWN)
        model.leavers.clear()  # the last word of operators counts
        model.became_idle.set()
        if model.phase is Phase.LOADED:
            return
        model.failure = None
        model.wished_at = asyncio.get_running_loop().time()
        loaded = asyncio.get_running_loop().create_future()
        model.wishers.append(loaded)
        self._changed()
        await loaded

    async def unload(self, model: HostedModel, *, grace_s: float | None) -> None:
        """Take no new requests for the model, let those in flight finish, and unload it.

        After `grace_s` they fail; with None they have as long as they need. New requests wait, and load it again. The
        model stays if `load` is called meanwhile.
        """
        leaver = object()
        model.leavers.add(leaver)
        model.end_wishes(_UNLOADED)
        self._changed()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await model.until(
                        lambda: not (model.num_uses and model.phase is Phase.LOADED and leaver in model.leavers)
                    )
            if leaver in model.leavers and model.phase in (Phase.LOADED, Phase.LOADING):
                self._begin_unload(model, Leaving.OPERATOR, _UNLOADED)
            await model.until(lambda: model.phase is not Phase.UNLOADING)
        finally:
            model.leavers.discard(leaver)
            model.became_settled.set()
            self._changed()

    def released(self, model: HostedModel, wish_s: float | None) -> None:
        """The model is used less than before; who used it wants it to stay for so long."""
        now = asyncio.get_running_loop().time()
        model.stays_until = max(model.stays_until, now + model.stay_bounds.stay_of(wish_s))
        if not model.num_uses:
            model.last_used = now
            model.became_idle.set()
            self._changed()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running ones finish for at most `grace_s`, then fail the rest."""
        self._close()
        await asyncio.gather(*(model.engine.drain(grace_s) for model in self.models if model.engine is not None))
        await self.stop()

    async def stop(self) -> None:
        """End all engines at once."""
        self._close()
        await asyncio.gather(*(model.engine.stop() for model in self.models if model.engine is not None))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._spare.close()

    def _close(self) -> None:
        self.is_closing = True
        self._wake_watchers()
        for model in self.models:
            model.end_wishes(SHUTTING_DOWN)
            _fail(model, UnavailableError(SHUTTING_DOWN))

    async def _wait(self, model: HostedModel, num_bytes: int, *, is_background: bool) -> None:
        """Wait until the model is loaded, and count a use of it."""
        now = asyncio.get_running_loop().time()
        self._check_waiting(model, num_bytes, now, is_background=is_background)
        num_bytes = 0 if is_background else num_bytes
        waiter = Waiter(asyncio.get_running_loop().create_future(), num_bytes, now, is_background)
        model.waiters.append(waiter)
        self._waiting_bytes += num_bytes
        self._changed()
        try:
            async with asyncio.timeout(None if is_background else model.residency.load_timeout_s):
                await waiter.granted
        except TimeoutError:
            if waiter.is_granted:  # the time ended in the same turn of the event loop
                return
            message = f"The model `{model.name}` was not loaded in time: the request waited for "
            message += f"{model.residency.load_timeout_s:g} s (load_timeout_s). Please try again later."
            raise UnavailableError(message, code="model_loading") from None
        except asyncio.CancelledError:
            if waiter.is_granted:
                model.num_uses -= 1
                self.released(model, None)
            raise
        finally:
            self._waiting_bytes -= num_bytes
            with suppress(ValueError):
                model.waiters.remove(waiter)
            self._changed()

    def _check_waiting(self, model: HostedModel, num_bytes: int, now: float, *, is_background: bool) -> None:
        """Raise ApiError if a request may not wait for the model."""
        if self.is_closing:
            raise UnavailableError(SHUTTING_DOWN)
        failure = model.failure
        if failure is not None and now < failure.retry_at and model.phase is Phase.UNLOADED:
            raise _not_available(model, failure, now)
        if is_background:
            return  # their sender limits them
        num_waiting = sum(not one.is_background for one in model.waiters)
        if num_waiting >= model.residency.max_waiting or self._waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            message = f"The model `{model.name}` is not loaded, and {num_waiting} requests wait for it. "
            message += "Please retry later, or raise the server's setting max_waiting."
            raise RateLimitError(message, code="rate_limit_exceeded")

    def _changed(self, at: float | None = None) -> None:
        """Decide soon, or at this time."""
        self._wake_watchers()
        if self.is_closing:
            return
        loop = asyncio.get_running_loop()
        if self._decision is not None:
            self._decision.cancel()
        self._decision = loop.call_soon(self._decide) if at is None else loop.call_at(at, self._decide)

    def _wake_watchers(self) -> None:
        for wake in tuple(self._watchers.values()):
            wake()

    def _decide(self) -> None:
        """Serve who waits for loaded models, load what is wanted, and make room for it."""
        self._decision = None
        if self.is_closing:
            return
        now = asyncio.get_running_loop().time()
        wanted = sorted(filter(_is_wanted, self.models), key=lambda one: one.wanted_since or now)
        for model in self.models:
            model.is_yielding = model.is_yielding and bool(wanted)
            if model.is_open:
                _grant(model)
        for model in wanted:
            if not self._begin_load(model):
                self._make_room(model, now)
                break  # strictly in order, so that nobody starves
        self._load_in_background()
        self._unload_unused(now)
        if (at := self._next_decision(wanted, now)) is not None:
            self._changed(at)

    def _load_in_background(self) -> None:
        """Load what only background requests want, where memory is free."""
        for model in self.models:
            if model.phase is Phase.UNLOADED and model.wanted_since is None and model.waiters:
                self._begin_load(model)

    def _next_decision(self, wanted: Sequence[HostedModel], now: float) -> float | None:
        """When a decision may change though nothing happens; None for never."""
        times = [model.unused_at for model in self.models if model.unused_at is not None]
        if wanted:
            since = wanted[0].wanted_since or now
            loaded = [model for model in self.models if model.phase is Phase.LOADED]
            times += [since + YIELD_AFTER_S]
            times += [model.loaded_at + model.residence_s for model in loaded]
            times += [since + model.residence_s for model in loaded]
        return min((time for time in times if time > now), default=None)

    def _begin_load(self, model: HostedModel) -> bool:
        """Load the model if its memory is free, or find out how much it needs. Returns whether others may go on."""
        if model.num_bytes is None:
            if not model.is_planning:
                self._begin_plan(model)
            return True
        if not model.source.ledger.reserve(model.name, model.num_bytes):
            return False
        model.phase, model.load_began = Phase.LOADING, asyncio.get_running_loop().time()
        self._wake_watchers()
        self._spawn(self._load(model))
        return True

    def _make_room(self, wanted: HostedModel, now: float) -> None:
        """Unload idle models, or make busy ones idle, so that the wanted one fits."""
        assert wanted.num_bytes is not None, "its load was refused"
        ledger = wanted.source.ledger
        beside = [model for model in self.models if model.num_bytes is not None and model.source.ledger is ledger]
        leaving = sum(_held(one) for one in beside if one.phase is Phase.UNLOADING)
        lacking = wanted.num_bytes - ledger.free - leaving
        if lacking <= 0:
            return
        waited = now - (wanted.wanted_since or now)
        free_to_go = [model for model in beside if _may_go(model, now, waited)]
        victims = self._least(free_to_go, lacking, now)
        for model in victims:
            self._begin_unload(model, Leaving.ROOM, f"{wanted.name} needs its memory")
        if victims or waited < YIELD_AFTER_S:
            return
        busy = [model for model in beside if model.phase is Phase.LOADED and not model.residency.is_pinned]
        for model in self._least(busy, lacking, now):
            if not model.is_yielding:
                _logger.info("%s takes no new requests until it is idle: %s needs its memory.", model.name, wanted.name)
            model.is_yielding = True

    def _least(self, models: Sequence[HostedModel], lacking: int, now: float) -> list[HostedModel]:
        """As few of the models as hold so many bytes, the least recently used first; none if all hold less."""
        chosen: list[HostedModel] = []
        for model in sorted(models, key=lambda one: (not one.is_unused(now), one.last_used)):
            if lacking > 0:
                chosen.append(model)
                lacking -= _held(model)
        if lacking > 0:
            return []
        for model in chosen.copy():
            if lacking + _held(model) <= 0:
                chosen.remove(model)
                lacking += _held(model)
        return chosen

    def _unload_unused(self, now: float) -> None:
        for model in self.models:
            if model.phase is Phase.LOADED and model.is_unused(now):
                unused_s = now - max(model.last_used, model.loaded_at)
                self._begin_unload(model, Leaving.IDLE, f"no request came for {unused_s:.0f} s")

    async def _plan_all(self) -> None:
        """Plan every model, those that are loaded at the start first; a plan that stands keeps none waiting."""
        for model in sorted(self.models, key=lambda one: not one.residency.is_loaded_at_start):
            if model.num_bytes is None and not model.is_planning:
                await asyncio.wait([self._begin_plan(model)], timeout=TURN_S)
        self._refill()

    def _refill(self) -> None:
        """Have a process wait for the next load, while none is loading."""
        if not self.is_closing and all(model.phase is not Phase.LOADING for model in self.models):
            self._spare.refill()

    def _begin_plan(self, model: HostedModel) -> asyncio.Task[None]:
        model.is_planning = True
        return self._spawn(self._plan(model))

    async def _plan(self, model: HostedModel) -> None:
        try:
            num_bytes = await model.source.plan()
            if num_bytes > model.source.ledger.budget:
                reason = f"It needs {num_bytes / (1 << 30):.2f} GiB, and all models together may take "
                reason += f"{model.source.ledger.budget / (1 << 30):.2f} GiB (memory_gib)."
                self._note_failure(model, reason, told=reason)
            else:
                model.num_bytes = num_bytes
        except (PlanError, OSError) as error:
            self._note_failure(model, str(error), may_pass=not isinstance(error, PlanError) or error.may_pass)
        finally:
            model.is_planning = False
            self._changed()

    async def _load(self, model: HostedModel) -> None:
        """Run the model's engine, from its start until it is unloaded or has failed."""
        was_unloaded = model.phase is not Phase.LOADING
        if was_unloaded or self.is_closing:
            return
        _logger.info("Loading %s.", model.name)
        engine = model.engine = model.source.make_engine(model.steps)
        try:
            await engine.start()
            await engine.wait_ready()
            if model.phase is Phase.LOADING:
                model.became_ready(asyncio.get_running_loop().time())
                _logger.info("%s is loaded, after %.1f s.", model.name, model.load_s)
                self._changed()
                self._refill()
            reason = await engine.ended()
        except EngineUnavailableError as error:
            reason = str(error)
        if model.engine is engine and model.phase is not Phase.UNLOADING and not self.is_closing:  # nobody ended it
            await self._unload(model, Leaving.FAILURE, "its engine failed; the server's log says why")
            self._note_failure(model, reason)

    def _begin_unload(self, model: HostedModel, leaving: Leaving, reason: str) -> None:
        model.phase = Phase.UNLOADING  # at once, so that no request begins to use it
        self._spawn(self._unload(model, leaving, reason))

    async def _unload(self, model: HostedModel, leaving: Leaving, reason: str) -> None:
        """End the model's engine; its memory is free when this returns."""
        _logger.info("Unloading %s: %s.", model.name, reason.rstrip("."))
        model.phase = Phase.UNLOADING
        model.unloads[leaving] += 1
        self._wake_watchers()
        if model.engine is not None:
            await model.engine.stop(f"The model {model.name} was unloaded: {reason}")
        model.became_unloaded()
        model.source.ledger.release(model.name)
        self._changed()
        self._refill()

    def _note_failure(self, model: HostedModel, reason: str, *, told: str = _IN_LOG, may_pass: bool = True) -> None:
        count = 1 + (0 if model.failure is None else model.failure.count)
        delay = min(_FIRST_RETRY_S * 2 ** (count - 1), _LAST_RETRY_S) if may_pass else math.inf
        _logger.error("%s cannot be loaded: %s", model.name, reason)
        model.failure = Failure(reason, told, asyncio.get_running_loop().time() + delay, count)
        model.end_wishes(told)
        model.became_settled.set()
        _fail(model, _not_available(model, model.failure))
        if model.residency.is_loaded_at_start and model.num_loads and may_pass:  # the server is not ready without it
            asyncio.get_running_loop().call_at(model.failure.retry_at, self._try_again, model, model.failure)
        self._changed()

    def _try_again(self, model: HostedModel, failure: Failure) -> None:
        """Load a model that failed, unless something has happened to it since."""
        if model.failure is failure and model.phase is Phase.UNLOADED:
            model.wished_at = asyncio.get_running_loop().time()
            self._changed()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("The host of models failed.", exc_info=error)


def _not_available(model: HostedModel, failure: Failure, now: float | None = None) -> ApiError:
    """The error for a request to a model that failed; with `now`, it says when the model is tried again."""
    message = f"The model `{model.name}` is not available: {failure.told}"
    if math.isinf(failure.retry_at):
        message += " Retries do not help: the operator has to correct its settings, and to restart the server."
        return MisconfiguredError(message, code="model_unavailable")
    if now is not None:
        message += f" It is tried again after {math.ceil(failure.retry_at - now)} s."
    return UnavailableError(message, code="model_unavailable")


def _is_wanted(model: HostedModel) -> bool:
    return model.wanted_since is not None


def _held(model: HostedModel) -> int:
    """The bytes that the model has reserved."""
    return model.source.ledger.reserved.get(model.name, 0)


def _may_go(model: HostedModel, now: float, waited: float) -> bool:
    """Whether the model may be unloaded for a request that has waited for so long."""
    if model.residency.is_pinned or model.num_uses:
        return False
    if model.phase is Phase.LOADING:
        return model.is_idle and model.wished_at is None
    has_stayed = now - model.loaded_at >= model.residence_s or waited >= model.residence_s
    return model.phase is Phase.LOADED and (model.is_yielding or (has_stayed and model.is_idle))


def _grant(model: HostedModel) -> None:
    """Let everyone who waits for the loaded model use it."""
    while model.waiters:
        waiter = model.waiters.popleft()
        if not waiter.granted.done():
            model.num_uses += 1
            waiter.granted.set_result(None)


def _fail(model: HostedModel, error: ApiError) -> None:
    """Fail everyone who waits for the model."""
    while model.waiters:
        waiter = model.waiters.popleft()
        if not waiter.granted.done():
            waiter.granted.set_exception(error)
