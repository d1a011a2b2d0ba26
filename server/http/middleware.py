"""Around every request: its ids, its access line, and an answer also when our own code fails. Pure ASGI."""

import http
import logging
import re
import time
from collections.abc import Callable, Mapping

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, InternalError
from server.http.disconnect import ClientTooSlowError
from server.http.request_id import new_request_id
from server.http.responses import ErrorWriter, error_response
from server.telemetry.metrics import Metrics
from server.telemetry.request_trace import RequestTrace, Sender

_ID_PATTERN = re.compile(r"[A-Za-z0-9._\-]{1,128}")
_MAX_TRACE_CONTEXT = 512
"""Characters of each header, which is what everyone must pass on."""
_PROBES = frozenset({"/health", "/ready", "/ping", "/metrics", "/load"})
"""Asked every few seconds by machines: logged at the debug level, as are requests in the background."""
_access = logging.getLogger("samewise.access")
_errors = logging.getLogger("samewise.http")


def record_of(request: Request) -> RequestTrace:
    """The record that the middleware made for this request."""
    return record_in(request.scope)


def record_in(scope: Scope) -> RequestTrace:
    """The same, for whoever has only the scope."""
    record = scope["state"]["record"]
    assert isinstance(record, RequestTrace)
    return record


def sender_of(request: Request) -> Sender:
    """Whom a request is from: a key's owner, else an address."""
    record = record_of(request)
    address = request.client.host if request.client is not None else ""
    return Sender(record.client or address, record.is_background)


def report(error: Exception, scope: Scope) -> ApiError:
    """See `report_of`."""
    record = record_in(scope)
    is_quiet = record.is_background or scope["path"] in _PROBES
    return report_of(error, record, logging.DEBUG if is_quiet else logging.WARNING)


def report_of(error: Exception, record: RequestTrace, level: int = logging.WARNING) -> ApiError:
    """What the client is told of the error that ends its request. The server's own faults leave a line in the log.

    Whatever is no ApiError is a bug: the log gets its trace, the client the id under which it is found there. `level`
    is that of the line for what passes by itself.
    """
    record.error = type(error).__name__
    if not isinstance(error, ApiError):
        _errors.error("unhandled exception", extra=record.ids, exc_info=error)
        return InternalError("The server had an error while processing your request.").naming(record.request_id)
    if isinstance(error, InternalError):
        _errors.error("request failed: %s", error.message, extra=record.ids)
        return error.naming(record.request_id)
    if error.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
        _errors.log(level, "request failed: %s", error.message, extra=record.ids)
    return error


class RequestMiddleware:
    """Around all but CORS: gives requests their ids, answers 500 for an exception that nobody handled, logs a line."""

    def __init__(self, app: ASGIApp, metrics: Metrics, error_writers: Callable[[str], ErrorWriter]) -> None:
        """`error_writers` knows what writes the errors of a path."""
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
        except (ClientDisconnect, ClientTooSlowError) as error:
            record.error = type(error).__name__
            _errors.info("client gone", extra={**record.ids, "reason": type(error).__name__})
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
    """The line of a request that is over; `route` is its path with the names of what varies."""
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
            "tokens_in": record.tokens_in,
            "tokens_out": record.tokens_out,
            "ttft_s": record.ttft_s,
            "duration_s": time.perf_counter() - record.started,
            "prompt": record.prompt,
            "output": record.output,
        },
    )


def _trace_context(scope: Scope) -> Mapping[str, str]:
    """What the client says of the trace that the request belongs to (W3C Trace Context): `tracestate` may come in
    several headers. What is too long, or not printable ASCII, is left out.
    """
    headers = Headers(scope=scope)
    sent = {name: ",".join(headers.getlist(name)) for name in ("traceparent", "tracestate")}
    return {name: value for name, value in sent.items() if value and _can_be_told(value)}


def _can_be_told(value: str) -> bool:
    return len(value) <= _MAX_TRACE_CONTEXT and value.isascii() and value.isprintable()


def request_id_of(scope: Scope) -> str:
    """The client's own id where it sent one that can stand in a header and a log line, otherwise a new one."""
    sent = Headers(scope=scope).get("x-request-id", "")
    return sent if _ID_PATTERN.fullmatch(sent) else new_request_id()
