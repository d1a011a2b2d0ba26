"""A server from start to end: listen, find the model, start the engine, announce what is served, drain.

The engine process starts first because it takes longest; the HTTP side imports and loads its parts meanwhile. So this
module imports nothing that only the HTTP side needs.
"""

import asyncio
import logging
import signal
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from ipaddress import ip_address
from socket import socket
from typing import TYPE_CHECKING, Any, Protocol

import uvloop
from rich.console import Console

from model_runner.processes import without_collecting
from server.assembly import (
    Checkpoints,
    ModelOnEngine,
    StartError,
    describe_error,
    find_models,
    host_models,
    make_app,
    make_engine,
    warn_if_open,
    warn_if_unused,
)
from server.cli.announcement import Announcer, Milestones
from server.config import Settings
from server.engine.client import EngineState, EngineUnavailableError
from server.http.certificate import Certificate, CertificateError
from server.http.listening import BindError, bind, url_of
from server.logs import configure_logging

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from server.api.services import Services
    from server.engine.kv_publisher import KVPublisher
    from server.http.draining_server import DrainingServer
    from server.page.gate import PageGate


FAILURE_CHECK_S = 1.0
_HOW_TO_CLOSE = (
    "Set a key with --api-key or --api-keys-file, or admit only this machine with --host 127.0.0.1 (the default)."
)


def serve(settings: Settings, started: float) -> None:
    """Serve until a signal ends it. `started` is the time.perf_counter() at which the command began.

    Raises ModelNotFoundError, and StartError if the engine fails for good or an address or file cannot be used.
    """
    console = Console(soft_wrap=True, highlight=False)
    configure_logging(settings.log_format, settings.log_level)
    if settings.log_level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with ExitStack() as stack:
        try:
            certificate = certificate_of(settings)
            listener = stack.enter_context(bind(settings.host, settings.port))
            each = [settings.of_model(entry) for entry in settings.models] or [settings]
            publishers = [stack.enter_context(open_publisher(one)) for one in each]
        except (BindError, CertificateError) as error:
            raise StartError(str(error)) from None
        address = listener.getsockname()[0]
        if not ip_address(address).is_loopback:
            warn_if_open(settings, address, _HOW_TO_CLOSE)
        for one in each:
            warn_if_unused(one)
        found = find_models(settings, console)
        announcer = Announcer(console, started)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_Life(settings, found, listener, certificate, publishers, announcer).run())


def certificate_of(settings: Settings) -> Certificate | None:
    """The certificate that the settings name, checked; None for a server without TLS. Raises CertificateError."""
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return None
    password = settings.ssl_keyfile_password
    certificate = Certificate(
        settings.ssl_certfile, settings.ssl_keyfile, None if password is None else password.get_secret_value()
    )
    certificate.check()
    return certificate


