"""A server that cannot start says why in one line and exits with 1."""

import subprocess
import sys
from pathlib import Path
from typing import TextIO
from unittest.mock import Mock

import pytest
from rich.console import Console

from server.cli.announcement import Announcer
from server.http.listening import bind


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server.cli.main", "serve", "--host", "127.0.0.1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def test_a_line_is_written_at_once() -> None:
    """Otherwise lines of the engine's process get into it."""
    output = Mock(spec=TextIO)
    Announcer(Console(file=output, soft_wrap=True, force_terminal=False), 0).say(
        "Listening", "http://127.0.0.1:1, loading [b]" + 200 * "x"
    )
    output.write.assert_called_once_with("Listening       http://127.0.0.1:1, loading [b]" + 200 * "x" + "\n")


def test_a_port_that_is_taken() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        result = serve("--port", str(port))
    assert result.stderr.startswith(f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; end ")
    assert result.stderr.endswith("or pick a free one with --port 0\n")
    assert result.returncode == 1


@pytest.mark.parametrize("options", [["--kv-events"], ["--kv-events", "tcp://127.0.0.1:*", "--kv-events-replay"]])
def test_an_endpoint_for_kv_events_that_is_taken(options: list[str]) -> None:
    with bind("127.0.0.1", 0) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        result = serve("--port", "0", *options, endpoint)
    assert result.stderr == f"error: cannot publish KV events on {endpoint}: Address already in use\n"
    assert result.returncode == 1


def test_kv_events_without_pyzmq() -> None:
    main = "import sys; sys.modules['zmq'] = None; from server.cli.main import main; main()"
    command = [sys.executable, "-c", main, "serve", "--host", "127.0.0.1", "--port", "0", "--kv-events", "tcp://*:5557"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert last_line(result) == "error: kv_events needs pyzmq; run `pip install 'samewise[kv-events]'`"


def test_a_model_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "model.txt"
    file.write_text("no model")
    assert last_line(serve("--port", "0", str(file))).startswith(f"error: {file} is not a GGUF file; give a folder")


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        (["--host", "0.0.0.0"], "0.0.0.0"),
        (["--host", "0.0.0.0", "--api-key", "sk-1"], None),
        (["--host", "localhost"], None),
    ],
)
def test_a_server_that_is_open_to_everyone_says_so(arguments: list[str], address: str | None, tmp_path: Path) -> None:
    (tmp_path / "model.txt").touch()
    lines = serve("--port", "0", *arguments, str(tmp_path / "model.txt")).stderr.splitlines()
    warnings = [line for line in lines if "WARNING" in line]
    assert len(warnings) == (address is not None)
    assert all(f"The server listens on {address} without an API key" in line for line in warnings)


@pytest.mark.embedded
@pytest.mark.usefixtures("embedded_folder")
def test_an_engine_that_fails() -> None:
    message = last_line(serve("--port", "0", "--kv-cache-gib", "0.0005"))
    assert message.startswith("error: The engine did not start: the KV cache of 524.3 KiB")


@pytest.mark.embedded
@pytest.mark.usefixtures("embedded_folder")
def test_keys_that_cannot_be_read() -> None:
    line = last_line(serve("--port", "0", "--api-keys-file", "none.txt"))
    assert line == "error: api_keys_file: none.txt: No such file or directory"
