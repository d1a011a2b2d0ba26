"""The HTTP application: wires the endpoints to an engine, a tokenizer and the settings."""

import asyncio
import http
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from sse_starlette.sse import AppStatus
from starlette.exceptions import HTTPException

from server import __version__
from server.api.body_worker import WorkerPool
from server.api.dialect import Dialect
from server.api.dialects import DIALECTS, by_path, error_writers, short_paths, websocket_paths
from server.api.jobs import Jobs
from server.api.model_services import ModelParts, ModelServices
from server.api.openapi import install_openapi
from server.api.responses.stream import RunningResponses
from server.api.responses.websocket import Websockets
from server.api.services import ServedModels, Services
from server.config import Settings
from server.errors import (
    ApiError,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
)
from server.generation.image_room import ImageRoom
from server.http.auth import AuthMiddleware, open_paths
from server.http.body import IncomingBodies
from server.http.handshake import HandshakeMiddleware
from server.http.loopback import Loopback
from server.http.middleware import HeadMiddleware, RequestMiddleware, ShortPathMiddleware, report
from server.http.origins import Origins, allow_origins
from server.http.responses import error_response
from server.http.root_path import RootPathMiddleware
from server.storage.files import FileStore
from server.storage.storage import Storage
from server.storage.usage import UsageTable
from server.telemetry.metrics import ServerMetrics
from server.tenants.accounts import Accounts, UsageBook, today
from server.tenants.keys import KeyRing
from server.tenants.rate_limits import RateLimits
from server.tenants.usage_counters import UsageCounters

_DESCRIPTION = (
    "An OpenAI-compatible API. Every parameter is honoured exactly, or refused with an error that names it. Hints that "
    "do not apply are ignored and reported. The same request gives the same answer, whatever else the server is doing."
)

_logger = logging.getLogger("samewise.keys")

if TYPE_CHECKING:
    from server.telemetry.traces import Traces


def create_app(
    models: Sequence[ModelParts],
    settings: Settings,
    dialects: Sequence[Dialect] = DIALECTS,
    *,
    workers: WorkerPool | None = None,
) -> FastAPI:
    """Make the application. Requests get 503 until their model's engine is ready.

    The first of the `models` is the default; `dialects` are the supported APIs. `workers` check costly bodies, and are
    closed by the caller; None: the application has workers of its own. The caller starts and stops the engines.

    Raises OSError or ValueError if the API keys or the model's configuration cannot be read, or a setting names
    something that does not exist.
    """
    app = FastAPI(
        title="Samewise",
        version=__version__,
        description=_DESCRIPTION,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
    )
    services = app.state.services = _services(app, models, settings, workers)
    app.state.dialects = dialects
    app.state.dialect_of = by_path(dialects)
    app.state.websockets = dict.fromkeys(websocket_paths(dialects), services.bodies.max_bytes)
    app.add_middleware(RootPathMiddleware, root_path=settings.root_path)
    app.add_middleware(AuthMiddleware, accounts=services.accounts, open_paths=open_paths(settings))
    app.add_middleware(HeadMiddleware)
    app.add_middleware(RequestMiddleware, metrics=services.metrics, error_writers=error_writers(dialects))
    app.add_middleware(ShortPathMiddleware, paths=short_paths(dialects))
    origins = Origins.of(settings.cors_origins, has_keys=settings.has_keys)
    allow_origins(app, origins)  # around all other middleware
    app.add_middleware(HandshakeMiddleware, origins=origins)  # added last: outermost
    for dialect in dialects:
        app.include_router(dialect.router)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    install_openapi(app, dialects)
    # The engine lets running streams finish on SIGTERM; the SSE library would cut them off.
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    return app


