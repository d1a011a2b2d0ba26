"""SIGINT and SIGTERM before the server answers: whatever the start is doing, it ends, soon, cleanly and with a line."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

SOON_S = 20.0
SIGNALS = [signal.SIGINT, signal.SIGTERM]

Starter = Callable[..., subprocess.Popen[str]]

LOOP = """
import asyncio, uvloop
from server.cli.start_signals import end_start_on_signals
async def main():
    try:
        print("started", flush=True)
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0)
        print("cleaned up")
end_start_on_signals()
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""
DOWNLOAD = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from server.cli import start_signals
start_signals.CLEANUP_S = int(sys.argv[1])
def download():
    print("started", flush=True)  # said by the thread, for without one the process would end at once
    time.sleep(60)
start_signals.end_start_on_signals()
with ThreadPoolExecutor() as threads:
    threads.submit(download).result()
"""


@pytest.fixture
def start() -> Iterator[Starter]:
    """Starts Python, in a process group of its own, which is killed afterwards."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for_line(process: subprocess.Popen[str], beginning: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(f"it ended with {process.wait()} and these words: {process.communicate()}")


def end(process: subprocess.Popen[str], one: signal.Signals, within_s: float = SOON_S) -> tuple[str, str]:
    """Sends the signal; the process ends with its status. Returns its last words.

    Processes that it started have the same output, so that reading this to its end is to wait for them too.
    """
    process.send_signal(one)
    output, errors = process.communicate(timeout=within_s)
    assert process.returncode == 128 + one
    assert errors.endswith(f"error: the start was ended by {one.name}\n")
    assert "Traceback" not in errors
    return output, errors


@pytest.mark.parametrize("one", SIGNALS)
def test_while_a_hub_does_not_answer(one: signal.Signals, start: Starter, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:  # takes connections and says nothing
        address = f"http://127.0.0.1:{hub.getsockname()[1]}"
        arguments = ["-m", "server.cli.main", "serve", "--host", "127.0.0.1", "--port", "0", "some/model"]
        process = start(*arguments, HF_ENDPOINT=address, HF_HOME=str(tmp_path), NO_PROXY="*")
        wait_for_line(process, "Looking for some/model")
        hub.settimeout(20)
        with hub.accept()[0]:
            end(process, one)


def test_while_a_model_is_converted(start: Starter, tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    (model / "config.json").write_text("{}")  # without a tokenizer.json, and so it needs a conversion
    arguments = ["-m", "server.cli.main", "serve", "--host", "127.0.0.1", "--port", "0", str(model)]
    process = start(*arguments, SAMEWISE_CACHE=str(cache))
    wait_for_line(process, "Converting model")
    while not list(cache.glob("converting-*")):
        time.sleep(0.01)
    end(process, signal.SIGTERM)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("one", SIGNALS)
def test_in_the_event_loop(one: signal.Signals, start: Starter) -> None:
    process = start("-c", LOOP)
    wait_for_line(process, "started")
    assert end(process, one)[0] == "cleaned up\n"


def test_threads_in_the_middle_of_a_download_are_waited_for_only_so_long(start: Starter) -> None:
    process = start("-c", DOWNLOAD, "1")
    wait_for_line(process, "started")
    end(process, signal.SIGTERM)


def test_a_second_signal_waits_for_nothing(start: Starter) -> None:
    process = start("-c", DOWNLOAD, "50")
    wait_for_line(process, "started")
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert process.stderr.readline() == "error: the start was ended by SIGTERM\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(SOON_S) == 128 + signal.SIGTERM


@pytest.mark.embedded
@pytest.mark.usefixtures("embedded_folder")
@pytest.mark.parametrize("one", SIGNALS)
def test_while_the_engine_loads_the_server_already_drains(one: signal.Signals, start: Starter) -> None:
    process = start("-m", "server.cli.main", "serve", "--host", "127.0.0.1", "--port", "0")
    address = wait_for_line(process, "Listening").split()[1].rstrip(",")
    assert httpx.get(f"{address}/health", timeout=20, trust_env=False).status_code == 200
    process.send_signal(one)
    process.communicate(timeout=20)
    assert process.returncode == 0
