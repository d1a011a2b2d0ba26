"""The services that endpoints share. `create_app` makes them once; FastAPI's dependencies pass them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from model_runner.runner_interface import RunnerInfo
from server.api.body_worker import BodyWorker
from server.api.jobs import Jobs
from server.config import Settings
from server.engine.client import EngineClient, EngineState, EngineUnavailableError
from server.errors import InvalidRequestError, UnavailableError
from server.generation.fingerprint import Fingerprint
from server.generation.image_room import ImageRoom
from server.generation.planning.planner import Planner
from server.generation.served_model import ServedModel
from server.http.body import IncomingBodies
from server.http.loopback import Loopback
from server.storage.files import FileStore
from server.storage.storage import Storage
from server.telemetry.metrics import Metrics
from server.telemetry.recent_requests import RecentRequests
from server.tenants.accounts import Accounts
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from server.api.responses.websocket import Websockets
    from server.telemetry.traces import Traces

_TAKES_WORK = frozenset({EngineState.READY, EngineState.RESTARTING})


@dataclass(frozen=True, slots=True)
class Services:
    """The services of one application."""

    engine: EngineClient
    tokenizer: Tokenizer
    model: ServedModel
    settings: Settings
    metrics: Metrics
    timelines: RecentRequests
    fingerprint: Fingerprint
    bodies: IncomingBodies
    body_worker: BodyWorker
    storage: Storage
    jobs: Jobs
    accounts: Accounts
    loopback: Loopback
    websockets: "Websockets"
    image_room: ImageRoom
    files: FileStore | None
    """None if no data folder is set."""
    traces: "Traces | None"
    """None if traces are not exported."""

    def info(self) -> RunnerInfo:
        """The engine's information about the model. Raises UnavailableError while the engine accepts no work."""
        if self.engine.state not in _TAKES_WORK:
            raise UnavailableError(f"The engine is {self.engine.state.value}. Please try again later.")
        try:
            return self.engine.info
        except EngineUnavailableError:
            raise UnavailableError("The engine is starting. Please try again later.") from None

    @property
    def is_ready(self) -> bool:
        """Whether a request would be answered right now."""
        return self.engine.state is EngineState.READY and self.fingerprint.is_known

    def check_ready(self) -> None:
        """Raise UnavailableError with the reason, unless `is_ready`."""
        if self.engine.state is not EngineState.READY:
            raise UnavailableError(f"The engine is {self.engine.state.value}. Please try again later.")
        if not self.fingerprint.is_known:
            raise UnavailableError("The server is starting: it hashes the model's files. Please try again later.")

    def planner(self) -> Planner:
        """Plans generation requests. Raises UnavailableError while the engine accepts no work."""
        return Planner(self.tokenizer, self.model, self.info(), self.settings)


def services_of(request: Request) -> Services:
    """The services of the application that answers this request."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


async def _services(request: Request) -> Services:
    """The application's services; a coroutine because FastAPI runs plain functions in a thread."""
    return services_of(request)


ServicesDep = Annotated[Services, Depends(_services)]


async def _files(services: ServicesDep) -> FileStore:
    """The application's file store. Raises InvalidRequestError if no data folder is set."""
    if services.files is None:
        message = "This server stores no files, because it was started without --data-dir."
        raise InvalidRequestError(message, code="unsupported_value")
    return services.files


FilesDep = Annotated[FileStore, Depends(_files)]
