"""The ingress's application: refuses requests that several replicas cannot serve, and forwards all others to them."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass
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
from server.http.event_stream import EVENT_STREAM, NDJSON
from server.http.handshake import HandshakeMiddleware
from server.http.middleware import log_access, record_in, report, request_id_of
from server.http.origins import Origins, allow_origins, guarded
from server.http.responses import error_response, unless_gone
from server.ray.exchange import Accepted, ForwardedRequest
from server.ray.models import ModelReplicas, RoutedModels, asked_name, metrics_of
from server.ray.routing_fields import SHORT_BYTES, check_body, check_path, read_fields, session_of, unstored
from server.telemetry.metrics import Families, HttpRequests, exposition
from server.telemetry.request_trace import CLIENT_CLOSED, RequestTrace
from server.tenants.keys import KeyRing, Tenant

_REPLICA_HEADER = "x-samewise-replica"
_STREAMS = (EVENT_STREAM, NDJSON)
"""Content types of streams."""
_FORM_MIB = 1.0
"""Maximum size of a multipart form without its file."""


class IngressRequests:
    """Counts and logs the requests that the ingress answers itself, mostly with errors."""

    def __init__(self, name: str, prefix: str) -> None:
        """`name` is the value of the label `replica`; `prefix` is the prefix of all metrics' names."""
        self._name = name
        self._registry = CollectorRegistry()
        self._requests = HttpRequests(Families(prefix, ""), self._registry)

    def note(self, scope: Scope, dialect: Dialect, status: int) -> None:
        """Count a finished request; for a stream that failed, `status` is its error's."""
        route = _route(scope, dialect)
        record = record_in(scope)
        record.status = status
        self._requests.observe(scope["method"], route, status)
        log_access(scope, route, record)

    def metrics(self) -> tuple[str, list[Metric]]:
        """The value of the label `replica`, and the counters."""
        return self._name, list(self._registry.collect())


def _route(scope: Scope, dialect: Dialect) -> str:
    """The route's path template, such as /v1/models/{model}, even if the method is not allowed."""
    matches = [(route.matches(scope)[0].value, getattr(route, "path", "")) for route in dialect.router.routes]
    return max((match for match in matches if match[0] != Match.NONE.value), default=(0, "unmatched"))[1]


def create_front(
    models: Sequence[ModelReplicas], settings: Settings, *, has_many: bool, name: str = "ingress"
) -> Starlette:
    """Build the ingress's application. The first of the models is the default.

    `has_many` means that there may be several replicas, so that nothing can be stored. `name` is the value of the label
    `replica` in the ingress's own metrics. Raises KeysError and OSError if the configured API keys cannot be used.
    """
    front = Front(models, settings, IngressRequests(name, settings.metrics_prefix), has_many=has_many)
    checked = guarded(front, settings.allowed_hosts, has_keys=settings.has_keys)
    app = Starlette(routes=[Route("/{path:path}", checked)])
    origins = Origins.of(settings.cors_origins, has_keys=settings.has_keys)
    allow_origins(app, origins, exposed=(_REPLICA_HEADER,))
    app.add_middleware(HandshakeMiddleware, origins=origins)  # websockets are refused, they cannot be forwarded
    return app


