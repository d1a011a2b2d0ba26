"""uvicorn with our settings and shutdown: the first signal drains, the second stops at once."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from server.http.certificate import Certificate
from server.http.connection import AnsweringConnection, limited_connection

KEEP_ALIVE_S = 75
"""Idle connections live longer here than in the pools of clients and load balancers, which then close them first."""
CLOSING_S = 3
"""Time for the errors of unfinished requests to reach their clients."""
DELIVERY_CHECK_S = 0.05

logger = logging.getLogger("samewise.server")


def configure(
    app: ASGIApp,
    client_timeout_s: float,
    websockets: Mapping[str, int] | None = None,
    certificate: Certificate | None = None,
) -> uvicorn.Config:
    """Make uvicorn's settings. It logs nothing itself, because the application logs requests.

    `websockets` is passed to `limited_connection`. With a certificate the server speaks HTTPS.
    """
    tls: dict[str, Any] = {}
    if certificate is not None:
        tls = {"ssl_certfile": certificate.certificate, "ssl_keyfile": certificate.key}
        tls["ssl_keyfile_password"] = certificate.password
    return uvicorn.Config(
        app,
        **tls,
        http=limited_connection(client_timeout_s, websockets),
        ws="none",  # LimitedConnection accepts them itself
        ws_per_message_deflate=False,  # one read could unpack to a thousand of the largest messages
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # anyone could forge an address
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSING_S,
    )


class Drainable(Protocol):
    """An engine, or the host of several."""

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running ones finish for at most `grace_s`, then fail the rest."""
        ...

    async def stop(self) -> None:
        """End it at once."""
        ...


class DrainingServer(uvicorn.Server):
    """Drains on SIGTERM and SIGINT: refuses new work while running requests finish, then exits without an error.

    `grace_s` covers both the engine's work on them and their clients' reading of the answers. Meanwhile the server
    still listens, so that /ready and new requests get a 503.
    """

    def __init__(self, config: uvicorn.Config, engine: "Drainable", grace_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._grace_s = grace_s
        self._ending: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and exempt all objects made so far from garbage collection, which would take 50 ms each time."""
        await super().startup(sockets)
        gc.collect()
        gc.freeze()

    def end(self) -> None:
        """Drain and stop; the second call stops at once."""
        first = not self._ending
        self._ending.append(asyncio.create_task(self._drain() if first else self._stop()))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for one in signals:
            loop.add_signal_handler(one, self.end)
        try:
            yield
        finally:
            for one in signals:
                loop.remove_signal_handler(one)

    async def _drain(self) -> None:
        logger.info("Draining: new requests are refused. A second signal stops the server at once.")
        deadline = asyncio.get_running_loop().time() + self._grace_s
        await self._engine.drain(self._grace_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._deliver()
        self.should_exit = True

    async def _deliver(self) -> None:
        """Wait until clients have read the answers in flight, except answers to later requests."""
        waiting = {one for one in self._connections() if one.owes_answer}
        if waiting:
            logger.info("Draining: %d answers are still being read by their clients.", len(waiting))
        while waiting and not self.force_exit:
            await asyncio.sleep(DELIVERY_CHECK_S)
            waiting = {one for one in waiting & self._connections() if one.owes_answer}

    def _connections(self) -> set[AnsweringConnection]:
        """The open connections."""
        return {one for one in self.server_state.connections if isinstance(one, AnsweringConnection)}

    async def _stop(self) -> None:
        self.force_exit = self.should_exit = True
        await self._engine.stop()
