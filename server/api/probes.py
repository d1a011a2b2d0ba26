"""Probes and metrics for operators: GET /health, /ready, /metrics, /load and /version."""

from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from server import __version__
from server.api.answer_object import AnswerObject, doc
from server.api.dialect import Dialect
from server.api.openapi import answers, documented_errors
from server.api.services import ModelQuery, ServicesDep
from server.errors import UnavailableError
from server.http.auth import key_in, owner_of, sees_all_usage
from server.http.middleware import record_of
from server.http.responses import json_response
from server.telemetry.metrics import exposition

router = APIRouter(tags=["Operations"])


class Status(AnswerObject):
    """Response schema for GET /health and GET /ready."""

    status: Literal["ok", "ready"]


class Version(AnswerObject):
    """Response schema for GET /version."""

    version: str


class Load(AnswerObject):
    """Response schema for GET /load."""

    server_load: Annotated[int, doc("Requests in flight in the engine, without background requests.")]


@router.get("/health", responses=answers(Status))
async def health() -> Response:
    """The process is alive. This says nothing about the model."""
    return json_response(Status(status="ok"))


@router.get("/ready", responses=answers(Status, 401, 404, 503))
async def ready(request: Request, services: ServicesDep, model: ModelQuery = None) -> Response:
    """The server answers requests. 503 while the engine is not ready or the model's files are being hashed.

    Of several models, those that are loaded at the start count. With `model`: this one is loaded, and answers at once;
    a server with API keys asks for one then.
    """
    keys = services.accounts.keys
    if model is None:
        try:
            services.models.check_ready()
        except UnavailableError as error:
            if not (keys and services.models.default.is_on_demand):
                raise
            message = "A model that is loaded at the start is not ready."  # who asks may not know its name
            raise UnavailableError(message, code=error.code) from None
    else:
        client = owner_of(key_in(request.headers), keys).name if keys else ""
        services.models_of(client).find(model).check_loaded()
    return json_response(Status(status="ready"))


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **documented_errors(401)},
)
async def metrics(request: Request, services: ServicesDep) -> Response:
    """Prometheus metrics of the models that the key may use. They include usage per key only for keys that may see all
    usage.
    """
    models = services.models_of(record_of(request).client)
    content = exposition(services.collect(models), of_tenants=sees_all_usage(request.headers, services.accounts.keys))
    return Response(content, media_type=CONTENT_TYPE_LATEST)


@router.get("/load", responses=answers(Load, 401))
async def load(services: ServicesDep) -> Response:
    """Number of requests in flight, for routers that know vLLM's endpoint."""
    return json_response(Load(server_load=sum(one.timelines.num_awaited for one in services.models)))


@router.get("/version", responses=answers(Version))
async def version() -> Response:
    """The server's version."""
    return json_response(Version(version=__version__))


DIALECT = Dialect(router)
