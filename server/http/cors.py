"""Which web pages may use the server from a browser, as browsers ask (CORS)."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

METHODS = ("GET", "POST", "HEAD", "DELETE", "OPTIONS")
EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-samewise-ignored"),
    *("retry-after", "retry-after-ms", "x-should-retry"),
    *(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
)
"""Those of answers that a page's scripts may read; clients look for them."""

_LOCALHOST = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")
"""Origins of pages that this machine serves. Nobody else can have one of these."""


@dataclass(frozen=True, slots=True)
class Origins:
    """The origins of web pages that may use the server."""

    named: frozenset[str]
    """`*` stands for all."""
    has_localhost: bool

    @classmethod
    def of(cls, setting: Collection[str], *, has_keys: bool) -> "Origins":
        """Those of the setting `cors_origins`. If none are given, pages on localhost, unless the server has keys."""
        named = frozenset(setting or (["none"] if has_keys else ["localhost"])) - {"none"}
        return cls(named - {"localhost"}, "localhost" in named)

    def __contains__(self, origin: str) -> bool:
        is_local = self.has_localhost and _LOCALHOST.fullmatch(origin) is not None
        return is_local or "*" in self.named or origin in self.named


def allow_origins(app: Starlette, origins: Origins, exposed: Collection[str] = ()) -> None:
    """Let pages of these origins use the application. Their scripts may also read the headers `exposed`.

    To be called after all other middleware was added, which this one then surrounds: a preflight, which a browser sends
    without the key, is answered here, and every error carries the headers without which a page could not read it.
    """
    if origins.named or origins.has_localhost:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins.named,
            allow_origin_regex=_LOCALHOST.pattern if origins.has_localhost else None,
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=(*EXPOSED_HEADERS, *exposed),
        )
