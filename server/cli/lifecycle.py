"""A server from start to end: listen, find the model, start the engine, announce what is served, drain.

The engine process starts first because it takes longest; the HTTP side imports and loads its parts meanwhile.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from ipaddress import ip_address
from socket import socket
from typing import TYPE_CHECKING, Any

import uvloop
from rich.console import Console
from starlette.types import ASGIApp

from model_runner.models.repository import cache_folder
from server import __version__
from server.assembly import (
    Checkpoints,
    StartError,
    describe_error,
    find_checkpoints,
    make_app,
    make_engine,
    warn_if_open,
    warn_if_unused,
)
from server.config import Settings
from server.engine.client import EngineClient, EngineState, EngineUnavailableError
from server.http.certificate import Certificate, CertificateError
from server.http.draining_server import BindError, DrainingServer, bind, configure, url_of
from server.http.origins import guarded
from server.logs import configure_logging
from server.page.gate import WEBSOCKETS, PageGate, is_installed

if TYPE_CHECKING:
    from server.api.services import Services
    from server.engine.kv_publisher import KVPublisher


FAILURE_CHECK_S = 1.0
_HOW_TO_CLOSE = (
    "Set a key with --api-key or --api-keys-file, or admit only this machine with --host 127.0.0.1 (the default)."
)


@dataclass(frozen=True, slots=True)
class Milestones:
    """Seconds from the start of the command until each part was ready."""

    model_found: float
    http_ready: float
    files_hashed: float
    engine_ready: float
    of_engine: tuple[tuple[str, float], ...]
    """Seconds of each stage of the engine's start, by name."""

    def __str__(self) -> str:
        http = self.http_ready - self.model_found
        files = self.files_hashed - self.model_found
        engine = self.engine_ready - self.model_found
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.of_engine)
        return (
            f"{max(self.files_hashed, self.engine_ready):.1f} s (model found in {self.model_found:.1f} s; then, side "
            f"by side, HTTP and tokenizer in {http:.1f} s, files hashed in {files:.1f} s, "
            f"engine in {engine:.1f} s: {parts})"
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
            publisher = stack.enter_context(open_publisher(settings))
        except (BindError, CertificateError) as error:
            raise StartError(str(error)) from None
        address = listener.getsockname()[0]
        if not ip_address(address).is_loopback:
            warn_if_open(settings, address, _HOW_TO_CLOSE)
        warn_if_unused(settings)
        checkpoints = find_checkpoints(settings, console)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_Life(settings, checkpoints, listener, certificate, publisher, console, started).run())


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


