"""The application before the replicas: refuses what they cannot serve together, and passes on everything else."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from copy import copy
from http import HTTPStatus

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.core import Metric
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from server.api.dialect import Dialect
from server.api.dialects import DIALECTS, by_path, short_paths
from server.config import Settings
from server.errors import ApiError
from server.http.auth import key_in, open_paths, owner_of, sees_all_usage
from server.http.body import IncomingBodies
from server.http.handshake import HandshakeMiddleware
from server.http.middleware import log_access, record_in, report, request_id_of
from server.http.origins import Origins, allow_origins, guarded
from server.http.responses import error_response, unless_gone
from server.ray.exchange import ForwardedRequest, Replicas, Taken
from server.ray.routing_fields import SHORT_BYTES, check_body, check_path, read_fields, session_of, unstored
from server.telemetry.metrics import Families, HttpRequests, exposition
from server.telemetry.request_trace import CLIENT_CLOSED, RequestTrace
from server.tenants.keys import KeyRing

_REPLICA_HEADER = "x-samewise-replica"
_FORM_MIB = 1.0
"""Size of a form without its file."""


class OwnAnswers:
    """Counts and logs what the ingress answers itself, mostly errors: no replica knows of these."""

    def __init__(self, name: str, prefix: str) -> None:
        """`name` is the label `replica` of its metrics; `prefix` that of all metrics' names."""
        self._name = name
        self._registry = CollectorRegistry()
        self._requests = HttpRequests(Families(prefix, ""), self._registry)

    def note(self, scope: Scope, dialect: Dialect, status: int) -> None:
        """Count a finished request; a stream that broke off has the status of its error."""
        route = _route(scope, dialect)
        record = record_in(scope)
        record.status = status
        self._requests.observe(scope["method"], route, status)
        log_access(scope, route, record)

    def metrics(self) -> tuple[str, list[Metric]]:
        """The name, and the counters."""
        return self._name, list(self._registry.collect())


def _route(scope: Scope, dialect: Dialect) -> str:
    """The path with names in place of ids, also of a route with other methods."""
    matches = [(route.matches(scope)[0].value, getattr(route, "path", "")) for route in dialect.router.routes]
    return max((match for match in matches if match[0] != Match.NONE.value), default=(0, "unmatched"))[1]


def create_front(replicas: Replicas, settings: Settings, *, has_many: bool, name: str = "ingress") -> Starlette:
    """The application. `has_many`: there may be several replicas, so nothing can be stored.

    `name` is the label `replica` of its own metrics. Raises KeysError and OSError if the configured API keys cannot be
    used.
    """
    front = Front(replicas, settings, OwnAnswers(name, settings.metrics_prefix), has_many=has_many)
    checked = guarded(front, settings.allowed_hosts, has_keys=settings.has_keys)
    app = Starlette(routes=[Route("/{path:path}", checked)])
    origins = Origins.of(settings.cors_origins, has_keys=settings.has_keys)
    allow_origins(app, origins, exposed=(_REPLICA_HEADER,))
    app.add_middleware(HandshakeMiddleware, origins=origins)  # replicas get no websockets, and say so
    return app


