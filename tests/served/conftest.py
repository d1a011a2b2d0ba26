"""The real thing: `samewise serve` in a process of its own with the embedded model."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import httpx
import openai
import pytest

_PROGRAM = (sys.executable, "-m", "server.cli.main")


class Server:
    """A running `samewise serve`."""

    def __init__(self, *flags: str, begins: Sequence[str] = (), program: Sequence[str] = _PROGRAM) -> None:
        """`begins` is the beginning of the command line."""
        self.process = subprocess.Popen(
            [*begins, *program, "serve", "--port", "0", "--kv-cache-gib", "1", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log = ""
        """Output since the server listened; known when it has ended."""
        self.address = self._read_address()
        self._reader = threading.Thread(target=self._read_log)  # or a long log would block the server
        self._reader.start()
        self._wait_ready()

    def _read_address(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := re.search(r"Listening\s+(http://\S+),", line):
                return match[1]
        raise AssertionError(f"the server ended with {self.process.wait()} before it listened")

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.log = output.read()

    def _wait_ready(self, limit_s: float = 120.0) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if httpx.get(f"{self.address}/ready").status_code == 200:
                return
            time.sleep(0.1)
        raise AssertionError(f"the server was not ready within {limit_s} s")

    @property
    def engine_pids(self) -> list[int]:
        """The server's children that run engines, or wait to run one."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        children = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
        return [pid for pid in children if b"server.engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    @property
    def engine_pid(self) -> int:
        """The only engine process."""
        (child,) = self.engine_pids
        return child

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=120)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=120)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = httpx.get(f"{self.address}/metrics").text.splitlines()
        values = [float(line.split()[-1]) for line in lines if re.match(rf"samewise:{name}[{{ ]", line)]
        assert values, f"no metric {name}"
        return sum(values)

    def wait_ended(self) -> None:
        """Returns when the process has ended."""
        self.process.wait(60)
        self._reader.join()

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGTERM)
        self.wait_ended()
        self.client.close()
        return self.process.returncode


async def stream_texts(
    server: Server, model: str, prompts: Sequence[str], max_tokens: int, after_first: asyncio.Event | None = None
) -> list[tuple[str, tuple[float, ...]]]:
    """Text and logprobs of streams at the same time, seeded by their places; sets the event when every one has begun.

    Every other stream asks for logprobs: a kernel samples the tokens of the rest.
    """
    begun = 0

    async def one(index: int, prompt: str) -> tuple[str, tuple[float, ...]]:
        nonlocal begun
        text, logprobs = "", []
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            seed=index,
            stream=True,
            logprobs=1 if index % 2 else None,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            begun += not text
            text += chunk.choices[0].text
            if chunk.choices[0].logprobs is not None:
                logprobs += chunk.choices[0].logprobs.token_logprobs
            if begun == len(prompts) and after_first is not None:
                after_first.set()
        assert len(logprobs) == index % 2 * max_tokens
        return text, tuple(logprobs)

    async with server.async_client() as client:
        return await asyncio.gather(*(one(*numbered) for numbered in enumerate(prompts)))


@pytest.fixture(scope="session")
def server(embedded_folder: Path) -> Iterator[Server]:
    """One server for all tests that do not end it."""
    running = Server()
    yield running
    assert running.terminate() == 0


@pytest.fixture
def thinking_server(embedded_folder: Path) -> Iterator[Server]:
    """One that takes the model for one that may think, so that its reasoning can be bounded."""
    running = Server("--reasoning-parser", "think")
    yield running
    assert running.terminate() == 0
