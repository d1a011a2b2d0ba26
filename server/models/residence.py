"""The interface to the part that decides how long a model stays in memory, and its status."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from model_runner.runner_interface import RunnerInfo
from server.engine.client import EngineClient, EngineState, EngineUnavailableError


class Standing(StrEnum):
    """Whether a model is loaded, in the words of llama.cpp's router."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"


_STANDINGS = {
    EngineState.UNLOADED: Standing.UNLOADED,
    EngineState.STARTING: Standing.LOADING,
    EngineState.FAILED: Standing.UNLOADED,
}
"""All other states are LOADED."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The memory and the process that several models share."""

    budget: int
    """Bytes that all of them together may take."""
    has_spare: bool
    """Whether a process that has imported everything waits for the next load."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Where a model stands now."""

    standing: Standing
    failure: str | None = None
    """The words for clients if it could not be loaded, or has failed."""
    progress: float | None = None
    """Share of a load that is over, as far as the last load tells; None: it is not loading, or was never loaded."""
    num_bytes: int | None = None
    """Memory that it takes while it is loaded; None: not known."""
    num_waiting: int = 0
    """Requests that wait until it is loaded."""
    max_model_len: int | None = None
    """Maximum length of prompt and output together, in tokens; None: not known yet."""
    stays_s: float | None = None
    """Seconds until it is unloaded if no request comes; None: it stays until its memory is needed, or for ever."""


Wish = Callable[[], float | None]
"""Called when a request has ended. Returns for how many seconds its model shall stay; None: as the operator has set."""


def no_wish() -> None:
    """The wish of a request that has none."""


@dataclass(frozen=True, slots=True)
class StayBounds:
    """How far a request may decide how long its model stays loaded after it."""

    fixed: str | None = None
    """Why requests decide nothing."""
    least_s: float = 0.0
    most_s: float = math.inf
    """Infinite: until its memory is needed."""

    def stay_of(self, wish_s: float | None) -> float:
        """Seconds that the model stays for a request with this wish."""
        if wish_s is None or self.fixed is not None:
            return self.most_s
        return min(max(wish_s, self.least_s), self.most_s)


def standing_of(state: EngineState) -> Standing:
    """Whether a model is loaded whose engine is in this state."""
    return _STANDINGS.get(state, Standing.LOADED)


class Residence(Protocol):
    """Decides how long a model stays loaded."""

    @property
    def is_open(self) -> bool:
        """Whether `use` does not wait."""
        ...

    @property
    def is_permanent(self) -> bool:
        """Whether the model can never be unloaded."""
        ...

    @property
    def is_needed(self) -> bool:
        """Whether the server is only ready when this model is."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether the model will never be loaded again, because the server stops."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether the model is ready, or was ready once and has been unloaded since."""
        ...

    @property
    def shared(self) -> "Callable[[], Shared] | None":
        """Gives what all models of the server share at the moment; None for the only model."""
        ...

    @property
    def planned(self) -> RunnerInfo | None:
        """The facts that are known before the first load, enough to turn texts into tokens: the vocabulary, the
        numbers of tokens, and whether prompts may have images. None: not known yet, or not needed.
        """
        ...

    @property
    def status(self) -> ModelStatus: ...

    @property
    def stay_bounds(self) -> StayBounds: ...

    def use(self, num_bytes: int, *, is_background: bool, wish: Wish = no_wish) -> AbstractAsyncContextManager[None]:
        """Context in which the model is loaded. Entering it may wait for that, with a body of `num_bytes` in memory.

        The model then stays as the `wish` says: of all requests, the wish that ends last counts.

        Raises UnavailableError, and RateLimitError if too many requests wait.
        """
        ...

    def hold(self, wish: Wish = no_wish) -> Callable[[], None]:
        """Keep the loaded model; returns the function that ends that, which may be called several times."""
        ...

    async def wait_settled(self) -> None:
        """Returns when the model, if it is loaded at the start, is loaded or has failed."""
        ...

    async def load(self) -> None:
        """Load the model, and return when it is loaded. Raises EngineUnavailableError if that fails."""
        ...

    async def unload(self, *, grace_s: float | None) -> None:
        """Let requests in flight finish for `grace_s` (None: as long as they need), and unload the model."""
        ...

    def watch(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` whenever a status may have changed. Returns the function that ends that."""
        ...


class Permanent:
    """The residence of the only model of a server, which is loaded once and for all: nothing waits for it."""

    is_open = True
    is_permanent = True
    is_needed = True
    shared = None
    planned = None
    stay_bounds = StayBounds(fixed="this server never unloads it")

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    @property
    def is_closed(self) -> bool:
        return self._engine.state in (EngineState.DRAINING, EngineState.FAILED)

    @property
    def is_ready(self) -> bool:
        return self._engine.state is EngineState.READY

    @property
    def status(self) -> ModelStatus:
        has_failed = self._engine.state is EngineState.FAILED
        max_model_len = None
        with suppress(EngineUnavailableError):
            max_model_len = self._engine.info.max_model_len
        failure = "The engine failed." if has_failed else None
        return ModelStatus(standing_of(self._engine.state), failure, max_model_len=max_model_len)

    @asynccontextmanager
    async def use(self, num_bytes: int, *, is_background: bool, wish: Wish = no_wish) -> AsyncIterator[None]:
        yield

    def hold(self, wish: Wish = no_wish) -> Callable[[], None]:
        return _nothing

    async def wait_settled(self) -> None:
        await self._engine.wait_ready()

    async def load(self) -> None:
        await self._engine.wait_ready()

    async def unload(self, *, grace_s: float | None) -> None:
        raise NotImplementedError("the only model of a server stays loaded")

    def watch(self, wake: Callable[[], None]) -> Callable[[], None]:
        task = asyncio.get_running_loop().create_task(self._wake_when_changed(wake))

        def end() -> None:
            task.cancel()

        return end

    async def _wake_when_changed(self, wake: Callable[[], None]) -> None:
        with suppress(EngineUnavailableError):
            await self._engine.wait_ready()
        wake()
        await self._engine.ended()
        wake()


def _nothing() -> None:
    """Ends a hold that kept nothing."""