class Front:
    """Implements ASGI."""

    def __init__(self, replicas: Replicas, settings: Settings, own: OwnAnswers, *, has_many: bool) -> None:
        self._replicas = replicas
        self._settings = settings
        self._own = own
        self._bodies = IncomingBodies(max(settings.max_body_mib, settings.max_file_mib + _FORM_MIB))
        self._has_many = has_many
        self._keys = KeyRing(settings)
        self._open_paths = open_paths(settings)
        self._dialect_of = by_path(DIALECTS)
        self._paths = short_paths(DIALECTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix = scope.get("root_path", "")
        path = self._paths.full(scope["path"].removeprefix(prefix))
        dialect = self._dialect_of(path)
        state = {"record": RequestTrace(request_id_of(scope)), "error_writer": dialect.errors}
        scope = {**scope, "path": path, "root_path": _harmless(prefix, path), "state": state}
        send = _with_ids(scope, send)
        passing = _Passing(scope, send, dialect)
        try:
            if self._keys and path not in self._open_paths:
                owner_of(key_in(Headers(scope=scope)), self._keys)
            if path == "/metrics":
                await self._answer_metrics(scope, receive, send)
                self._own.note(scope, dialect, HTTPStatus.OK)
            else:
                await self._pass_on(scope, receive, passing)
        except ClientDisconnect:
            if not passing.was_taken:
                self._own.note(scope, dialect, CLIENT_CLOSED)
        except Exception as error:  # noqa: BLE001 - the last line of defence
            known = report(error, scope)
            try:
                if passing.has_begun:
                    await passing.break_off(known)
                else:
                    await error_response(known, scope)(scope, receive, send)
            finally:
                self._own.note(scope, dialect, known.status)

    async def _answer_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = merged([*await self._replicas.metrics(), self._own.metrics()])
        content = exposition(metrics, of_tenants=sees_all_usage(Headers(scope=scope), self._keys))
        await Response(content, media_type=CONTENT_TYPE_LATEST)(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, passing: "_Passing") -> None:
        request, path = Request(scope, receive), scope["path"]
        if self._has_many:
            check_path(path)
        content = await self._bodies.read(request, self._max_mib(path))
        session = ""
        if not _is_of_files(path):
            session_key = key_in(request.headers) if self._settings.isolate_keys else ""
            if len(content) > SHORT_BYTES:
                content, session = await asyncio.to_thread(self._route, path, content, session_key)
            else:
                content, session = self._route(path, content, session_key)
        forwarded = ForwardedRequest.of(scope, content, record_in(scope).request_id)
        answer = self._replicas.answer(forwarded, session)
        await unless_gone(request, passing.all_of(answer))

    def _route(self, path: str, content: bytes, key: str) -> tuple[bytes, str]:
        """The body for the replica, and its session. Raises InvalidRequestError."""
        fields = read_fields(content)
        if fields is None:
            return content, ""
        if self._has_many:
            check_body(path, fields)
            content = unstored(path, content, fields)
        return content, session_of(fields, key)

    def _max_mib(self, path: str) -> float:
        """Size of the largest body; the replica checks what is in it."""
        if _is_of_files(path):
            return self._settings.max_file_mib + _FORM_MIB
        return self._settings.max_body_mib


class _Passing:
    """An answer on its way to the client."""

    def __init__(self, scope: Scope, send: Send, dialect: Dialect) -> None:
        self._scope = scope
        self._send = send
        self._dialect = dialect
        self._replica = ""
        self._is_stream = False
        self._num_frames = 0
        self._is_over = False
        self.has_begun = False

    @property
    def was_taken(self) -> bool:
        """Whether a replica has the request."""
        return bool(self._replica)

    async def all_of(self, answer: AsyncGenerator[Taken | Message]) -> None:
        """Pass on the whole answer. Raises what the answer raises before its end."""
        try:
            async with aclosing(answer):
                async for message in answer:
                    await self._pass(message)
        except ApiError:
            if not self._is_over:
                raise

    async def break_off(self, error: ApiError) -> None:
        """End an answer that has begun: a stream gets the error, any other raises it, which ends the connection."""
        if not self._is_stream:
            raise error
        record_in(self._scope).stream_error = error.status
        end = self._dialect.stream_error(error, self._scope, self._num_frames)
        await self._send({"type": "http.response.body", "body": end, "more_body": False})

    async def _pass(self, message: Taken | Message) -> None:
        if isinstance(message, Taken):
            self._replica = message.replica
            return
        if message["type"] == "http.response.start":
            self._begin(message)
        else:
            self._num_frames += message.get("body", b"").count(b"\n\n")
            self._is_over = not message.get("more_body", False)
        await self._send(message)

    def _begin(self, message: Message) -> None:
        self.has_begun = True
        headers = MutableHeaders(scope=message)
        headers[_REPLICA_HEADER] = self._replica
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream")


def _with_ids(scope: Scope, send: Send) -> Send:
    """Add the request's id to answers, under OpenAI's name and Anthropic's."""
    request_id = record_in(scope).request_id
    is_known = Headers(scope=scope).get("x-request-id") == request_id

    async def send_with_ids(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["request-id"] = headers["x-request-id"] = request_id
            if is_known:
                del headers["x-request-id"]  # Ray gives every request an id, and sends it back by itself
        await send(message)

    return send_with_ids


def _harmless(prefix: str, path: str) -> str:
    """The prefix for links of pages; none if the router would strip it from the path once more."""
    return "" if f"{path}/".startswith(f"{prefix}/") else prefix


def _is_of_files(path: str) -> bool:
    """Whether the path takes uploads, which are large and not JSON."""
    return path.startswith("/v1/files")


def merged(of_replicas: Iterable[tuple[str, Sequence[Metric]]]) -> list[Metric]:
    """All replicas' metrics on one page, given pairs of a replica's name and its metrics; the name becomes a label."""
    families: dict[str, Metric] = {}
    for replica, metrics in of_replicas:
        for metric in metrics:
            family = families.setdefault(metric.name, _empty(metric))
            family.samples += [
                sample._replace(labels={**sample.labels, "replica": replica}) for sample in metric.samples
            ]
    return list(families.values())


def _empty(metric: Metric) -> Metric:
    family = copy(metric)
    family.samples = []
    return family
