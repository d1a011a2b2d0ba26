"""What the HTTP side calls: one interface, whether the engine runs in a process of its own or in this one."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from model_runner.runner_interface import RunnerInfo
from scheduler.history import ChoiceHistory
from scheduler.interface import EngineRequest, EngineStats, RequestOutput
from server.engine.live_requests import Follower
from server.engine.step_log import StepLog


class EngineState(StrEnum):
    """Where the engine is in its life. Requests are taken only when READY or RESTARTING (they wait)."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"


class EngineUnavailableError(Exception):
    """The engine takes no work now: starting, draining or failed. The client may try again later."""


class QueueFullError(Exception):
    """All places of the server are taken, and the client that asks has no more left in its share."""


class RequestFailedError(Exception):
    """One request cannot be completed: it failed alone, the engine goes on."""


class OutputStream(Protocol):
    """What one request brings, until every choice has ended."""

    @property
    def error(self) -> Exception | None:
        """What ended it early: EngineUnavailableError or RequestFailedError. It comes after the outputs."""
        ...

    def take(self) -> Sequence[RequestOutput]:
        """All outputs that have come since the last time, in order."""
        ...

    def close(self) -> None:
        """Abort what still runs; nothing more comes."""
        ...


class EngineClient(Protocol):
    """A running engine. Everything is called from one event loop."""

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> RunnerInfo:
        """Raises EngineUnavailableError until the engine has been ready once."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The last snapshot that the engine sent; nothing runs and waits in one that has ended."""
        ...

    @property
    def steps(self) -> StepLog:
        """The last steps, also those of engines before this one."""
        ...

    @property
    def num_held(self) -> int:
        """Live choices that are not in the engine: it restarts, or they wait because one may have killed it."""
        ...

    @property
    def num_background_held(self) -> int:
        """Those of `num_held` that only get the room that others leave."""
        ...

    @property
    def num_restarts(self) -> int: ...

    async def start(self) -> None:
        """Begin to load the model; returns at once. `wait_ready` waits."""
        ...

    async def wait_ready(self) -> None:
        """Returns when the engine answers; raises EngineUnavailableError when it failed to start."""
        ...

    def submit(self, request: EngineRequest, wake: Callable[[], None], follower: Follower) -> OutputStream:
        """Take a request; `wake` is called whenever its stream has something new.

        Raises QueueFullError or EngineUnavailableError if it is not taken. A restart of the engine is not seen in the
        outputs, which go on where they stopped; only the follower is told.
        """
        ...

    async def explain(self, request_id: str) -> Sequence[ChoiceHistory]:
        """What became so far of a request's choices that have not ended. Takes as long as a step does.

        Nothing of a request that is unknown or has ended, or that the engine does not have: it restarts, or dies. Of
        choices that were aborted before, followers have been told when this returns.
        """
        ...

    def abort_choice(self, request_id: str, choice: int) -> None:
        """End one choice of a running request (a stop string was found); no more outputs of it come."""
        ...

    async def drain(self, grace_s: float) -> None:
        """Take no new requests, wait for the running ones at most this long, then fail what is left."""
        ...

    async def stop(self) -> None:
        """End the engine at once."""
        ...
