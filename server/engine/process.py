"""The engine in its own process, behind a pair of sockets."""

import asyncio
import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

from model_runner.processes import describe_end, isolated_module
from server.engine.environment import engine_environment
from server.engine.messages import (
    EngineConfig,
    FrameReader,
    FromEngine,
    Load,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode,
    framed,
)
from server.engine.step_log import StepLog
from server.engine.supervisor import EngineLimits, EngineSupervisor

_MODULE = "server.engine.worker"
"""It is not imported, because its imports would delay the process that needs them."""
_FACTORY = "server.engine.building"


class EngineProcess(EngineSupervisor):
    """The EngineClient of a server: runs the engine in its own process."""

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        publish: Callable[[bytes], None] | None = None,
        open_link: "OpenLink | None" = None,
        steps: StepLog | None = None,
    ) -> None:
        """`open_link` gives an engine process that has loaded nothing yet; by default, it starts one."""
        super().__init__(limits, publish, steps)
        self._config = config
        self._open_link = open_link or ProcessLink.open
        self._process: ProcessLink | None = None

    @property
    def pid(self) -> int | None:
        """The id of the last engine process that was started."""
        return None if self._process is None else self._process.pid

    async def _launch(self) -> "ProcessLink":
        self._process = await self._open_link()
        self._process.send(Load(self._config))
        return self._process


class ProcessLink:
    """A connection to one engine process. Messages of another engine cannot arrive here."""

    def __init__(self, process: asyncio.subprocess.Process, connection: "EngineConnection") -> None:
        self._process = process
        self._connection = connection

    @classmethod
    async def open(cls, factory: str = _FACTORY, *, warm: bool = False) -> "ProcessLink":
        """Start an engine process that shares our standard output and error.

        Args:
            factory: the module that builds engines in the process.
            warm: whether it imports what most models need at once, and says so with `Warmed`.

        Raises:
            OSError: if it cannot be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            _, connection = await asyncio.get_running_loop().create_unix_connection(EngineConnection, sock=ours)
            try:
                command = isolated_module(_MODULE)
                options = ["--socket", str(theirs.fileno()), "--parent", str(os.getpid()), "--factory", factory]
                options += ["--warm"] if warm else []
                process = await asyncio.create_subprocess_exec(
                    *command,
                    *options,
                    stdin=asyncio.subprocess.DEVNULL,
                    env=engine_environment(),
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                await connection.close()
                raise OSError(f"cannot run {sys.executable}: {error}") from error
            except BaseException:
                await connection.close()
                raise
        return cls(process, connection)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs. It knows of an end at once, before `exited` returns."""
        if self._process.returncode is not None:
            return False
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        return False

    def send(self, message: ToEngine) -> None:
        self._connection.send(encode(message))

    async def receive(self) -> FromEngine:
        return decode_from_engine(await self._connection.receive())

    async def exited(self) -> str:
        return describe_end(self.pid, await self._process.wait())

    async def close(self, grace_s: float) -> None:
        """End and reap the process, and close the connection."""
        try:
            self.send(Shutdown())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        finally:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            await self._connection.close()
            await self._process.wait()


OpenLink = Callable[[], Awaitable[ProcessLink]]
"""Gives an engine process that has loaded nothing yet. Raises OSError if there is none."""


class EngineConnection(asyncio.Protocol):
    """Our end of a socket pair; the engine process has the other."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._received: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received.extend(self._reader.feed(data))
        if self._received:
            self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()

    def send(self, payload: bytes) -> None:
        """Never blocks. Messages to a dead engine are lost."""
        if not self._lost.is_set():
            self._transport.write(framed(payload))

    async def receive(self) -> bytes:
        """The next frame. Waits forever once the engine is dead."""
        while not self._received:
            self._news.clear()
            await self._news.wait()
        return self._received.popleft()

    async def close(self) -> None:
        """Close at once; unsent messages are dropped."""
        self._transport.abort()
        await self._lost.wait()
