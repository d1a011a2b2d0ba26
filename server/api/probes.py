"""For those who run the server: is it alive, is it ready, what does it do."""

from typing import Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from server import __version__
from server.api.dialect import Dialect
from server.api.openapi import documented_errors
from server.api.services import ServicesDep
from server.http.auth import sees_all_usage

router = APIRouter(tags=["Operations"])


class Status(BaseModel):
    """A probe's answer."""

    status: Literal["ok", "ready"]


class Version(BaseModel):
    """The server's version."""

    version: str


class Load(BaseModel):
    """Answer of GET /load."""

    server_load: int = Field(
        description="Requests that the engine has taken and that are not answered; not those in the background."
    )


@router.get("/health")
async def health() -> Status:
    """The process is alive; says nothing about the model."""
    return Status(status="ok")


@router.get("/ready", responses=documented_errors(503))
async def ready(services: ServicesDep) -> Status:
    """Requests are answered; 503 while the engine starts, restarts, drains or has failed, or the model is hashed."""
    services.check_ready()
    return Status(status="ready")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **documented_errors(401)},
)
async def metrics(request: Request, services: ServicesDep) -> Response:
    """Prometheus metrics. What each key has used is only in them for keys that may see that of all."""
    content = services.metrics.render(of_tenants=sees_all_usage(request.headers, services.accounts.keys))
    return Response(content, media_type=CONTENT_TYPE_LATEST)


@router.get("/load", responses=documented_errors(401))
async def load(services: ServicesDep) -> Load:
    """How many requests there are now, for routers that ask vLLM so."""
    return Load(server_load=services.timelines.num_awaited)


@router.get("/version")
async def version() -> Version:
    """The server's version."""
    return Version(version=__version__)


DIALECT = Dialect(router)
