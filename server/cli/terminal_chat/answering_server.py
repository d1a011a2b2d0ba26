"""The server that answers."""

from collections.abc import Generator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from server.client.openai_answers import AnswerError, ChunkParser, error_message, first_model, headers

CONNECT_TIMEOUT_S = 10.0


class ServerError(Exception):
    """The server gave no answer; the message is for the user."""


class ChatServer:
    """An OpenAI-compatible server. A context manager."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._base_url = base_url
        self._client = httpx.Client(headers=headers(api_key), timeout=timeout, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def first_model(self) -> str:
        """The first model that the server lists. Raises ServerError."""
        try:
            response = self._client.get(f"{self._base_url}/models")
            self._check(response)
            return first_model(response.content)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        except AnswerError as error:
            raise ServerError(f"{self._base_url}/models: {error}") from None

    def answer(self, body: Mapping[str, Any]) -> Generator[str]:
        """Yield the answer as it comes. Closing the generator ends the request. Raises ServerError."""
        parser = ChunkParser()
        try:
            with self._client.stream("POST", f"{self._base_url}/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                self._check(response)
                for data in response.iter_bytes():
                    for chunk in parser.feed(data):
                        yield chunk.text
                    if parser.is_done:
                        return
            parser.close()
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        except AnswerError as error:
            raise ServerError(str(error)) from None

    def _check(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            return
        message = error_message(response.content)
        match response.status_code:
            case 401 | 403:
                raise ServerError(f"the server wants another key (--api-key or SAMEWISE_API_KEY): {message}")
            case 429 | 503:
                wait = response.headers.get("retry-after")
                raise ServerError(f"{message}" + (f" Try again in {wait} s." if wait else ""))
            case status:
                raise ServerError(f"HTTP {status}: {message}")

    def _unreachable(self, error: Exception) -> ServerError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerError(f"no server answers at {self._base_url}; is `samewise serve` running?")
        return ServerError(f"the connection to {self._base_url} broke: {str(error) or type(error).__name__}")
