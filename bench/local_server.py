"""Runs a server to measure, ours or another, on a free port."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx

START_TIMEOUT_S = 600.0
END_TIMEOUT_S = 60.0
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server that is ready."""

    url: str
    """The address without /v1."""
    pid: int


@contextlib.asynccontextmanager
async def local_server(
    arguments: Sequence[str],
    program: Sequence[str] = ("-m", "server.cli.main", "serve"),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[LocalServer]:
    """Run `samewise serve`, or another Python program, until the end of the block; yields once it is ready.

    Raises RuntimeError if it does not become ready or exits with a code other than 0.
    """
    async with started([sys.executable, *program, *arguments], "/ready", variables) as server:
        yield server


@contextlib.asynccontextmanager
async def started(
    command: Sequence[str], ready_path: str, variables: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[LocalServer]:
    """Run any server that accepts --host and --port and answers 200 at `ready_path` once it is ready.

    Raises RuntimeError if it does not become ready or exits with a code other than 0.
    """
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *command, "--host", "127.0.0.1", "--port", str(port), env={**environment(), **variables}
    )
    try:
        url = f"http://127.0.0.1:{port}"
        await _until_ready(url + ready_path, process)
        yield LocalServer(url, process.pid)
        process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code != 0:
        raise RuntimeError(f"the server exited with code {code}")


@contextlib.contextmanager
def paused(server: LocalServer) -> Iterator[None]:
    """Suspend the server's processes during the block, so that they do not affect other measurements."""
    family = process_family(server.pid)
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in reversed(family):
            os.kill(pid, signal.SIGCONT)


def environment() -> dict[str, str]:
    """Environment variables with which child processes find our packages without installing them."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def process_family(pid: int) -> list[int]:
    """A process and all its descendants, from /proc."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [pid, *(one for child in children for one in process_family(child))]


def resident_mib(pid: int) -> float:
    """Resident memory of a process (private and shared pages), from /proc."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


async def _until_ready(url: str, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_TIMEOUT_S), httpx.AsyncClient(trust_env=False) as client:
        while process.returncode is None:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the server exited with code {process.returncode} before it was ready")


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