class _Life:
    def __init__(
        self,
        settings: Settings,
        checkpoints: Checkpoints,
        listener: socket,
        certificate: Certificate | None,
        publisher: "KVPublisher | None",
        console: Console,
        started: float,
    ) -> None:
        self._settings = settings
        self._checkpoints = checkpoints
        self._folder = checkpoints.model
        self._listener = listener
        self._certificate = certificate
        self._publisher = publisher
        self._console = console
        self._started = started
        self._model_found = self._elapsed()
        self._page: PageGate | None = None

    async def run(self) -> None:
        publish = None if self._publisher is None else self._publisher.publish
        engine = make_engine(self._settings, self._checkpoints, publish)
        await engine.start()
        try:
            server, services = await asyncio.to_thread(self._build_server, engine)
            http_ready = self._elapsed()
            self._announce("Listening", f"{self._address}, loading {self._folder.name}")
            watch = asyncio.create_task(self._watch(engine, server, services, http_ready))
            self._reload_keys_on_hangup(services)
            await server.serve(sockets=[self._listener])
            watch.cancel()
            await asyncio.wait([watch])
        finally:
            if self._page is not None:
                await self._page.close()
            await engine.stop()
        if not watch.cancelled() and (failure := watch.exception()):
            raise failure

    def _reload_keys_on_hangup(self, services: "Services") -> None:
        """Reload the keys on SIGHUP. Without a file of keys, SIGHUP ends the process, as when its terminal closes."""
        if self._settings.api_keys_file is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, services.accounts.keys.reload)

    def _build_server(self, engine: EngineClient) -> tuple[DrainingServer, "Services"]:
        """Make the application. It runs in a thread, so that the event loop can start the engine meanwhile."""
        app = make_app(engine, self._settings, self._checkpoints)
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
        return DrainingServer(config, engine, self._settings.drain_grace_s), app.state.services

    async def _watch(
        self, engine: EngineClient, server: DrainingServer, services: "Services", http_ready: float
    ) -> None:
        """Announce the server when it is ready, and end it when its engine has failed for good."""
        try:
            await self._announce_when_ready(engine, services, http_ready)
            while engine.state is not EngineState.FAILED:  # noqa: ASYNC110  (the engine's interface has no such event)
                await asyncio.sleep(FAILURE_CHECK_S)
            raise StartError("the engine failed and could not be restarted; the log above says why")
        except EngineUnavailableError as error:
            if engine.state is EngineState.FAILED:
                raise StartError(str(error)) from None
        except OSError as error:
            raise StartError(describe_error(error)) from None
        finally:
            server.should_exit = True

    async def _announce_when_ready(self, engine: EngineClient, services: "Services", http_ready: float) -> None:
        """Raises EngineUnavailableError, or OSError if a file of the model cannot be read."""
        engine_ready, files_hashed = await asyncio.gather(
            self._time_of(engine.wait_ready()), self._time_of(services.models.default.fingerprint.wait_known())
        )
        await engine.wait_ready()  # it may have failed while files were hashed
        started_in = engine.info.started_in
        self._announce_ready(
            engine, services, Milestones(self._model_found, http_ready, files_hashed, engine_ready, started_in)
        )

    def _announce_ready(self, engine: EngineClient, services: "Services", milestones: Milestones) -> None:
        info = engine.info
        tokens = info.num_blocks * info.block_size
        name = ", ".join(self._settings.served_model_name or (self._folder.name,))
        self._announce(f"Samewise {__version__}", f"{self._address}/v1")
        if self._page is not None:
            self._announce("Page", f"{self._address}/")
        self._announce("Model", f"{name}, {info.dtype} weights and {info.rows} rows on {info.device}")
        self._announce("Abilities", str(services.models.default.model.abilities))
        if self._settings.chat_template is not None:
            self._announce("Chat template", str(self._settings.chat_template))
        cache = f"KV cache of {tokens:,} tokens, {tokens / info.max_model_len:.1f} full-length requests"
        held = cache if info.has_kv_cache else "no KV cache"
        self._announce("Context", f"{info.max_model_len:,} tokens; {held}")
        if self._checkpoints.aux_model is not None:
            self._announce("Auxiliary model", self._checkpoints.aux_model.name)
        self._announce("Speculation", describe_speculation(self._settings, info.speculation_methods))
        if self._settings.learn:
            self._announce("Learning", f"heads for speculation, kept in {cache_folder() / 'learnt'}")
        if self._publisher is not None:
            again = "" if self._publisher.replay is None else f", again at {self._publisher.replay}"
            self._announce("KV events", self._publisher.endpoint + again)
        self._announce("Ready in", str(milestones))

    def _announce(self, title: str, text: str) -> None:
        self._console.print(f"[bold]{title:<16}[/bold]", end="")
        self._console.print(text, markup=False)

    @property
    def _address(self) -> str:
        return url_of(self._listener, "http" if self._certificate is None else "https")

    async def _time_of(self, event: Coroutine[Any, Any, None]) -> float:
        await event
        return self._elapsed()

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started


def describe_speculation(settings: Settings, methods: tuple[str, ...]) -> str:
    """Describe the default method, and the methods that requests can choose, for the start summary."""
    if not methods:
        return "none"
    from server.generation.planning.decoding_rules import SpeculationRules  # noqa: PLC0415  (the engine starts before)

    default = SpeculationRules(methods, settings.speculation).default_method
    return f"{default} by default; {', '.join(methods)}; at most {settings.num_draft_tokens} draft tokens in a step"


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
