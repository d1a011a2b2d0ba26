"""HTTP client for an OpenAI-compatible server and for Samewise's own endpoints."""

import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar
from urllib.parse import urlencode

import httpx
import msgspec

from server.client.certificates import trusted_certificates
from server.client.openai_answers import (
    UNREADABLE,
    AnswerError,
    Chunk,
    ChunkParser,
    error_message,
    headers,
    without_password,
)
from server.page.capabilities import Capabilities
from server.page.models import ModelCard, ModelCards

_CONNECT_S = 10.0
_SHORT_S = 10.0
"""Timeout of requests that need no model."""
_NO_KEY = 401
_FORBIDDEN = 403
_SERVER_ERROR = 500
T = TypeVar("T")


class ApiError(Exception):
    """The server did not answer, or refused the request. The message is the server's, if it sent one."""

    def __init__(self, message: str, status: int | None = None, param: str | None = None) -> None:
        """`status` is None if no server answered; `param` is the path of the invalid field."""
        super().__init__(message)
        self.status = status
        self.param = param

    @property
    def wants_key(self) -> bool:
        return self.status in (_NO_KEY, _FORBIDDEN)


class UnexpectedAnswerError(ApiError):
    """The server answered with 200, but the body is not what the endpoint should return."""


def can_be_sent(key: str) -> bool:
    """Whether this key can be sent in a header."""
    return key.isascii() and key.isprintable()


class ImageSize(msgspec.Struct):
    """An image of a prompt."""

    num_tokens: int


class PromptSize(msgspec.Struct):
    """The tokens of a prompt."""

    count: int
    images: Sequence[ImageSize] = ()


class Api:
    """Client shared by all pages. Each call takes its page's key (empty for none) and may raise ApiError."""

    def __init__(self, base_url: str, trusted: ssl.SSLContext | None = None) -> None:
        """`base_url` ends with the version, as in http://127.0.0.1:8000/v1; `trusted` has the server's certificate."""
        self.base_url = base_url
        self.server_url = base_url.removesuffix("/v1")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self._client = httpx.AsyncClient(
            verify=trusted or trusted_certificates(),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=limits,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def models(self, key: str) -> list[ModelCard]:
        """The models that the server lists, under each of their names."""
        return (await self._get("/models", key, ModelCards)).data or []

    async def load(self, model: str, key: str) -> None:
        """Load a model; returns when it is loaded."""
        with _problems(self.server_url):
            body = {"model": model}
            _accepted(await self._client.post(f"{self.base_url}/models/load", json=body, headers=headers(key)))

    async def capabilities(self, key: str, model: str | None = None) -> Capabilities | None:
        """The answer of /v1/capabilities; None if the server has no such endpoint, or a different one."""
        query = "" if model is None else f"?{urlencode({'model': model})}"
        try:
            return await self._get(f"/capabilities{query}", key, Capabilities)
        except UnexpectedAnswerError:
            return None
        except ApiError as problem:
            if problem.status is None or problem.status == _NO_KEY or problem.status >= _SERVER_ERROR:
                raise
            return None

    async def get(self, path: str, key: str) -> dict[str, Any]:
        """The JSON object at a path below the base URL."""
        return await self._get(path, key, dict[str, Any])

    async def prompt_size(self, body: Mapping[str, Any], key: str) -> PromptSize | None:
        """The size of the prompt that a server makes of messages; None if it cannot tell."""
        with _problems(self.server_url):
            response = await self._client.post(f"{self.server_url}/tokenize", json=dict(body), headers=headers(key))
        try:
            return msgspec.json.decode(response.content, type=PromptSize) if response.status_code == 200 else None
        except UNREADABLE:
            return None

    async def version(self) -> str:
        """The server's version; empty if it does not report one."""
        try:
            response = await self._request(f"{self.server_url}/version", "")
            return msgspec.json.decode(response.content, type=_Version).version
        except UNREADABLE:
            return ""

    async def metrics(self, key: str) -> str:
        """The text of /metrics."""
        return _accepted(await self._request(f"{self.server_url}/metrics", key)).text

    @asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any], key: str) -> AsyncIterator[AsyncIterator[Chunk]]:
        """The chunks of a streamed answer. Leaving the context aborts the request."""
        with _problems(self.server_url):
            async with self._client.stream(
                "POST", f"{self.base_url}{path}", json=dict(body), headers=headers(key)
            ) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
                yield _chunks(response, self.server_url)

    async def _get(self, path: str, key: str, kind: type[T]) -> T:
        response = _accepted(await self._request(f"{self.base_url}{path}", key))
        try:
            return msgspec.json.decode(response.content, type=kind)
        except UNREADABLE as error:
            raise UnexpectedAnswerError(f"The server's answer to {path} cannot be read: {error}") from None

    async def _request(self, url: str, key: str) -> httpx.Response:
        with _problems(self.server_url):
            return await self._client.get(url, headers=headers(key), timeout=_SHORT_S)


async def _chunks(response: httpx.Response, server_url: str) -> AsyncIterator[Chunk]:
    """Decode a stream. Raises ApiError for an error event, and if the stream ends too early."""
    parser = ChunkParser()
    with _problems(server_url):
        async for data in response.aiter_bytes():
            for chunk in parser.feed(data):
                yield chunk
            if parser.is_done:
                return
    raise ApiError("The server closed the connection before the answer was complete.")


def _accepted(response: httpx.Response) -> httpx.Response:
    if response.status_code != 200:
        raise _refusal(response.status_code, response.content)
    return response


def _refusal(status: int, body: bytes) -> ApiError:
    try:
        param = msgspec.json.decode(body, type=_Refusal).error.param
    except UNREADABLE:
        param = None
    return ApiError(error_message(body), status, param)


class _Version(msgspec.Struct):
    version: str = ""


class _Error(msgspec.Struct):
    param: str | None = None


class _Refusal(msgspec.Struct):
    error: _Error


@contextmanager
def _problems(server_url: str) -> Iterator[None]:
    """Turn connection errors into ApiError with a message for the user."""
    server_url = without_password(server_url)
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise ApiError(f"No server answers at {server_url}.") from None
    except httpx.TimeoutException:
        raise ApiError(f"The server at {server_url} did not answer in time.") from None
    except AnswerError as error:
        raise ApiError(str(error)) from None
    except (httpx.RequestError, httpx.InvalidURL) as error:
        raise ApiError(f"The connection to the server failed: {str(error) or type(error).__name__}.") from None