def _services(
    app: FastAPI, parts: Sequence[ModelParts], settings: Settings, shared_workers: WorkerPool | None
) -> Services:
    """Make the services of the application. Raises OSError or ValueError, as `create_app` does."""
    workers = shared_workers or WorkerPool()
    keys = KeyRing(settings)
    storage = Storage(
        settings.data_dir, int(settings.max_stored_mib * (1 << 20)), weight_of=lambda client: keys.named(client).weight
    )
    traces = _traces(settings, keys)
    observers = [] if traces is None else [traces.observe]
    is_only = len(parts) == 1 and len(settings.models) < 2  # a replica on Ray has one of several
    models = ServedModels([ModelServices.make(one, workers, observers, is_only=is_only) for one in parts])
    residence = models.default.residence
    bodies = IncomingBodies(settings.body_mib(takes_images=any(one.model.images is not None for one in models)))
    accounts = _accounts(settings, keys, UsageBook(storage))
    if unknown := keys.models.difference(models.names, *(entry.names for entry in settings.models)):
        _logger.warning("The keys file names models that are not served: %s.", ", ".join(sorted(unknown)))
    return Services(
        models=models,
        settings=settings,
        metrics=ServerMetrics(settings.metrics_prefix, residence.shared),
        bodies=bodies,
        storage=storage,
        jobs=Jobs(),
        accounts=accounts,
        loopback=Loopback(app),
        websockets=Websockets(bodies.max_bytes, int(settings.max_stored_mib * (1 << 20))),
        responses=RunningResponses(),
        image_room=ImageRoom(),
        files=_file_store(settings, storage),
        traces=traces,
        own_workers=None if shared_workers else workers,
    )


def _accounts(settings: Settings, keys: KeyRing, usage: UsageBook) -> Accounts:
    """Raises ValueError if Redis cannot be used."""
    redis_url = None if settings.redis_url is None else settings.redis_url.get_secret_value()
    return Accounts(keys, RateLimits(UsageCounters(redis_url)), usage)


def _file_store(settings: Settings, storage: Storage) -> FileStore | None:
    if settings.data_dir is None:
        return None
    return FileStore(settings.data_dir, storage, int(settings.max_files_mib * (1 << 20)))


def _traces(settings: Settings, keys: KeyRing) -> "Traces | None":
    """Raises ValueError if OpenTelemetry is not installed."""
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        from server.telemetry.traces import Traces  # noqa: PLC0415  (OpenTelemetry need not be installed)
    except ImportError:
        raise ValueError("otlp_traces_endpoint needs `pip install 'samewise[traces]'`.") from None
    return Traces(settings.otlp_traces_endpoint, lambda name: keys.named(name).label)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    await services.accounts.limits.remember(
        await services.storage.on(UsageTable, lambda table: table.tokens_of_day(today()))
    )
    for dialect in app.state.dialects:
        if dialect.resume is not None:
            services.jobs.spawn(await dialect.resume(services))
    for served in services.models:
        services.jobs.spawn(served.warm_up)
    yield
    await services.jobs.close()
    for served in services.models:
        served.body_worker.close()
    if services.own_workers is not None:
        await asyncio.to_thread(services.own_workers.close)
    await services.accounts.close()
    if services.files is not None:
        await asyncio.to_thread(services.files.close)
    await asyncio.to_thread(services.storage.close)
    if services.traces is not None:
        await asyncio.to_thread(services.traces.close)


async def _on_api_error(request: Request, error: Exception) -> Response:
    return error_response(report(error, request.scope), request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an error of the framework itself, mostly an unknown path or method."""
    assert isinstance(error, HTTPException)
    known = _from_framework(error, request.method, request.url.path)
    return error_response(report(known, request.scope), request.scope)


def _from_framework(error: HTTPException, method: str, path: str) -> ApiError:
    if error.status_code == http.HTTPStatus.NOT_FOUND:
        return NotFoundError(f"Unknown request URL: {method} {path}.", code="unknown_url")
    if error.status_code == http.HTTPStatus.METHOD_NOT_ALLOWED:
        headers: Mapping[str, str] = error.headers or {}
        return MethodNotAllowedError(f"Not allowed to {method} on {path}.", headers.get("Allow", ""))
    if error.status_code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
        return InvalidRequestError(str(error.detail))
    return InternalError(str(error.detail))
