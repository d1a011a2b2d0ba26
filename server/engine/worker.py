"""The engine process, `python -m server.engine.worker`: plans engines when asked, loads one and runs its loop."""

import argparse
import contextlib
import gc
import importlib
import logging
import os
import select
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

from model_runner.model_needs import DoesNotFitError, ModelNeeds
from model_runner.processes import die_with_parent
from model_runner.refusal import UnsupportedModelError, one_line
from server.engine.loop import EXIT_STOPPED, LoadedEngine, run
from server.engine.messages import (
    EngineConfig,
    FrameReader,
    FromEngine,
    Load,
    Plan,
    PlanFailed,
    Planned,
    Shutdown,
    ToEngine,
    Warmed,
    decode_to_engine,
    encode,
    framed,
)
from server.logs import configure_logging

PARENT_CHECK_MS = 1000
UNSENT_CHECK_MS = 1
SEND_BUFFER = 4 << 20
"""Bytes that may be in transit to a busy server."""
RECEIVE_BYTES = 1 << 18

logger = logging.getLogger("samewise.engine")


class Factory(Protocol):
    """A module that builds engines. Its functions raise ValueError or OSError with a message for the user."""

    def warm(self) -> int:
        """Import what most models need. Returns the private memory of the process afterwards, in bytes."""
        ...

    def plan(self, asked: Plan) -> ModelNeeds:
        """Memory that an engine will need, before it is loaded."""
        ...

    def load(self, config: EngineConfig) -> LoadedEngine: ...


def _load_for_good(load: Callable[[EngineConfig], LoadedEngine], config: EngineConfig) -> LoadedEngine:
    """Load the engine, then exempt its objects from garbage collection, so that no step waits for it."""
    loaded = load(config)
    gc.collect()
    gc.freeze()
    return loaded


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


def wait_for_load(factory: Factory, channel: SocketChannel) -> EngineConfig | None:
    """Answer plans until there is a configuration to load; None for `Shutdown`."""
    while True:
        for message in channel.receive(wait=True):
            match message:
                case Plan():
                    channel.send(_answer(factory, message))
                case Load(config):
                    return config
                case _:
                    return None


def _answer(factory: Factory, asked: Plan) -> Planned | PlanFailed:
    """Plan quietly: the log of the load says the same."""
    config = asked.config
    configure_logging(config.log_format, config.log_level if config.log_level == "debug" else "error")
    try:
        return Planned(factory.plan(asked))
    except (UnsupportedModelError, DoesNotFitError, OSError) as error:
        return PlanFailed(one_line(str(error)))
    except ValueError as error:
        return PlanFailed(one_line(str(error)), may_pass=False)
    except Exception as error:
        logger.exception("The plan of %s failed.", config.runner.model)
        return PlanFailed(
            f"{config.runner.model} cannot be planned ({type(error).__name__}); the log has the traceback"
        )


def main() -> int:
    """Run one engine from `Load` to `Shutdown`; returns the exit code."""
    parser = argparse.ArgumentParser(description="The engine process of samewise; started by the server.")
    parser.add_argument("--socket", required=True, type=int, help="descriptor of the socket to the server")
    parser.add_argument("--parent", required=True, type=int, help="process id of the server")
    parser.add_argument("--factory", required=True, help="module that builds engines")
    parser.add_argument("--warm", action="store_true", help="import what most models need before the first message")
    arguments = parser.parse_args()
    die_with_parent()
    channel = SocketChannel(arguments.socket, arguments.parent)
    factory = cast("Factory", importlib.import_module(arguments.factory))
    if arguments.warm:
        channel.send(Warmed(factory.warm()))
    config = wait_for_load(factory, channel)
    if config is None:
        channel.close()
        return EXIT_STOPPED
    configure_logging(config.log_format, config.log_level)
    code = run(partial(_load_for_good, factory.load, config), channel)
    channel.close()
    return code


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    sys.stdout.flush()
    # The interpreter's own shutdown would wait for threads that compile a grammar, and may hang in a broken engine.
    os._exit(exit_code)
