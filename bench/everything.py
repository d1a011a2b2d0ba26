"""Turns on all of a server's accounting and telemetry, with a consumer for each."""

import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import yaml
import zmq

_SCRAPE_S = 5.0
"""Interval of reading the metrics, as in deploy/prometheus.yml."""
_PLENTY = 10**9
_POLL_MS = 100


@dataclass(slots=True)
class Everything:
    """A server's settings with all telemetry on, and counts of what was received."""

    environment: Mapping[str, str]
    """The server's settings, as environment variables."""
    api_key: str
    heard: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("traces", "KV events", "metrics"), 0))
    """Number of messages received by kind, to verify that each was on."""

    @property
    def name(self) -> str:
        return "everything"

    @asynccontextmanager
    async def watching(self, url: str) -> AsyncIterator[None]:
        """Read the server's metrics periodically."""

        def scrape(ends: threading.Event) -> None:
            while not ends.wait(_SCRAPE_S):
                headers = {"authorization": f"Bearer {self.api_key}"}
                httpx.get(f"{url}/metrics", headers=headers, trust_env=False).raise_for_status()
                self.heard["metrics"] += 1

        with _in_thread(scrape):
            yield


@contextmanager
def everything_on() -> Iterator[Everything]:
    """Set up keys with limits and fair scheduling, stored usage, KV events with a subscriber, traces with a collector.

    Raises RuntimeError at the end if nothing was received of one of them.
    """
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        api_key = secrets.token_hex()
        limits = dict.fromkeys(("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_choices"), _PLENTY)
        entry = {"name": "bench", "key": api_key, "metrics": True, **limits}
        (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": [entry]}))
        made = Everything({}, api_key)
        made.environment = {
            "SAMEWISE_API_KEYS_FILE": str(folder / "keys.yaml"),
            "SAMEWISE_DATA_DIR": str(folder / "data"),
            "SAMEWISE_POLICY": "fair",
            "SAMEWISE_KV_EVENTS": f"ipc://{folder}/kv",
            "SAMEWISE_KV_EVENTS_REPLAY": f"ipc://{folder}/replay",
            "SAMEWISE_OTLP_TRACES_ENDPOINT": stack.enter_context(_collector(made)),
        }
        stack.enter_context(_in_thread(lambda ends: _subscribe(f"ipc://{folder}/kv", made, ends)))
        yield made
        if silent := [name for name, count in made.heard.items() if not count]:
            raise RuntimeError(f"received no {', '.join(silent)}")


@contextmanager
def _collector(made: Everything) -> Iterator[str]:
    """Run a collector that accepts traces; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            made.heard["traces"] += 1
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing, to keep the output readable."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _subscribe(endpoint: str, made: Everything, ends: threading.Event) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.connect(endpoint)
        while not ends.is_set():
            if socket.poll(_POLL_MS):
                socket.recv_multipart()
                made.heard["KV events"] += 1


@contextmanager
def _in_thread(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread during the block; its event is set at the end."""
    ends = threading.Event()
    thread = threading.Thread(target=work, args=(ends,))
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
