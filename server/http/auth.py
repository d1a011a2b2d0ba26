"""Authentication by API keys."""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.config import Settings
from server.errors import AuthenticationError, LimitError
from server.http.middleware import record_in
from server.http.responses import error_response
from server.telemetry.request_trace import RequestTrace
from server.tenants.accounts import Accounts
from server.tenants.keys import KeyRing, Tenant

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping", "/version", "/api/version", "/docs", "/openapi.json"})
"""Paths of probes and the documentation, which need no key."""


def open_paths(settings: Settings) -> frozenset[str]:
    """The paths that need no key with these settings."""
    return OPEN_PATHS | {"/metrics", "/load"} if settings.open_metrics else OPEN_PATHS


class AuthMiddleware:
    """Answers 401 unless a request has a valid key; records the key's owner and the state of its limits.

    A request with a body counts against the key's limit. Beyond the limit it gets 429 before its body is read, because
    reading is costly. Pure ASGI: streams pass through untouched.
    """

    def __init__(self, app: ASGIApp, accounts: Accounts, open_paths: Collection[str]) -> None:
        """`open_paths` need no key."""
        self._app = app
        self._accounts = accounts
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._accounts.keys and scope["path"] not in self._open_paths:
            record = record_in(scope)
            try:
                if record.is_background:
                    check_submitter(record.client, self._accounts.keys)
                else:
                    await self._authenticate(Headers(scope=scope), record)
            except (AuthenticationError, LimitError) as error:
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _authenticate(self, headers: Headers, record: RequestTrace) -> None:
        """Record the key's owner and limits. Raises AuthenticationError and RequestLimitError."""
        tenant = owner_of(key_in(headers), self._accounts.keys)
        record.client = tenant.name
        try:
            if has_body(headers):
                await self._accounts.limits.count_request(tenant)
        finally:
            record.headers |= await self._accounts.limits.headers(tenant)


def check_submitter(client: str, keys: KeyRing) -> None:
    """Raise AuthenticationError if the client's key was removed after it submitted background work."""
    if not keys.knows(client):
        message = "The API key that submitted this work is no longer accepted."
        raise AuthenticationError(message, code="invalid_api_key")


def owner_of(key: str, keys: KeyRing) -> Tenant:
    """The key's owner. Raises AuthenticationError."""
    if not key:
        raise AuthenticationError(
            "You didn't provide an API key. You need to provide your API key in an Authorization header using "
            "Bearer auth (i.e. Authorization: Bearer YOUR_KEY), or in the header x-api-key."
        )
    tenant = keys.tenant_of(key)
    if tenant is None:
        raise AuthenticationError("Incorrect API key provided.", code="invalid_api_key")
    return tenant


def has_body(headers: Headers) -> bool:
    """Whether these headers announce a body."""
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def sees_all_usage(headers: Headers, keys: KeyRing) -> bool:
    """Whether a request with these headers may read every tenant's usage."""
    tenant = keys.tenant_of(key_in(headers))
    return not keys or (tenant is not None and tenant.sees_all_usage)


def key_in(headers: Headers) -> str:
    """The key in OpenAI's header or Anthropic's; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return bearer or headers.get("x-api-key", "").strip()
