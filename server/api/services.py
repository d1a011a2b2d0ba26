"""The services that endpoints share. `create_app` makes them once; FastAPI's dependencies pass them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import Depends, Query, Request
from prometheus_client.core import Metric

from server.api.jobs import Jobs
from server.api.model_services import ModelServices
from server.config import Settings
from server.errors import InvalidRequestError, unknown_model
from server.generation.image_room import ImageRoom
from server.http.body import IncomingBodies
from server.http.loopback import Loopback
from server.storage.files import FileStore
from server.storage.storage import Storage
from server.telemetry.metrics import ServerMetrics, joined
from server.telemetry.recent_requests import Traced
from server.telemetry.timeline import RequestTimeline
from server.tenants.accounts import Accounts

if TYPE_CHECKING:
    from server.api.responses.websocket import Websockets
    from server.telemetry.traces import Traces


class ServedModels:
    """The models of a server, by all their names, in the order of the settings."""

    def __init__(self, models: Sequence[ModelServices]) -> None:
        """The first model is the default."""
        self._models = tuple(models)
        self._by_name = {name: one for one in models for name in one.model.names}

    def __iter__(self) -> Iterator[ModelServices]:
        return iter(self._models)

    @property
    def default(self) -> ModelServices:
        """The model of requests that name none."""
        return self._models[0]

    def find(self, name: str) -> ModelServices:
        """The model with this name or alias. Raises NotFoundError."""
        if name not in self._by_name:
            raise unknown_model(name)
        return self._by_name[name]

    @property
    def max_num_seqs(self) -> int:
        """The most choices that one of the loaded models runs at a time."""
        return max(one.engine.info.max_num_seqs for one in self._models if one.takes_work)

    def requests_of(self, client: str) -> Sequence[Traced]:
        """The client's interactive requests to all models, oldest first."""
        found = [traced for one in self._models for traced in one.timelines.of_client(client)]
        return sorted(found, key=lambda traced: traced.started_unix)

    async def find_request(self, client: str, name: str) -> RequestTimeline | None:
        """The client's request with this request id or answer id, or None."""
        for one in self._models:
            if (found := await one.timelines.find(client, name)) is not None:
                return found
        return None

    def check_open(self) -> None:
        """Raise UnavailableError if no model takes requests."""
        if not any(one.takes_work for one in self._models):
            self.default.info()

    def check_ready(self) -> None:
        """Raise UnavailableError with the reason, unless requests are answered right now."""
        self.default.check_ready()

    async def wait_open(self) -> None:
        """Returns when requests are taken. Raises EngineUnavailableError if they will never be."""
        await self.default.engine.wait_ready()

    def of_body(self, body: bytes) -> ModelServices:
        """The model that a JSON body names; the default model for a body without a name, or that is not valid.

        Raises NotFoundError.
        """
        if len(self._models) == 1:
            return self.default  # its planner checks the name together with the other fields
        try:
            name = msgspec.json.decode(body, type=_Named).model
        except msgspec.DecodeError:
            return self.default
        return self.find(name) if isinstance(name, str) else self.default


class _Named(msgspec.Struct):
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Services:
    """The services of one application that do not depend on the model."""

    models: ServedModels
    settings: Settings
    metrics: ServerMetrics
    bodies: IncomingBodies
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

    def collect(self) -> Sequence[Metric]:
        """The current metrics of the server and all its models."""
        return [*self.metrics.collect(), *joined(metric for one in self.models for metric in one.metrics.collect())]


def services_of(request: Request) -> Services:
    """The services of the application that answers this request."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


async def _services(request: Request) -> Services:
    """The application's services; a coroutine because FastAPI runs plain functions in a thread."""
    return services_of(request)


ServicesDep = Annotated[Services, Depends(_services)]

OF_MODEL = frozenset({"model"})
"""The query parameters that ModelDep reads."""
_MODEL = "Extension: name of one of several models. By default the first."


async def _model(
    services: ServicesDep, model: Annotated[str | None, Query(description=_MODEL)] = None
) -> ModelServices:
    """The model that a query names, or the default one. Raises NotFoundError."""
    return services.models.default if model is None else services.models.find(model)


ModelDep = Annotated[ModelServices, Depends(_model)]


async def _files(services: ServicesDep) -> FileStore:
    """The application's file store. Raises InvalidRequestError if no data folder is set."""
    if services.files is None:
        message = "This server stores no files, because it was started without --data-dir."
        raise InvalidRequestError(message, code="unsupported_value")
    return services.files


FilesDep = Annotated[FileStore, Depends(_files)]