class Front:
    """ASGI application that authenticates and forwards requests, and merges answers that concern all replicas."""

    def __init__(
        self, models: Sequence[ModelReplicas], settings: Settings, own: IngressRequests, *, has_many: bool
    ) -> None:
        self._models = RoutedModels(models)
        self._settings = settings
        self._own = own
        self._bodies = IncomingBodies(max(settings.body_mib(takes_images=True), settings.max_file_mib + _FORM_MIB))
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
        scope = {**scope, "path": path, "root_path": _root_path_for_links(prefix, path), "state": state}
        send = _with_ids(scope, send)
        forwarded_answer = _ForwardedAnswer(scope, send, dialect)
        try:
            tenant = self._owner(scope)
            if path == "/metrics":
                await self._answer_metrics(tenant, scope, receive, send)
                self._own.note(scope, dialect, HTTPStatus.OK)
            elif self._models.concerns_all(scope):
                request = Request(scope, receive)
                await self._bodies.read(request, self._max_mib(path))
                answer = await unless_gone(request, self._models.answer(scope, self._models.of(tenant)))
                await answer(scope, receive, send)
                self._own.note(scope, dialect, HTTPStatus.OK)
            else:
                await self._forward(tenant, scope, receive, forwarded_answer)
        except ClientDisconnect:
            if not forwarded_answer.was_accepted:
                self._own.note(scope, dialect, CLIENT_CLOSED)
        except Exception as error:  # noqa: BLE001 - the last line of defence
            known = report(error, scope)
            try:
                if forwarded_answer.has_begun:
                    await forwarded_answer.end_with(known)
                else:
                    await error_response(known, scope)(scope, receive, send)
            finally:
                self._own.note(scope, dialect, known.status)

    def _owner(self, scope: Scope) -> Tenant | None:
        """The owner of the request's key; None if none is required. Raises AuthenticationError."""
        if not self._keys or scope["path"] in self._open_paths:
            return None
        owner = owner_of(key_in(Headers(scope=scope)), self._keys)
        record_in(scope).client = owner.name
        return owner

    async def _answer_metrics(self, tenant: Tenant | None, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = merged([*await metrics_of(self._models.of(tenant)), self._own.metrics()])
        content = exposition(metrics, of_tenants=sees_all_usage(Headers(scope=scope), self._keys))
        await Response(content, media_type=CONTENT_TYPE_LATEST)(scope, receive, send)

    async def _forward(
        self, tenant: Tenant | None, scope: Scope, receive: Receive, forwarded_answer: "_ForwardedAnswer"
    ) -> None:
        request, path = Request(scope, receive), scope["path"]
        if self._has_many:
            check_path(path)
        routed = _Routed(await self._bodies.read(request, self._max_mib(path)), asked_name(scope, None))
        if not _is_of_files(path):
            session_key = key_in(request.headers) if self._settings.isolate_keys else ""
            if len(routed.content) > SHORT_BYTES:
                routed = await asyncio.to_thread(self._route, scope, routed, session_key)
            else:
                routed = self._route(scope, routed, session_key)
        model = self._models.named(routed.model, path, self._models.of(tenant))
        forwarded = ForwardedRequest.of(scope, routed.content, record_in(scope).request_id)
        answer = model.replicas.answer(forwarded, routed.session)
        await unless_gone(request, forwarded_answer.all_of(answer))

    def _route(self, scope: Scope, routed: "_Routed", key: str) -> "_Routed":
        """The request with what its body says. Raises InvalidRequestError."""
        content = routed.content
        fields = read_fields(content)
        if fields is None:
            return routed
        if self._has_many:
            check_body(scope["path"], fields)
            content = unstored(scope["path"], content, fields)
        return _Routed(content, asked_name(scope, fields), session_of(fields, key))

    def _max_mib(self, path: str) -> float:
        """Maximum body size; the replica checks the content."""
        if _is_of_files(path):
            return self._settings.max_file_mib + _FORM_MIB
        return self._settings.body_mib(takes_images=True)


@dataclass(frozen=True, slots=True)
class _Routed:
    """A request on its way to a replica."""

    content: bytes
    """The body for the replica."""
    model: str | None
    """The name of a model in the request."""
    session: str = ""


class _ForwardedAnswer:
    """An answer that is being forwarded to the client."""

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
    def was_accepted(self) -> bool:
        """Whether a replica has accepted the request."""
        return bool(self._replica)

    async def all_of(self, answer: AsyncGenerator[Accepted | Message]) -> None:
        """Forward the whole answer. Raises the ApiError of an answer that is incomplete."""
        try:
            async with aclosing(answer):
                async for message in answer:
                    await self._pass(message)
        except ApiError:
            if not self._is_over:
                raise

    async def end_with(self, error: ApiError) -> None:
        """End an answer that has begun: send the error in a stream, otherwise raise it, which closes the connection."""
        if not self._is_stream:
            raise error
        record_in(self._scope).stream_error = error.status
        end = self._dialect.stream_error(error, self._scope, self._num_frames)
        await self._send({"type": "http.response.body", "body": end, "more_body": False})

    async def _pass(self, message: Accepted | Message) -> None:
        if isinstance(message, Accepted):
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
        self._is_stream = headers.get("content-type", "").startswith(_STREAMS)


def _with_ids(scope: Scope, send: Send) -> Send:
    """Add the request id to answers, in OpenAI's and Anthropic's headers."""
    request_id = record_in(scope).request_id
    is_known = Headers(scope=scope).get("x-request-id") == request_id

    async def send_with_ids(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["request-id"] = headers["x-request-id"] = request_id
            if is_known:
                del headers["x-request-id"]  # Ray adds this header itself
        await send(message)

    return send_with_ids


def _root_path_for_links(prefix: str, path: str) -> str:
    """The root path for links in pages; empty if the router would strip it from the path again."""
    return "" if f"{path}/".startswith(f"{prefix}/") else prefix


def _is_of_files(path: str) -> bool:
    """Whether the path accepts uploads, which are large and not JSON."""
    return path.startswith("/v1/files")


def merged(of_replicas: Iterable[tuple[str, Sequence[Metric]]]) -> list[Metric]:
    """Merge pairs of a replica's name and its metrics; the name becomes the label `replica`."""
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
