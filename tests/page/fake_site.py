"""The page before a server with a model that nobody can ask: `python -m tests.page.fake_site`.

A process of its own, for NiceGUI has one application in each.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.http.draining_server import bind, configure, url_of
from server.page.gate import PATH, PageGate


@contextmanager
def running(log: IO[str] | None = None) -> Iterator[str]:
    """Its address, while it runs; what it writes to stderr goes to the log."""
    command = [sys.executable, "-m", "tests.page.fake_site"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate(timeout=30)


async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": "parrot", "object": "model"}]})


async def loaded(request: Request) -> Response:
    """Whether there is anything of the page's front end in this process."""
    return JSONResponse("nicegui" in sys.modules)


def _main() -> None:
    api = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/loaded", loaded),
        ]
    )
    listener = bind("127.0.0.1", 0)
    address = url_of(listener)
    gate = PageGate(api, f"{address}/v1")
    print(address, flush=True)  # noqa: T201
    uvicorn.Server(configure(gate, client_timeout_s=30.0, websockets_below=f"{PATH}/")).run(sockets=[listener])


if __name__ == "__main__":
    _main()
