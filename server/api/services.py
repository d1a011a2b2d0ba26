"""The services that endpoints share. `create_app` makes them once; FastAPI's dependencies pass them."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import Depends, Query, Request
from prometheus_client.core import Metric

from server.api.jobs import Jobs
from server.api.model_services import ModelServices
from server.config import Settings
from server.errors import InvalidRequestError, NotFoundError, unknown_model
from server.generation.image_room import ImageRoom
from server.http.body import IncomingBodies
from server.http.loopback import Loopback
from server.http.middleware import record_of
from server.storage.files import FileStore
from server.storage.storage import Storage
from server.telemetry.metrics import ServerMetrics, joined
from server.telemetry.recent_requests import Traced
from server.telemetry.timeline import RequestTimeline
from server.tenants.accounts import Accounts

if TYPE_CHECKING:
    from server.api.body_worker import WorkerPool
    from server.api.responses.stream import RunningResponses
    from server.api.responses.websocket import Websockets
    from server.telemetry.traces import Traces


class ServedModels:
    """The models of a server that a client may use, by all their names, in the order of the settings."""

    def __init__(self, models: Sequence[ModelServices]) -> None:
        """The first model is the default."""
        self._models = tuple(models)
        self._by_name = {name: one for one in models for name in one.model.names}

    def __iter__(self) -> Iterator[ModelServices]:
        return iter(self._models)

    def among(self, names: Collection[str]) -> "ServedModels":
        """The models that have one of these names."""
        return ServedModels([one for one in self._models if not set(names).isdisjoint(one.model.names)])

    @property
    def names(self) -> Collection[str]:
        """All names of the models."""
        return self._by_name.keys()

    @property
    def default(self) -> ModelServices:
        """The model of requests that name none. Raises NotFoundError if the client may use none at all."""
        if not self._models:
            message = "You do not have access to any model of this server."
            raise NotFoundError(message, param="model", code="model_not_found")
        return self._models[0]

    def find(self, name: str) -> ModelServices:
        """The model with this name or alias. Raises NotFoundError."""
        if name not in self._by_name:
            raise unknown_model(name)
        return self._by_name[name]

    def requests_of(self, client: str) -> Sequence[Traced]:
        """The client's interactive requests to these models, oldest first."""
        found = [traced for one in self._models for traced in one.timelines.of_client(client)]
        return sorted(found, key=lambda traced: traced.started_unix)

    async def find_request(self, client: str, name: str) -> RequestTimeline | None:
        """The client's request with this request id or answer id, or None."""
        for one in self._models:
            if (found := await one.timelines.find(client, name)) is not None:
                return found
        return None

    def check_open(self) -> None:
        """Raise UnavailableError if no model takes requests, now or after a load."""
        if not any(one.takes_work or one.is_on_demand for one in self._models):
            self.default.info()

    def check_ready(self) -> None:
        """Raise UnavailableError with the reason, unless the models that are loaded at the start are ready."""
        for one in self._models:
            if one.residence.is_needed:
                one.check_ready()

    async def wait_open(self) -> None:
        """Returns when each model that is loaded at the start is loaded or has failed.

        Raises EngineUnavailableError if the only model has failed.
        """
        await asyncio.gather(*(one.residence.wait_settled() for one in self._models))

    def of_body(self, body: bytes, find: "Finder | None" = None) -> ModelServices:
        """The model that a JSON body names; the default model for a body without a name, or that is not valid.

        An API in which names mean more than one spelling has its own `find`. Raises NotFoundError.
        """
        if len(self._models) == 1:
            return self.default  # its planner checks the name together with the other fields
        name = peek(body).model
        return (find or ServedModels.find)(self, name) if isinstance(name, str) else self.default


Finder = Callable[[ServedModels, str], ModelServices]
"""Finds the model that a name means. Raises NotFoundError."""


class Peeked(msgspec.Struct):
    """Fields that decide where and how a body is answered."""

    model: str | None = None
    stream: msgspec.Raw = msgspec.Raw()

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream."""
        return bytes(self.stream) == b"true"


def peek(body: bytes) -> Peeked:
    """These fields of a JSON body; without values if they are not valid."""
    try:
        return msgspec.json.decode(body, type=Peeked)
    except (msgspec.DecodeError, RecursionError):
        return Peeked()


@dataclass(frozen=True, slots=True)
class Services:
    """The services of one application that do not depend on the model."""

    models: ServedModels
    """All of them; `models_of` returns the ones that a client may use."""
    settings: Settings
    metrics: ServerMetrics
    bodies: IncomingBodies
    storage: Storage
    jobs: Jobs
    accounts: Accounts
    loopback: Loopback
    websockets: "Websockets"
    responses: "RunningResponses"
    image_room: ImageRoom
    files: FileStore | None
    """None if no data folder is set."""
    traces: "Traces | None"
    """None if traces are not exported."""
    own_workers: "WorkerPool | None"
    """The worker processes that only this application uses; None: they are shared."""

    def models_of(self, client: str) -> ServedModels:
        """The models that the client of this name may use."""
        allowed = self.accounts.keys.named(client).models
        return self.models if allowed is None else self.models.among(allowed)

    def may_manage(self, client: str) -> bool:
        """Whether the client of this name may load and unload models. Without keys, everyone may."""
        keys = self.accounts.keys
        return not keys or keys.named(client).manages

    def collect(self, models: ServedModels | None = None) -> Sequence[Metric]:
        """The current metrics of the server and of these models, by default of all."""
        of_models = (metric for one in models or self.models for metric in one.metrics.collect())
        return [*self.metrics.collect(), *joined(of_models)]


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


ModelQuery = Annotated[str | None, Query(description=_MODEL)]


async def _models(request: Request, services: ServicesDep) -> ServedModels:
    """The models that the request's client may use."""
    return services.models_of(record_of(request).client)


ModelsDep = Annotated[ServedModels, Depends(_models)]


async def _model(models: ModelsDep, model: ModelQuery = None) -> ModelServices:
    """The model that a query names, or the default one. Raises NotFoundError."""
    return models.default if model is None else models.find(model)


ModelDep = Annotated[ModelServices, Depends(_model)]


async def _files(services: ServicesDep) -> FileStore:
    """The application's file store. Raises InvalidRequestError if no data folder is set."""
    if services.files is None:
        message = "This server stores no files, because it was started without --data-dir."
        raise InvalidRequestError(message, code="unsupported_value")
    return services.files


FilesDep = Annotated[FileStore, Depends(_files)]
