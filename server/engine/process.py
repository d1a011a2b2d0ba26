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

from server.engine.environment import engine_environment
from server.engine.messages import EngineConfig, FromEngine, Load, Shutdown, ToEngine, decode_from_engine, encode
from server.engine.supervisor import EngineLimits, EngineSupervisor
from server.engine.worker import DEFAULT_FACTORY


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