class Engines(Protocol):
    """The engine of the only model, or the host of several models' engines."""

    @property
    def state(self) -> EngineState: ...

    async def start(self) -> None:
        """Begin to load what is loaded at the start, and return at once."""
        ...

    async def wait_ready(self) -> None:
        """Returns when that is loaded; raises EngineUnavailableError if it failed."""
        ...

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running ones finish for at most `grace_s`, then fail the rest."""
        ...

    async def stop(self) -> None:
        """End all engines at once."""
        ...


class _Life:
    def __init__(
        self,
        settings: Settings,
        found: Sequence[tuple[Settings, Checkpoints]],
        listener: socket,
        certificate: Certificate | None,
        publishers: "Sequence[KVPublisher | None]",
        announcer: Announcer,
    ) -> None:
        self._settings = settings
        self._found = found
        self._listener = listener
        self._certificate = certificate
        self._publishers = publishers
        self._announcer = announcer
        self._model_found = announcer.elapsed
        self._page: PageGate | None = None

    async def run(self) -> None:
        engines, models = self._make_engines()
        await engines.start()
        try:
            server, services = await asyncio.to_thread(self._build_server, engines, models)
            http_ready = self._announcer.elapsed
            names = ", ".join(checkpoints.model.name for _, checkpoints in self._found)
            self._announcer.say("Listening", f"{self._address}, loading {names}")
            watch = asyncio.create_task(self._watch(engines, models, server, services, http_ready))
            self._reload_keys_on_hangup(services)
            await server.serve(sockets=[self._listener])
            watch.cancel()
            await asyncio.wait([watch])
        finally:
            if self._page is not None:
                await self._page.close()
            await engines.stop()
        if not watch.cancelled() and (failure := watch.exception()):
            raise failure

    def _make_engines(self) -> tuple[Engines, list[ModelOnEngine]]:
        """The engine of the only model, or the host of several."""
        publish = [None if publisher is None else publisher.publish for publisher in self._publishers]
        if self._settings.models:
            return host_models(self._settings, self._found, publish)
        ((settings, checkpoints),) = self._found
        engine = make_engine(settings, checkpoints, publish[0])
        return engine, [ModelOnEngine(engine, settings, checkpoints)]

    def _reload_keys_on_hangup(self, services: "Services") -> None:
        """Reload the keys on SIGHUP. Without a file of keys, SIGHUP ends the process, as when its terminal closes."""
        if self._settings.api_keys_file is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, services.accounts.keys.reload)

    def _build_server(self, engines: Engines, models: Sequence[ModelOnEngine]) -> tuple["DrainingServer", "Services"]:
        """Make the application. It runs in a thread, so that the event loop can start the engines meanwhile."""
        with without_collecting():
            from server.http.draining_server import DrainingServer, configure  # noqa: PLC0415
            from server.http.origins import guarded  # noqa: PLC0415
            from server.page.gate import WEBSOCKETS, PageGate, is_installed  # noqa: PLC0415

            app = make_app(models, self._settings)
        served: ASGIApp = app
        if self._settings.page and is_installed():
            trusted = None if self._certificate is None else self._certificate.client_context()
            served = self._page = PageGate(app, f"{self._address}/v1", self._settings.root_path, trusted)
        config = configure(
            guarded(served, self._settings.allowed_hosts, has_keys=self._settings.has_keys),
            self._settings.client_timeout_s,
            websockets=app.state.websockets | (WEBSOCKETS if self._page is not None else {}),
            certificate=self._certificate,
        )
        return DrainingServer(config, engines, self._settings.drain_grace_s), app.state.services

    async def _watch(
        self,
        engines: Engines,
        models: Sequence[ModelOnEngine],
        server: "DrainingServer",
        services: "Services",
        http_ready: float,
    ) -> None:
        """Announce the server when it is ready, and end it when an engine that it needs has failed for good."""
        try:
            await self._announce_when_ready(engines, models, services, http_ready)
            while engines.state is not EngineState.FAILED:  # noqa: ASYNC110  (the interface has no such event)
                await asyncio.sleep(FAILURE_CHECK_S)
            raise StartError("the engine failed and could not be restarted; the log above says why")
        except EngineUnavailableError as error:
            if engines.state is EngineState.FAILED:
                raise StartError(str(error)) from None
        except OSError as error:
            raise StartError(describe_error(error)) from None
        finally:
            server.should_exit = True

    async def _announce_when_ready(
        self, engines: Engines, models: Sequence[ModelOnEngine], services: "Services", http_ready: float
    ) -> None:
        """Raises EngineUnavailableError, or OSError if a file of the model cannot be read."""
        announcer, served = self._announcer, services.models.default
        engine_ready, files_hashed = await asyncio.gather(
            self._time_of(engines.wait_ready()), self._time_of(served.fingerprint.wait_known())
        )
        await engines.wait_ready()  # it may have failed while files were hashed
        announcer.say_address(self._address, has_page=self._page is not None)
        if self._settings.models:
            announcer.say_models(models)
            for publisher in self._publishers:
                announcer.say_publisher(publisher)
            announcer.say("Ready in", f"{max(engine_ready, files_hashed):.1f} s")
            return
        announcer.say_model(models[0], served)
        announcer.say_publisher(self._publishers[0])
        started_in = models[0].engine.info.started_in
        milestones = Milestones(self._model_found, http_ready, files_hashed, engine_ready, started_in)
        announcer.say("Ready in", str(milestones))

    @property
    def _address(self) -> str:
        return url_of(self._listener, "http" if self._certificate is None else "https")

    async def _time_of(self, event: Coroutine[Any, Any, None]) -> float:
        await event
        return self._announcer.elapsed


def open_publisher(settings: Settings) -> "AbstractContextManager[KVPublisher | None]":
    """Publish KV events until the context ends, if the settings ask for it. Raises BindError."""
    if settings.kv_events is None:
        return nullcontext()
    try:
        from server.engine.kv_publisher import KVPublisher  # noqa: PLC0415  (pyzmq need not be installed)
    except ImportError:
        raise BindError("kv_events needs pyzmq; run `pip install 'samewise[kv-events]'`") from None
    try:
        return closing(KVPublisher(settings.kv_events, settings.kv_events_topic, settings.kv_events_replay))
    except OSError as error:
        raise BindError(str(error)) from None
