"""Everything that can be refused or go wrong, as one exception tree. How it is written is a matter of each API.

ApiError
├── InvalidRequestError          400  malformed, out of range, unsupported
│   ├── ContextLengthError       400  more tokens than there is room for
│   ├── NotFoundError            404  unknown model, path or stored object
│   ├── MethodNotAllowedError    405
│   ├── BodyTooLargeError        413
│   ├── MediaTypeError           415
│   └── UpgradeError             426  there is nothing here but websockets
├── AuthenticationError          401
├── RateLimitError               429  the queue is full, or the storage of promised responses
│   └── LimitError               429  a key has used what it may use: RequestLimitError, TokenLimitError, QuotaError
├── InternalError                500  our fault
├── UnavailableError             503  starting, draining or failed
└── RequestTimeoutError          504  took longer than the server allows
"""

import math
from collections.abc import Mapping
from typing import ClassVar

RETRY_AFTER_S = 1.0


class ApiError(Exception):
    """Ends a request with an error. Raised anywhere below a route, turned into a response in one place."""

    status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    @property
    def headers(self) -> Mapping[str, str]:
        """Sent with the response: by default, that the same request would fail the same way."""
        return {"x-should-retry": "false"}


class InvalidRequestError(ApiError):
    """The request asks for something that cannot be done."""

    status = 400


class ContextLengthError(InvalidRequestError):
    """A text, or a text and the output after it, has more tokens than there is room for."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        num_tokens: int = 0,
        max_tokens: int | None = None,
        capacity: int = 0,
    ) -> None:
        """`num_tokens` are those of the text, or at least so many; `max_tokens` were asked for after it.

        An exception that comes from another process is made of its message first.
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
    """More bytes than the server was set up to read."""

    status = 413


class MediaTypeError(InvalidRequestError):
    """The body is not declared to be JSON, or a form where one is expected."""

    status = 415


class UpgradeError(InvalidRequestError):
    """The path opens a websocket, and the request is none or did not get here as one."""

    status = 426

    @property
    def headers(self) -> Mapping[str, str]:
        return {**super().headers, "Upgrade": "websocket", "Connection": "Upgrade"}


class AuthenticationError(ApiError):
    """No key, or a wrong one."""

    status = 401

    @property
    def headers(self) -> Mapping[str, str]:
        return {**super().headers, "WWW-Authenticate": "Bearer"}


class InternalError(ApiError):
    """Our fault. The log has the rest, under the request id that the client's message names."""

    def naming(self, request_id: str) -> "InternalError":
        """The same, with the id in its message."""
        message = f"{self.message.removesuffix('.')}. The request's id is {request_id}."
        return InternalError(message, param=self.param, code=self.code)


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
    """The server has as many requests as it can hold, or has promised as many responses as it can store."""

    # Raised for a full queue by `from_engine` in generation/run.py.

    status = 429


class LimitError(RateLimitError):
    """The owner of a key has used what it may use for now."""

    def __init__(self, message: str, *, wait_s: float | None) -> None:
        """`wait_s` is how long the same request would be refused, if nothing else is asked for; None: for ever."""
        super().__init__(message, code="rate_limit_exceeded")
        self._wait_s = wait_s

    @property
    def headers(self) -> Mapping[str, str]:
        if self._wait_s is None:
            return {"x-should-retry": "false"}
        wait = {"Retry-After": str(math.ceil(self._wait_s)), "retry-after-ms": str(math.ceil(self._wait_s * 1000))}
        return {**super().headers, **wait}


class RequestLimitError(LimitError):
    """The owner of the key has sent too many requests in a minute, or wants too many answers at a time."""


class TokenLimitError(LimitError):
    """The owner of the key has used too many tokens in a minute."""


class QuotaError(LimitError):
    """The owner of the key has used the tokens of the day."""

    def __init__(self, message: str, *, wait_s: float) -> None:
        super().__init__(message, wait_s=wait_s)
        self.code = "insufficient_quota"

    @property
    def headers(self) -> Mapping[str, str]:
        return {**super().headers, "x-should-retry": "false"}


class UnavailableError(_RetryableError):
    """The engine takes no work now."""

    status = 503


def unknown_model(model: str) -> NotFoundError:
    """OpenAI's words for a model that is not served here."""
    message = f"The model `{shorten(model)}` does not exist or you do not have access to it."
    return NotFoundError(message, param="model", code="model_not_found")


def shorten(text: str, limit: int = 64) -> str:
    """A client's text in a form that a message can repeat."""
    return text if len(text) <= limit else text[:limit] + "..."
