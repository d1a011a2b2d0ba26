"""The Samewise server under test: started with the flags that a test needs, and kept for the next test."""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import cache
from pathlib import Path

from rich.console import Console

from model_runner.hub.repository import resolve_model

START_LIMIT_S = 240.0


class Served:
    """At most one running `samewise serve`; it is replaced when a test needs other flags."""

    def __init__(self) -> None:
        self._flags: tuple[str, ...] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path(os.environ.get("SAMEWISE_SUITE_LOG", "samewise.log"))
        self.port = 0
        self.used = False
        """Whether the current test has asked for it; the report of the suite sets it back."""
        atexit.register(self.stop)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # pytest ends in order then, and stops the server

    def start(self, *flags: str, port: int | None = None) -> int:
        """Return the port of a server with these flags. Raises RuntimeError if the server refuses them."""
        self.used = True
        wanted = (*flags, str(port))
        if self._flags != wanted or self._process is None or self._process.poll() is not None:
            self.stop()
            self.port = port or _free_port()
            self._flags = wanted
            command = [
                sys.executable,
                "-m",
                "server.cli.main",
                "serve",
                "--host",
                "127.0.0.1",
                "--port",
                str(self.port),
            ]
            with self._log.open("ab") as log:
                self._process = subprocess.Popen([*command, "--kv-cache-gib", "1", *flags], stdout=log, stderr=log)
            self._wait_ready(self._process)
        return self.port

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"samewise serve ended with {process.returncode}, see {self._log}: {self._flags}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"samewise serve was not ready within {START_LIMIT_S} s: {self._flags}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@cache
def embedded_folder() -> Path:
    """The folder of the embedded model, which answers under every name that a suite uses."""
    return resolve_model(None, Console(stderr=True)).path


@cache
def embedded_variant(template: str | None = None, **defaults: float | None) -> str:
    """A folder with the embedded model, another chat template, and other defaults in `generation_config.json`."""
    folder = Path(tempfile.mkdtemp(prefix="samewise-suite-"))
    for file in embedded_folder().iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "generation_config.json"
    given = {name: value for name, value in defaults.items() if value is not None}
    _replace(config, json.dumps(json.loads(config.read_text()) | given))
    if template is not None:
        _replace(folder / "chat_template.jinja", template)
    return str(folder)


def _replace(file: Path, text: str) -> None:
    file.unlink(missing_ok=True)
    file.write_text(text)


SERVED = Served()
