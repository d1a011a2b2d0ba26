"""HEAD, which monitors and load balancers ask probes with."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadMiddleware:
    """Answers HEAD as GET without the body: the routes, and what documents them, know GET alone. Pure ASGI."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        of_get = {**scope, "method": "GET"}
        try:
            await self._app(of_get, receive, send_head)
        finally:
            scope["route"] = of_get.get("route")  # the access line names it
