"""The exceptions that end a request with an error. Each API writes them in its own format.

ApiError
├── InvalidRequestError          400  malformed, out of range, unsupported
│   ├── ContextLengthError       400  more tokens than the context or a limit allows
│   ├── NotFoundError            404  unknown model, path or stored object
│   ├── MethodNotAllowedError    405
│   ├── BodyTooLargeError        413
│   ├── MediaTypeError           415
│   └── UpgradeError             426  the path accepts only websockets
├── AuthenticationError          401
├── ForbiddenError               403  the key may not do this
├── RateLimitError               429  the queue or the storage for background responses is full
│   └── LimitError               429  a key has reached a limit: RequestLimitError, TokenLimitError, QuotaError
├── InternalError                500  a fault of the server
├── NotImplementedHereError      501  an operation of another server that this one does not have
├── UnavailableError             503  the engine is starting, draining or failed
├── MisconfiguredError           503  the model cannot be served with its settings
└── RequestTimeoutError          504  took longer than the server allows
"""

import math
from collections.abc import Mapping
from typing import ClassVar

RETRY_AFTER_S = 1.0
SHUTTING_DOWN = "The server is shutting down."


class ApiError(Exception):
    """An error that ends a request. Raised anywhere below a route; `server.app` turns it into a response."""

    status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the response. By default they ask the client not to retry."""
        return {"x-should-retry": "false"}


class InvalidRequestError(ApiError):
    """The request is malformed, out of range or unsupported."""

    status = 400


class ContextLengthError(InvalidRequestError):
    """A text, or a prompt with its requested output, has more tokens than fit."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        num_tokens: int = 0,
        max_tokens: int | None = None,
        capacity: int = 0,
    ) -> None:
        """`num_tokens` is the length of the text or a lower bound of it; `max_tokens` is the requested output.

        All parameters but the message have defaults because unpickling calls this with the message alone.
        """
        super().__init__(message, param=param, code="context_length_exceeded")
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.capacity = capacity


class NotFoundError(InvalidRequestError):
    """There is no such path, model, or stored object."""

    status = 404


class MethodNotAllowedError(InvalidRequestError):
    """The path exists, but not with this method."""

    status = 405

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self._allow = allow

    @property
    def headers(self) -> Mapping[str, str]:
        return {**super().headers, "Allow": self._allow}


class BodyTooLargeError(InvalidRequestError):
    """The body has more bytes than the server accepts."""

    status = 413


class MediaTypeError(InvalidRequestError):
    """The body is not declared to be JSON, or a form where one is expected, or it is compressed."""

    status = 415


class UpgradeError(InvalidRequestError):
    """The path accepts only websockets, and the request is not a handshake or lost its upgrade on the way."""

    status = 426

    @property
    def headers(self) -> Mapping[str, str]:
        return {**super().headers, "Upgrade": "websocket", "Connection": "Upgrade"}


class AuthenticationError(ApiError):
    """The request has no API key, or an unknown one."""

    status = 401

    @property
    def headers(self) -> Mapping[str, str]:
        return {**super().headers, "WWW-Authenticate": "Bearer"}


class ForbiddenError(ApiError):
    """The request's key is known, and may not do this."""

    status = 403


class InternalError(ApiError):
    """A fault of the server. The client's message has the request id, under which the log has the details."""

    def with_request_id(self, request_id: str) -> "InternalError":
        """The error with the request id in its message."""
        message = f"{self.message.removesuffix('.')}. The request's id is {request_id}."
        return InternalError(message, param=self.param, code=self.code)


class NotImplementedHereError(ApiError):
    """The operation belongs to the API, and this server does not have it."""

    status = 501


class RequestTimeoutError(ApiError):
    """The answer took longer than `request_timeout_s`."""

    status = 504


class _RetryableError(ApiError):
    """The same request may succeed a little later."""

    @property
    def headers(self) -> Mapping[str, str]:
        return {
            "Retry-After": str(math.ceil(RETRY_AFTER_S)),
            "retry-after-ms": str(int(RETRY_AFTER_S * 1000)),
            "x-should-retry": "true",
        }


class RateLimitError(_RetryableError):
    """The engine's queue or the storage for background responses is full."""

    # Raised for a full queue by `from_engine` in generation/run.py.

    status = 429


class LimitError(RateLimitError):
    """A key has reached one of its limits."""

    def __init__(self, message: str, *, wait_s: float | None) -> None:
        """`wait_s` is the time until the same request would be accepted, without other requests; None: never."""
        super().__init__(message, code="rate_limit_exceeded")
        self._wait_s = wait_s

    @property
    def headers(self) -> Mapping[str, str]:
        if self._wait_s is None:
            return {"x-should-retry": "false"}
        wait = {"Retry-After": str(math.ceil(self._wait_s)), "retry-after-ms": str(math.ceil(self._wait_s * 1000))}
        return {**super().headers, **wait}


class RequestLimitError(LimitError):
    """The key has sent too many requests in a minute, or has too many choices in flight."""


class TokenLimitError(LimitError):
    """The key has used too many tokens in a minute."""


class QuotaError(LimitError):
    """The key has used its tokens of the day."""

    def __init__(self, message: str, *, wait_s: float) -> None:
        super().__init__(message, wait_s=wait_s)
        self.code = "insufficient_quota"

    @property
    def headers(self) -> Mapping[str, str]:
        return {**super().headers, "x-should-retry": "false"}


class UnavailableError(_RetryableError):
    """The engine accepts no work now."""

    status = 503


class MisconfiguredError(ApiError):
    """The model cannot be served with its settings, so that retries are in vain."""

    status = 503

    @property
    def headers(self) -> Mapping[str, str]:
        return {"x-should-retry": "false"}


def unknown_model(model: str) -> NotFoundError:
    """The error for a model that is not served, in OpenAI's words."""
    message = f"The model `{shorten(model)}` does not exist or you do not have access to it."
    return NotFoundError(message, param="model", code="model_not_found")


def shorten(text: str, limit: int = 64) -> str:
    """A client's text, cut to `limit` characters so that a message can repeat it."""
    return text if len(text) <= limit else text[:limit] + "..."
