"""A minimal OpenAI-compatible server with scripted answers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

_PIECE = 1000
"""Characters of a chunk."""
_PROBLEMS = {500: "Something has failed.", 502: "Something else has failed.", 503: "The server is not ready yet."}


class FakeOpenAI:
    """`answer` is what it says to whatever it is asked, and `key` what it wants for its list of models, if any.

    It has no models unless its `status` is 200. `capabilities` are its answer for them, if any, and `bodies` what
    it was asked.
    """

    def __init__(self, port: int) -> None:
        self.base_url = f"http://127.0.0.1:{port}/v1"
        self.answer = ""
        self.key = ""
        self.status = 200
        self.models: list[dict[str, Any]] = [{"id": "parrot"}]
        self.capabilities: dict[str, Any] | None = None
        self.capabilities_of: dict[str, dict[str, Any]] = {}
        """By name of the model, where they differ from the common ones."""
        self.bodies: list[dict[str, Any]] = []
        self.prompt_size: dict[str, Any] = {}
        """Answer to `/tokenize`."""


@contextmanager
def fake_openai() -> Iterator[FakeOpenAI]:
    """One that runs."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        _Handler.fake = FakeOpenAI(server.server_port)
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield _Handler.fake
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeOpenAI

    def do_GET(self) -> None:
        if self.fake.key and self.headers["authorization"] != f"Bearer {self.fake.key}":
            self._refuse(401, "A key is missing.")
        elif self.fake.status != 200:
            self._refuse(self.fake.status, _PROBLEMS[self.fake.status])
        elif self.path == "/v1/models":
            self._send(200, "application/json", json.dumps({"object": "list", "data": self.fake.models}))
        elif self.path.startswith("/v1/capabilities") and self.fake.capabilities is not None:
            named = self.path.partition("?model=")[2]
            self._send(
                200, "application/json", json.dumps(self.fake.capabilities_of.get(named, self.fake.capabilities))
            )
        else:
            self._send(404, "text/plain", "There is no such thing.")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self._send(200, "application/json", json.dumps(self.fake.prompt_size))
            return
        self.fake.bodies.append(body)
        text = self.fake.answer
        deltas = [{"content": text[at : at + _PIECE]} for at in range(0, len(text), _PIECE)]
        chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
        self._send(200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events))

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""

    def _refuse(self, status: int, message: str) -> None:
        self._send(status, "application/json", json.dumps({"error": {"message": message}}))

    def _send(self, status: int, kind: str, body: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())
