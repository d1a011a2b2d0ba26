"""The page before an OpenAI server that says what it is told: `python -m tests.page.fake_site`.

A process of its own, for NiceGUI has one application in each.
"""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import IO

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from server.http.draining_server import bind, configure, url_of
from server.page.gate import PATH, PageGate

MODEL = "<img src=x onerror='window.hacked=true'>"
PIECE = 700


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
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def chat(request: Request) -> Response:
    """Says again what was said last; what begins with "error" is one."""
    said = (await request.json())["messages"][-1]["content"]
    if said.startswith("error"):
        return JSONResponse({"error": {"message": said, "type": "server_error"}}, status_code=500)
    return StreamingResponse(_events(said), media_type="text/event-stream")


async def loaded(request: Request) -> Response:
    """Whether there is anything of the page's front end in this process."""
    return JSONResponse("nicegui" in sys.modules)


async def _events(text: str) -> AsyncIterator[str]:
    for start in range(0, len(text), PIECE):
        delta = {"content": text[start : start + PIECE], "reasoning_content": text[start : start + PIECE]}
        yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"
    yield "data: [DONE]\n\n"


def _main() -> None:
    api = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
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
