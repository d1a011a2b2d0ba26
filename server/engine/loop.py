"""The engine's main loop: messages in, steps, messages out. It runs in its own process or in a thread."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from model_runner.refusal import one_line
from model_runner.runner_interface import LearningStats, RunnerInfo
from scheduler.interface import ChoiceHistory, EngineRequest, EngineStats, RequestOutput
from scheduler.prefix_cache import CacheLog
from server.engine.kv_events import encode_batch
from server.engine.messages import (
    Abort,
    Aborted,
    Explain,
    Explained,
    FromEngine,
    LoadFailed,
    Ready,
    Rejected,
    Shutdown,
    StepDone,
    Submit,
    ToEngine,
)

logger = logging.getLogger("samewise.engine")

EXIT_STOPPED = 0
EXIT_LOAD_FAILED = 65
EXIT_CRASHED = 70


class Engine(Protocol):
    """The engine as the loop uses it, implemented by `scheduler.engine.Engine`."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: EngineRequest) -> None:
        """Raises ValueError if the request can never run."""
        ...

    def abort(self, request_id: str, choice: int | None = None) -> Sequence[ChoiceHistory]:
        """End one choice, or all of them. Returns the histories of the choices that this ended."""
        ...

    def explain(self, request_id: str) -> Sequence[ChoiceHistory]:
        """Histories of a request's unfinished choices; empty if it is unknown."""
        ...

    def step(self) -> Sequence[RequestOutput]: ...

    def stats(self) -> EngineStats: ...

    def check_integrity(self) -> None: ...


class Channel(Protocol):
    """The engine's end of the connection to the client."""

    def receive(self, *, wait: bool) -> Sequence[ToEngine]:
        """All messages that have arrived. With `wait`, blocks until there is one, but may sometimes return none."""
        ...

    def send(self, message: FromEngine) -> None:
        """Never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A ready engine and its description."""

    engine: Engine
    info: RunnerInfo
    close: Callable[[], None] = lambda: None
    """Ends threads and processes that the engine started."""
    cache_log: CacheLog | None = None
    """Changes of the prefix cache; None if they are not published."""


def run(load: Callable[[], LoadedEngine], channel: Channel) -> int:
    """Load, then serve until `Shutdown`. Returns the exit code; failures are logged here.

    A ValueError or OSError of `load` is sent as a message for the user, without a trace.
    """
    try:
        loaded = load()
    except (ValueError, OSError) as error:
        channel.send(LoadFailed(one_line(str(error))))
        while Shutdown() not in channel.receive(wait=True):  # exiting now could lose the message
            pass
        return EXIT_LOAD_FAILED
    except Exception:
        logger.exception("The engine crashed while loading the model.")
        return EXIT_CRASHED
    channel.send(Ready(loaded.info))
    loop = EngineLoop(loaded.engine, channel, loaded.cache_log)
    try:
        loop.serve()
    except Exception:
        logger.exception(
            "The engine crashed in a step and exits; the server starts another. Requests in it: %s",
            ", ".join(loop.request_ids) or "none",
        )
        return EXIT_CRASHED
    loaded.close()
    return EXIT_STOPPED


class EngineLoop:
    """Passes messages from a channel to an engine, and its outputs back."""

    def __init__(self, engine: Engine, channel: Channel, cache_log: CacheLog | None = None) -> None:
        self._engine = engine
        self._channel = channel
        self._cache_log = cache_log
        self._unfinished: dict[str, set[int]] = {}  # choices by request id
        self._learnt: LearningStats | None = None
        """Last reported learning statistics. Learning continues while there is no work."""

    @property
    def request_ids(self) -> list[str]:
        """The requests that have not finished."""
        return list(self._unfinished)

    def serve(self) -> None:
        """Step while there is work, otherwise wait for messages. Returns on `Shutdown`."""
        while True:
            messages = self._channel.receive(wait=not self._engine.has_work)
            for message in messages:
                if isinstance(message, Shutdown):
                    return
                self._apply(message)
            if self._engine.has_work:
                self._step()
            elif messages or self._engine.stats().learning != self._learnt:  # all work was aborted or rejected
                self._report(())

    def _apply(self, message: ToEngine) -> None:
        match message:
            case Submit(request):
                self._submit(request)
            case Abort(request_id, choice):
                histories = self._abort(request_id, choice)
                self._channel.send(Aborted(request_id, choice, tuple(histories)))
            case Explain(request_id):
                self._channel.send(Explained(request_id, tuple(self._engine.explain(request_id))))
            case _:
                raise TypeError(f"a running engine does not accept {type(message).__name__}")

    def _submit(self, request: EngineRequest) -> None:
        try:
            self._engine.add(request)
        except ValueError as error:
            self._channel.send(Rejected(request.request_id, str(error)))
        else:
            self._unfinished[request.request_id] = {choice.index for choice in request.choices}

    def _abort(self, request_id: str, choice: int | None) -> Sequence[ChoiceHistory]:
        unfinished = self._unfinished.get(request_id, set())
        if not unfinished or choice not in {None, *unfinished}:
            return ()
        if choice is None:
            del self._unfinished[request_id]
        else:
            self._finish(request_id, choice)
        return self._engine.abort(request_id, choice)

    def _step(self) -> None:
        outputs = tuple(self._engine.step())
        for output in outputs:
            if output.finish_reason is not None:
                self._finish(output.request_id, output.choice)
        self._report(outputs)

    def _finish(self, request_id: str, choice: int) -> None:
        unfinished = self._unfinished.get(request_id, set())
        unfinished.discard(choice)
        if not unfinished:
            self._unfinished.pop(request_id, None)

    def _report(self, outputs: tuple[RequestOutput, ...]) -> None:
        stats = self._engine.stats()
        self._learnt = stats.learning
        events = [] if self._cache_log is None else self._cache_log.take()
        batch = encode_batch(events, time.time()) if events else None
        self._channel.send(StepDone(outputs, stats, batch))
        if not self._engine.has_work:
            self._engine.check_integrity()
