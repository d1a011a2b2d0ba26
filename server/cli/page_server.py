"""The web page as a server of its own."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import uvicorn
from rich.console import Console
from starlette.applications import Starlette

from server.client.openai_answers import without_password
from server.http.draining_server import bind, configure, url_of
from server.http.hosts import guarded
from server.page.gate import WEBSOCKETS, PageGate

_CLIENT_TIMEOUT_S = 30.0


def serve(base_url: str, host: str, port: int, allowed_hosts: Collection[str]) -> None:
    """Serve the page for the API at `base_url` until a signal ends that. Raises BindError.

    It may be asked by the names `allowed_hosts`, too.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await gate.close()

    gate = PageGate(Starlette(lifespan=lifespan), base_url)
    console = Console(soft_wrap=True, highlight=False)
    with bind(host, port) as listener:
        console.print(f"Page    {url_of(listener)}/", markup=False)
        console.print(f"Server  {without_password(base_url)}", markup=False)
        app = guarded(gate, allowed_hosts, has_keys=False)
        server = uvicorn.Server(configure(app, _CLIENT_TIMEOUT_S, websockets=WEBSOCKETS))
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:  # which it has heeded
            return
