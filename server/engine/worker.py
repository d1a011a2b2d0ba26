"""The engine process, `python -m server.engine.worker`: builds scheduler and runner and runs the engine's loop.

The only module of the server that knows the runner, and it imports it only in this process: importing the module
costs no torch.
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

from model_runner.config import RunnerConfig
from model_runner.processes import die_with_parent
from scheduler.prefix_cache import CacheLog
from server.engine.beam_stop_strings import StopWatches
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

_ALLOCATOR, _OLD_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


DEFAULT_FACTORY = "server.engine.worker:load_engine"

PARENT_CHECK_MS = 1000
UNSENT_CHECK_MS = 1
SEND_BUFFER = 4 << 20
"""Bytes that may be on their way to a server that is busy."""
RECEIVE_BYTES = 1 << 18

Factory = Callable[[EngineConfig], LoadedEngine]


def load_engine(config: EngineConfig) -> LoadedEngine:
    """The real engine. Raises ValueError or OSError, in words for the user, if the model cannot be served."""
    start = time.perf_counter()
    with _without_collecting():
        from model_runner.runner import ModelRunner  # noqa: PLC0415  (brings torch)
        from scheduler.engine import Engine  # noqa: PLC0415
        from scheduler.interface import SchedulerConfig  # noqa: PLC0415
        from scheduler.scheduler import Scheduler  # noqa: PLC0415

    imports_s = time.perf_counter() - start
    runner = ModelRunner.load(config.runner)
    check_speculation(config.runner, runner.info.speculation_methods)
    scheduler_config = SchedulerConfig(
        block_size=runner.info.block_size,
        max_num_seqs=runner.info.max_num_seqs,
        max_num_batched_tokens=runner.info.max_num_batched_tokens,
        max_model_len=runner.info.max_model_len,
        policy=config.policy,
        prefix_caching=config.prefix_caching,
    )
    info = replace(runner.info, started_in=(("imports", imports_s), *runner.info.started_in))
    watches = StopWatches(partial(Tokenizer.from_folder, config.runner.model))
    cache_log = CacheLog() if config.kv_events else None
    scheduler = Scheduler(scheduler_config, runner.info.num_blocks, watches, cache_log)
    return LoadedEngine(Engine(scheduler, runner), info, runner.close, cache_log)


def check_speculation(config: RunnerConfig, methods: tuple[str, ...]) -> None:
    """Raises ValueError if the loaded model does not have the method of requests that name none."""
    if config.speculation not in ("off", "auto", *methods):
        raise ValueError(f"speculation by {config.speculation} is not possible here; there is {', '.join(methods)}")


def _load_for_good(factory: Factory, config: EngineConfig) -> LoadedEngine:
    """Load the engine. What is there then stays: no step waits for a search for garbage in it."""
    loaded = factory(config)
    gc.collect()
    gc.freeze()
    return loaded


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Imports make half a million objects that all stay: looking for garbage among them would take 0.6 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class SocketChannel:
    """The worker's end of the socket. Reads `Shutdown` when the parent process is gone."""

    def __init__(self, descriptor: int, parent: int) -> None:
        """`descriptor` is that of a connected socket, which the process has from its parent."""
        self._parent = parent
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._reader = FrameReader()
        self._unsent = bytearray()  # what the socket had no room for

    def receive(self, *, wait: bool) -> Sequence[ToEngine]:
        """All messages that are there; with `wait`, blocks for one, at most a second."""
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
        """Never blocks: what there is no room for goes with the next message, or when there is nothing else to do."""
        self._unsent += framed(encode(message))
        self._flush()

    def close(self) -> None:
        """Nothing that was not sent yet is waited for: whoever closes has been told to, or has lost its parent."""
        self._socket.close()

    def _flush(self) -> None:
        """A parent that is gone is noticed where its messages are read."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]


def detach_from_terminal() -> None:
    """Leave Ctrl-C and SIGTERM to the parent: it lets running requests finish, then tells this process to exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def resolve_factory(path: str) -> Factory:
    """The function that `module:name` names."""
    module, _, name = path.partition(":")
    factory: Factory = getattr(importlib.import_module(module), name)
    return factory


def wait_for_load(channel: SocketChannel) -> EngineConfig | None:
    """The first message's configuration; None when told to shut down instead."""
    while True:
        for message in channel.receive(wait=True):
            return message.config if isinstance(message, Load) else None


def main() -> int:
    """Run one engine from `Load` to `Shutdown`; returns the exit code."""
    parser = argparse.ArgumentParser(description="The engine process of samewise; started by the server.")
    parser.add_argument("--socket", required=True, type=int, help="descriptor of the socket to the server")
    parser.add_argument("--parent", required=True, type=int, help="process id of the server")
    parser.add_argument("--factory", default=DEFAULT_FACTORY, help="module:function that loads the engine")
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
