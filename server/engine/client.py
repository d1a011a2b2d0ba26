"""Interface of an engine for the HTTP side, whether it runs in its own process or in this one."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from model_runner.runner_interface import RunnerInfo
from scheduler.interface import ChoiceHistory, EngineRequest, EngineStats, RequestOutput
from server.engine.live_requests import Follower
from server.engine.step_log import StepLog


class EngineState(StrEnum):
    """Life cycle of the engine. Requests are accepted when READY or RESTARTING (they wait)."""

    UNLOADED = "unloaded"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"


class EngineUnavailableError(Exception):
    """The engine accepts no work now: it is starting, draining or failed. The client may retry later."""

    def __init__(self, reason: str = "", told: str | None = None) -> None:
        """`reason` is for the operator, and may name files and processes; `told` is what clients read in its place."""
        super().__init__(reason)
        self.told = reason if told is None else told


class QueueFullError(Exception):
    """All queue places are taken, and the client has used its share of them."""


class RequestFailedError(Exception):
    """One request failed alone; the engine continues."""


class OutputStream(Protocol):
    """Outputs of one request, until every choice has ended."""

    @property
    def error(self) -> Exception | None:
        """Why the request ended early: EngineUnavailableError or RequestFailedError. Set after the last output."""
        ...

    def take(self) -> Sequence[RequestOutput]:
        """All outputs since the last call, in order."""
        ...

    def close(self) -> None:
        """Abort unfinished choices. No more outputs follow."""
        ...


class EngineClient(Protocol):
    """A running engine. All calls come from one event loop."""

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> RunnerInfo:
        """Description of the loaded model. Raises EngineUnavailableError until the engine has been ready once."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The last snapshot from the engine. After its end, none are running or waiting in it."""
        ...

    @property
    def steps(self) -> StepLog:
        """The last steps, including steps of earlier engines."""
        ...

    @property
    def num_held(self) -> int:
        """Live choices outside the engine: it restarts, or they wait because one of them may have killed it."""
        ...

    @property
    def num_background_held(self) -> int:
        """Choices of `num_held` that belong to background requests."""
        ...

    @property
    def num_restarts(self) -> int: ...

    async def start(self) -> None:
        """Begin to load the model and return at once; `wait_ready` waits."""
        ...

    async def wait_ready(self) -> None:
        """Returns when the engine is ready; raises EngineUnavailableError if it failed to start."""
        ...

    def submit(self, request: EngineRequest, wake: Callable[[], None], follower: Follower) -> OutputStream:
        """Submit a request; `wake` is called whenever its stream has something new.

        Raises QueueFullError or EngineUnavailableError if it is refused. The outputs do not show a restart of the
        engine: they continue where they stopped, and only the follower hears of it.
        """
        ...

    async def explain(self, request_id: str) -> Sequence[ChoiceHistory]:
        """Histories of a request's unfinished choices so far. Takes as long as a step.

        Empty if the request is unknown, has ended or is not in the engine, which may be restarting. When this returns,
        followers have received the ends of all choices that were aborted before.
        """
        ...

    def abort_choice(self, request_id: str, choice: int) -> None:
        """End one choice of a running request (a stop string was found). It has no more outputs."""
        ...

    async def ended(self) -> str:
        """Returns why no engine will be started again, once that is so."""
        ...

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running ones finish for at most `grace_s`, then fail the rest."""
        ...

    async def stop(self) -> None:
        """End the engine at once."""
        ...
