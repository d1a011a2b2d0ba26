"""Paths without /v1, for clients whose base URL lacks it."""

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

_VERSION = "/v1"


class ShortPaths:
    """Completes paths, by their first segments: `/chat/completions` becomes `/v1/chat/completions`.

    A segment at which the API also has a path of its own, outside /v1, is never completed.
    """

    def __init__(self, routes: Iterable[str]) -> None:
        """`routes` are the paths of all routes."""
        paths = tuple(routes)
        below = {_first(path.removeprefix(_VERSION)) for path in paths if path.startswith(f"{_VERSION}/")}
        self._short = below.difference(map(_first, paths))

    def full(self, path: str) -> str:
        """The path of the route that a client means by `path`."""
        return _VERSION + path if _first(path) in self._short else path


class ShortPathMiddleware:
    """Serves short paths as if the client had sent the full ones. Pure ASGI.

    It surrounds the middleware that looks at paths, so keys, limits, logs, metrics and errors know the full ones alone.
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
