"""The engine process, `python -m server.engine.worker`: builds scheduler and runner and runs the engine's loop.

It is the only server module that uses the runner. It imports the runner inside functions, so importing this module does
not load torch.
"""

import argparse
import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from model_runner.config import RunnerConfig
from model_runner.encoders.folder import find_encoder
from model_runner.kernels.early import build_early
from model_runner.processes import die_with_parent
from scheduler.prefix_cache import CacheLog
from server.engine.beam_stop_strings import StopStringWatches
from server.engine.loop import EXIT_STOPPED, LoadedEngine, run
from server.engine.messages import (
    EngineConfig,
    FrameReader,
    FromEngine,
    Load,
    Shutdown,
    ToEngine,
    decode_to_engine,
    encode,
    framed,
)
from server.logs import configure_logging
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from model_runner.encoders.runner import EncoderRunner
    from model_runner.runner import ModelRunner

_SNAPSHOT_EVERY = 2048
"""A state of Qwen3.5-0.8B takes as much memory as the keys and values of 1,600 tokens."""
PARENT_CHECK_MS = 1000
UNSENT_CHECK_MS = 1
SEND_BUFFER = 4 << 20
"""Bytes that may be in transit to a busy server."""
RECEIVE_BYTES = 1 << 18

Factory = Callable[[EngineConfig], LoadedEngine]


def load_engine(config: EngineConfig) -> LoadedEngine:
    """The real engine. Raises ValueError or OSError, with a message for the user, if the model cannot be served."""
    start = time.perf_counter()
    with _without_collecting():
        from model_runner.models.repository import cache_folder  # noqa: PLC0415

        build_early(cache_folder(), config.runner.device)
        load = _loader(config.runner)
        from scheduler.engine import Engine  # noqa: PLC0415
        from scheduler.interface import SchedulerConfig  # noqa: PLC0415
        from scheduler.scheduler import Scheduler  # noqa: PLC0415

    imports_s = time.perf_counter() - start
    runner = load()
    check_speculation(config.runner, runner.info.speculation_methods)
    has_states = any(group.kind == "page" for group in runner.groups)
    if config.snapshot_every is not None and not has_states:
        raise ValueError("state_snapshot_every needs a model with recurrent layers; remove --state-snapshot-every")
    scheduler_config = SchedulerConfig(
        block_size=runner.info.block_size,
        max_num_seqs=runner.info.max_num_seqs,
        max_num_batched_tokens=runner.info.max_num_batched_tokens,
        max_model_len=runner.info.max_model_len,
        policy=config.policy,
        prefix_caching=config.prefix_caching and runner.info.has_kv_cache,
        sees_images=runner.info.sees_images,
        snapshot_every=_SNAPSHOT_EVERY if config.snapshot_every is None else config.snapshot_every,
    )
    info = replace(runner.info, started_in=(("imports", imports_s), *runner.info.started_in))
    watches = StopStringWatches(partial(Tokenizer.from_folder, config.runner.model))
    cache_log = CacheLog() if config.kv_events else None
    scheduler = Scheduler(
        scheduler_config, runner.num_blocks, watches, cache_log, groups=runner.groups, images=runner.images
    )
    return LoadedEngine(Engine(scheduler, runner), info, runner.close, cache_log)


def _loader(config: RunnerConfig) -> "Callable[[], ModelRunner | EncoderRunner]":
    """The function that loads the runner for the model's kind. Brings torch."""
    encoder = find_encoder(config.model)
    if encoder is None:
        from model_runner.runner import ModelRunner  # noqa: PLC0415

        return partial(ModelRunner.load, config)
    from model_runner.encoders.runner import EncoderRunner  # noqa: PLC0415

    return partial(EncoderRunner.load, config, encoder)


def check_speculation(config: RunnerConfig, methods: tuple[str, ...]) -> None:
    """Raises ValueError if the loaded model does not support the configured speculation method."""
    if config.speculation not in ("off", "auto", *methods):
        raise ValueError(
            f"speculation {config.speculation!r} is not available here; use one of {', '.join(('off', *methods))}"
        )


def _load_for_good(factory: Factory, config: EngineConfig) -> LoadedEngine:
    """Load the engine, then exempt its objects from garbage collection, so that no step waits for it."""
    loaded = factory(config)
    gc.collect()
    gc.freeze()
    return loaded


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Pause garbage collection: imports make half a million permanent objects, and scanning them would take 0.6 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class SocketChannel:
    """The worker's end of the socket. Reads `Shutdown` when the parent process is gone."""

    def __init__(self, descriptor: int, parent: int) -> None:
        """`descriptor` is a connected socket, inherited from the parent process."""
        self._parent = parent
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._reader = FrameReader()
        self._unsent = bytearray()  # bytes that the socket did not accept yet

    def receive(self, *, wait: bool) -> Sequence[ToEngine]:
        """All messages that have arrived. With `wait`, blocks for one, but at most a second."""
        if os.getppid() != self._parent:
            return (Shutdown(),)
        if wait:
            self._flush()
            self._poll.poll(UNSENT_CHECK_MS if self._unsent else PARENT_CHECK_MS)
        messages: list[ToEngine] = []
        try:
            while data := self._socket.recv(RECEIVE_BYTES):
                messages += map(decode_to_engine, self._reader.feed(data))
        except BlockingIOError:
            return messages
        except ConnectionError:
            pass
        return [*messages, Shutdown()]  # the parent has closed its end

    def send(self, message: FromEngine) -> None:
        """Never blocks: bytes that the socket does not accept are sent later."""
        self._unsent += framed(encode(message))
        self._flush()

    def close(self) -> None:
        """Close at once; unsent bytes are dropped, because the parent is shutting this process down or is gone."""
        self._socket.close()

    def _flush(self) -> None:
        """Send as much as the socket accepts. A lost parent is noticed by `receive`."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]


def detach_from_terminal() -> None:
    """Ignore Ctrl-C and SIGTERM: the parent lets running requests finish, then sends `Shutdown`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def resolve_factory(path: str) -> Factory:
    """The function named by `module:name`."""
    module, _, name = path.partition(":")
    factory: Factory = getattr(importlib.import_module(module), name)
    return factory


def wait_for_load(channel: SocketChannel) -> EngineConfig | None:
    """The configuration in the first message, or None for `Shutdown`."""
    while True:
        for message in channel.receive(wait=True):
            return message.config if isinstance(message, Load) else None


def main() -> int:
    """Run one engine from `Load` to `Shutdown`; returns the exit code."""
    parser = argparse.ArgumentParser(description="The engine process of samewise; started by the server.")
    parser.add_argument("--socket", required=True, type=int, help="descriptor of the socket to the server")
    parser.add_argument("--parent", required=True, type=int, help="process id of the server")
    parser.add_argument("--factory", required=True, help="module:function that loads the engine")
    arguments = parser.parse_args()
    detach_from_terminal()
    die_with_parent()
    channel = SocketChannel(arguments.socket, arguments.parent)
    config = wait_for_load(channel)
    if config is None:
        channel.close()
        return EXIT_STOPPED
    configure_logging(config.log_format, config.log_level)
    code = run(partial(_load_for_good, resolve_factory(arguments.factory), config), channel)
    channel.close()
    return code


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    sys.stdout.flush()
    # The interpreter's own shutdown would wait for threads that compile a grammar, and may hang in a broken engine.
    os._exit(exit_code)
