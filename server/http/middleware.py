"""Pure ASGI middleware for every request: ids, the access log, unhandled exceptions, HEAD and short paths."""

import http
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, InternalError
from server.http.connection import new_request_id
from server.http.responses import ErrorWriter, error_response
from server.telemetry.metrics import ServerMetrics
from server.telemetry.request_trace import RequestTrace, Sender

_ID_PATTERN = re.compile(r"[A-Za-z0-9._\-]{1,128}")
_MAX_TRACE_CONTEXT = 512
"""The longest trace header in characters. W3C Trace Context asks servers to pass on at least this many."""
_PROBES = frozenset({"/health", "/ready", "/ping", "/metrics", "/load"})
"""Paths that machines poll every few seconds: logged at the debug level, as background requests are."""
_VERSION = "/v1"
_access = logging.getLogger("samewise.access")
_errors = logging.getLogger("samewise.http")


def record_of(request: Request) -> RequestTrace:
    """The record that the middleware made for this request."""
    return record_in(request.scope)


def record_in(scope: Scope) -> RequestTrace:
    """The record that the middleware made for the request of this scope."""
    record = scope["state"]["record"]
    assert isinstance(record, RequestTrace)
    return record


def sender_of(request: Request) -> Sender:
    """The sender of a request: a key's owner, otherwise an address."""
    record = record_of(request)
    address = request.client.host if request.client is not None else ""
    return Sender(record.client or address, record.is_background, record.date)


def report(error: Exception, scope: Scope) -> ApiError:
    """Log an error that ends a request, and return the error that the client gets."""
    record = record_in(scope)
    is_quiet = record.is_background or scope["path"] in _PROBES
    return report_of(error, record, logging.DEBUG if is_quiet else logging.WARNING)


def report_of(error: Exception, record: RequestTrace, level: int = logging.WARNING) -> ApiError:
    """Return the error that the client gets, and log it if the server is at fault.

    Any exception but an ApiError is a bug: the log gets its traceback, and the client the request id to search the log
    for. `level` is the log level of temporary errors (503 and 504).
    """
    record.error = type(error).__name__
    if not isinstance(error, ApiError):
        _errors.error("unhandled exception", extra=record.ids, exc_info=error)
        known = InternalError("The server had an error while processing your request.")
        return known.with_request_id(record.request_id)
    if isinstance(error, InternalError):
        _errors.error("request failed: %s", error.message, extra=record.ids)
        return error.with_request_id(record.request_id)
    if error.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
        _errors.log(level, "request failed: %s", error.message, extra=record.ids)
    return error


class RequestMiddleware:
    """Gives each request an id, answers 500 for an unhandled exception, and logs the request."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, error_writers: Callable[[str], ErrorWriter]) -> None:
        """`error_writers` maps a path to the function that writes its errors."""
        self._app = app
        self._metrics = metrics
        self._error_writers = error_writers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        record = state.setdefault("record", None) or RequestTrace(request_id_of(scope))
        record.path, record.trace_context = scope["path"], _trace_context(scope)
        state.update(record=record, error_writer=self._error_writers(scope["path"]))
        response_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal response_started
            if message["type"] == "http.response.start":
                response_started = True
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = record.request_id  # OpenAI's and Anthropic's name
                headers.update(record.headers)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            record.error = ClientDisconnect.__name__
            _errors.info("client disconnected", extra=record.ids)
        except Exception as error:  # noqa: BLE001 - the last line of defence
            known = report(error, scope)
            if not response_started:
                await error_response(known, scope)(scope, receive, send_with_id)
        finally:
            self._finish(scope, record)

    def _finish(self, scope: Scope, record: RequestTrace) -> None:
        matched = scope.get("route")
        route = matched.path if isinstance(matched, Route) else "unmatched"
        self._metrics.observe_http(scope["method"], route, record.status)
        log_access(scope, route, record)
        record.answered()


def log_access(scope: Scope, route: str, record: RequestTrace) -> None:
    """Log a finished request; `route` is its path with names in place of ids."""
    _access.log(
        logging.DEBUG if route in _PROBES or record.is_background else logging.INFO,
        "%s %s %d",
        scope["method"],
        scope["path"],
        record.status,
        extra={
            **record.ids,
            "route": route,
            "status": record.status,
            "stream_error": record.stream_error,
            "model": record.model,
            "tokens_in": record.tokens_in,
            "tokens_out": record.tokens_out,
            "ttft_s": record.ttft_s,
            "duration_s": time.perf_counter() - record.started,
            "prompt": record.prompt,
            "output": record.output,
        },
    )


def _trace_context(scope: Scope) -> Mapping[str, str]:
    """The request's W3C Trace Context, without values that are too long or not printable ASCII.

    `tracestate` may come in several headers.
    """
    headers = Headers(scope=scope)
    sent = {name: ",".join(headers.getlist(name)) for name in ("traceparent", "tracestate")}
    return {name: value for name, value in sent.items() if value and _is_harmless(value)}


def _is_harmless(value: str) -> bool:
    return len(value) <= _MAX_TRACE_CONTEXT and value.isascii() and value.isprintable()


def request_id_of(scope: Scope) -> str:
    """The client's own id if it is fit for a header and a log line, otherwise a new one."""
    sent = Headers(scope=scope).get("x-request-id", "")
    return sent if _ID_PATTERN.fullmatch(sent) else new_request_id()


class HeadMiddleware:
    """Answers HEAD, which monitors send to probes, as GET without the body: routes support only GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        get_scope = {**scope, "method": "GET"}
        try:
            await self._app(get_scope, receive, send_head)
        finally:
            scope["route"] = get_scope.get("route")  # for the access log


class ShortPaths:
    """Completes paths of clients whose base URL lacks /v1: `/chat/completions` becomes `/v1/chat/completions`.

    A path is never completed if the API has a path outside /v1 with the same first segment.
    """

    def __init__(self, routes: Iterable[str]) -> None:
        """`routes` are the paths of all routes."""
        paths = tuple(routes)
        below = {_first(path.removeprefix(_VERSION)) for path in paths if path.startswith(f"{_VERSION}/")}
        self._short = below.difference(map(_first, paths))

    def full(self, path: str) -> str:
        """The full path of the route that `path` means."""
        return _VERSION + path if _first(path) in self._short else path


class ShortPathMiddleware:
    """Serves short paths as if the client had sent the full ones.

    It surrounds all middleware that reads paths: keys, limits, logs, metrics and errors see only full paths.
    """

    def __init__(self, app: ASGIApp, paths: ShortPaths) -> None:
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            path = self._paths.full(scope["path"])
            if path != scope["path"]:
                scope = {**scope, "path": path, "raw_path": None}
        await self._app(scope, receive, send)


def _first(path: str) -> str:
    """The first segment of a path."""
    return path.partition("/")[2].partition("/")[0]
