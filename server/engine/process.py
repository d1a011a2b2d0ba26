"""The engine in a process of its own, behind a ZeroMQ socket."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path

import zmq
import zmq.asyncio

from server.engine.messages import EngineConfig, FromEngine, Load, Shutdown, ToEngine, decode_from_engine, encode
from server.engine.supervisor import EngineLimits, EngineSupervisor
from server.engine.worker import DEFAULT_FACTORY

_ALLOCATOR, _OLD_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"

ENVIRONMENT = {
    # After each of torch's operators its threads would wait for the next one in a busy loop, for milliseconds, and take
    # the cores from the kernels' own threads and from the HTTP process.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Sampling works on tensors of some megabytes. By default malloc returns each to the kernel, and clearing the pages
    # of the next takes longer than the work itself.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    # Steps take tensors of ever new sizes. Where segments of CUDA memory can grow, what is freed fits the next ones and
    # does not end as pieces too small for any. Builds of torch for the CPU read it and do nothing.
    _ALLOCATOR: "expandable_segments:True",
}
"""Of the engine process, where the server's own environment does not say otherwise; read before Python starts."""


def engine_environment() -> dict[str, str]:
    """All that an engine process finds in its environment: the server's own, and ENVIRONMENT.

    Torch reads its allocator's settings under two names, parts of them under one and parts under the other, so nothing
    is added to what the user says under either.
    """
    environment = ENVIRONMENT | os.environ
    if _OLD_ALLOCATOR in os.environ and _ALLOCATOR not in os.environ:
        del environment[_ALLOCATOR]
    return environment


class EngineProcess(EngineSupervisor):
    """The EngineClient that a server uses."""

    def __init__(self, config: EngineConfig, limits: EngineLimits, factory: str = DEFAULT_FACTORY) -> None:
        """`factory` names the function that loads the engine in its process, as `module:function`."""
        super().__init__(limits)
        self._config = config
        self._factory = factory
        self._process: ProcessLink | None = None

    @property
    def pid(self) -> int | None:
        """The id of the last engine process that was started."""
        return None if self._process is None else self._process.pid

    async def _launch(self) -> "ProcessLink":
        self._process = await ProcessLink.open(self._factory)
        self._process.send(Load(self._config))
        return self._process


class ProcessLink:
    """One engine process, with its own socket in its own private folder: nothing of another engine can arrive here."""

    def __init__(self, process: asyncio.subprocess.Process, socket: "ServerSocket") -> None:
        self._process = process
        self._socket = socket
        self._outbox: asyncio.Queue[ToEngine] = asyncio.Queue()
        self._sender = asyncio.create_task(self._send_all(), name="samewise-engine-sender")

    @classmethod
    async def open(cls, factory: str) -> "ProcessLink":
        """Start an engine process. Its output goes where ours goes. Raises OSError if it cannot be started."""
        socket = ServerSocket()
        try:
            command = [sys.executable, "-P", "-m", "server.engine.worker"]  # -P: import nothing from the working folder
            options = ["--connect", socket.address, "--parent", str(os.getpid()), "--factory", factory]
            process = await asyncio.create_subprocess_exec(
                *command, *options, stdin=asyncio.subprocess.DEVNULL, env=engine_environment()
            )
        except OSError as error:
            socket.close()
            raise OSError(f"{sys.executable} cannot be run: {error}") from error
        except BaseException:
            socket.close()
            raise
        return cls(process, socket)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        self._outbox.put_nowait(message)

    async def receive(self) -> FromEngine:
        return decode_from_engine(await self._socket.receive())

    async def exited(self) -> str:
        return _describe(self.pid, await self._process.wait())

    async def close(self, grace_s: float) -> None:
        """Ends and reaps the process, and removes the socket."""
        try:
            self.send(Shutdown())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        finally:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            self._sender.cancel()
            await asyncio.wait([self._sender])
            self._socket.close()
            await self._process.wait()

    async def _send_all(self) -> None:
        while True:
            await self._socket.send(encode(await self._outbox.get()))


class ServerSocket:
    """A bound socket whose file only this user can reach."""

    def __init__(self) -> None:
        """Raises OSError if no socket can be made."""
        self._folder = tempfile.TemporaryDirectory(prefix="samewise-")  # mode 0700
        self.address = f"ipc://{Path(self._folder.name) / 'engine.sock'}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # nothing is dropped
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(f"cannot listen on {self.address}: {error}") from error

    async def send(self, frame: bytes) -> None:
        await self._socket.send(frame)

    async def receive(self) -> bytes:
        frame: bytes = await self._socket.recv()
        return frame

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._folder.cleanup()


def _describe(pid: int, code: int) -> str:
    if code >= 0:
        return f"process {pid} exited with code {code}; its last words are above"
    name = signal.Signals(-code).name
    hint = " (was the machine out of memory?)" if -code == signal.SIGKILL else ""
    return f"process {pid} was killed by {name}{hint}"
