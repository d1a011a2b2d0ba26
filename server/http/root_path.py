"""The path that a proxy strips before it passes requests on."""

# Short: middleware.py is about records of requests.

from starlette.types import ASGIApp, Receive, Scope, Send

_PATHS = ("/docs", "/openapi.json")


class RootPathMiddleware:
    """Adds the stripped path to requests for the API's documentation, whose links begin with it.

    Other routes make no links. Pure ASGI; add it first, so that it is innermost: logs and keys see the paths as sent.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._root_path and scope["path"] in _PATHS:
            scope.update(root_path=self._root_path, path=self._root_path + scope["path"])
        await self._app(scope, receive, send)
