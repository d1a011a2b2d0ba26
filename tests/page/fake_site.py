"""The page before a server with a model that nobody can ask: `python -m tests.page.fake_site [key]`.

A process of its own, for NiceGUI has one application in each.
"""

import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import IO, Any
from urllib.parse import urlencode
from uuid import uuid4

import httpx
import uvicorn
import websockets.asyncio.client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from websockets.asyncio.client import ClientConnection

from server.http.draining_server import configure
from server.http.listening import bind, url_of
from server.page.gate import WEBSOCKETS, PageGate

LIMIT_S = 60.0
"""For whatever is waited for, however busy the machine is."""
SENT_BACK = '44{"message": "Implicit handshake failed"}'
"""The message that makes a browser reload the page."""


@contextmanager
def running(log: IO[str] | None = None, key: str = "") -> Iterator[str]:
    """Its address, while it runs; what it writes to stderr goes to the log. Its API wants the key."""
    command = [sys.executable, "-m", "tests.page.fake_site", key]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)


def client_of(address: str, from_host: str = "127.0.0.1") -> httpx.Client:
    """A client that waits for the first visit, which takes long on a busy machine."""
    transport = httpx.HTTPTransport(local_address=from_host)
    return httpx.Client(base_url=address, transport=transport, timeout=LIMIT_S, trust_env=False)


def id_in(html: str) -> str:
    """The page's id."""
    (client_id,) = set(re.findall(r"client_id\W+([0-9a-f-]{36})", html))
    assert isinstance(client_id, str)
    return client_id


def visit(client: httpx.Client) -> str:
    """Load the page; returns its id."""
    return id_in(client.get("/page/").text)


def socket_url(address: str, **query: str) -> str:
    """Where a page with this query has its websocket."""
    transport = {"EIO": "4", "transport": "websocket"}
    return f"{address.replace('http', 'ws')}/page/_nicegui_ws/socket.io/?{urlencode(transport | query)}"


def query_of(client_id: str) -> dict[str, str]:
    """The query that a browser sends."""
    ids = {"tab_id": str(uuid4()), "document_id": str(uuid4()), "old_tab_id": "null"}
    return {"client_id": client_id, "next_message_id": "0", "implicit_handshake": "true"} | ids


def connect(url: str) -> websockets.asyncio.client.connect:
    """A websocket that waits as long."""
    return websockets.asyncio.client.connect(url, open_timeout=LIMIT_S)


@asynccontextmanager
async def opened(address: str, **query: str) -> AsyncIterator[ClientConnection]:
    """The websocket of a page after Socket.IO's greetings."""
    async with connect(socket_url(address, **query)) as socket:
        assert str(await socket.recv()).startswith("0{")
        await socket.send("40")
        assert str(await socket.recv()).startswith("40{")
        yield socket


async def models(request: Request) -> Response:
    key = sys.argv[1]
    if key and request.headers.get("authorization") != f"Bearer {key}":
        return JSONResponse({"error": {"message": "Incorrect API key provided."}}, 401)
    return JSONResponse({"object": "list", "data": [{"id": "parrot", "object": "model"}]})


async def loaded(request: Request) -> Response:
    """Whether there is anything of the page's front end in this process."""
    return JSONResponse("nicegui" in sys.modules)


async def held(request: Request) -> Response:
    """The state kept for visitors, after a cleanup."""
    from nicegui import core  # noqa: PLC0415
    from nicegui.app.app import prune_tab_storage  # noqa: PLC0415

    await prune_tab_storage()
    kept: dict[str, Any] = {
        "tabs": core.app.storage._tabs,
        "sockets": core.sio.eio.sockets,
        "environments": core.sio.environ,
        "rooms": core.sio.manager.rooms,
    }
    return JSONResponse({name: sum(map(len, found)) for name, found in kept.items()})


def _main() -> None:
    api = Starlette(routes=[Route("/v1/models", models), Route("/loaded", loaded), Route("/held", held)])
    listener = bind("127.0.0.1", 0)
    address = url_of(listener)
    gate = PageGate(api, f"{address}/v1")
    print(address, flush=True)  # noqa: T201
    uvicorn.Server(configure(gate, client_timeout_s=30.0, websockets=WEBSOCKETS)).run(sockets=[listener])


if __name__ == "__main__":
    _main()
