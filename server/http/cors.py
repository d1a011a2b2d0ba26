"""Which web pages may use the server from a browser, as browsers ask (CORS)."""

from collections.abc import Collection

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

METHODS = ("GET", "POST", "HEAD", "DELETE", "OPTIONS")
EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-samewise-ignored"),
    *("retry-after", "retry-after-ms", "x-should-retry"),
    *(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
)
"""Those of answers that a page's scripts may read; clients look for them."""


_LOCALHOST = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""Origins of pages that this machine serves. Nobody else can have one of these."""


def allow_origins(app: Starlette, origins: Collection[str], *, has_keys: bool, exposed: Collection[str] = ()) -> None:
    """Let pages of these origins use the application. If none are given, pages on localhost may, unless it has keys.

    `origins` are those of the setting of this name. Their scripts may also read the headers `exposed`.

    To be called after all other middleware was added, which this one then surrounds: a preflight, which a browser sends
    without the key, is answered here, and every error carries the headers without which a page could not read it.
    """
    named = set(origins or (["none"] if has_keys else ["localhost"])) - {"none"}
    if named:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=named - {"localhost"},
            allow_origin_regex=_LOCALHOST if "localhost" in named else None,
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=(*EXPOSED_HEADERS, *exposed),
        )
