"""API keys: who may call what."""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.config import Settings
from server.errors import AuthenticationError
from server.http.middleware import record_in
from server.http.responses import error_response

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json"})
"""Probes, scrapers and the documentation need no key."""
_ID_LENGTH = 16


class KeyRing:
    """The accepted keys, of which only hashes are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def client_of(self, key: str) -> str | None:
        """Who has the key: an id that does not tell it. None for a key that is not of the ring.

        Takes as long whichever it is.
        """
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest.hex()[:_ID_LENGTH] if any(matches) else None


def load_keys(settings: Settings) -> KeyRing:
    """The keys of the settings; an empty ring lets everyone in.

    Raises ValueError if a key or a file of keys is configured but holds none, OSError if it cannot be read.
    """
    keys: list[str] = []
    if settings.api_key is not None:
        keys.append(settings.api_key.get_secret_value().strip())
    if settings.api_keys_file is not None:
        keys += _read_keys(settings.api_keys_file)
    if not all(keys):
        raise ValueError("The configured API key is empty.")
    return KeyRing(keys)


def _read_keys(path: Path) -> list[str]:
    keys = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    if not keys:
        raise ValueError(f"{path} holds no API key.")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class AuthMiddleware:
    """Answers 401 unless the request carries one of the keys, and notes whose it is.

    Pure ASGI: streams pass through untouched.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN_PATHS:
            try:
                record_in(scope).client = self._client(_key_in(Headers(scope=scope)))
            except AuthenticationError as error:
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _client(self, key: str) -> str:
        """Who has the key. Raises AuthenticationError."""
        if not key:
            raise AuthenticationError(
                "You didn't provide an API key. You need to provide your API key in an Authorization header using "
                "Bearer auth (i.e. Authorization: Bearer YOUR_KEY), or in the header x-api-key."
            )
        client = self._keys.client_of(key)
        if client is None:
            raise AuthenticationError("Incorrect API key provided.", code="invalid_api_key")
        return client


def _key_in(headers: Headers) -> str:
    """The key that a request brings, by OpenAI's header or Anthropic's; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return bearer or headers.get("x-api-key", "").strip()
