"""What the HTTP side calls: one interface, whether the engine runs in a process of its own or in this one."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from scheduler.interface import EngineRequest, EngineStats, RequestOutput


class EngineState(StrEnum):
    """Where the engine is in its life. Requests are taken only when READY or RESTARTING (they wait)."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine knows once the model is loaded."""

    vocab_size: int
    max_model_len: int
    """Prompt and output together, in tokens."""
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    """Of the weights in products."""
    kv_dtype: str = "float32"
    kernels: str = "none"
    """What runs the model: an instruction set, or a compiler."""
    started_in: tuple[tuple[str, float], ...] = ()
    """What took time at the start, with the seconds that it took."""
    speculation_methods: tuple[str, ...] = ()
    """Methods that a request can name."""
    num_early_exits: int = 0
    """Layers before which the model can be asked for the next token; 0 if it cannot."""


class EngineUnavailableError(Exception):
    """The engine takes no work now: starting, draining or failed. The client may try again later."""


class QueueFullError(Exception):
    """More choices are running and waiting than the server was set up to hold."""


class RequestFailedError(Exception):
    """One request cannot be completed: it failed alone, the engine goes on."""


class EngineClient(Protocol):
    """A running engine. Everything is called from one event loop."""

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> EngineInfo:
        """Raises EngineUnavailableError until the engine has been ready once."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The last snapshot that the engine sent."""
        ...

    @property
    def num_restarts(self) -> int: ...

    async def start(self) -> None:
        """Begin to load the model; returns at once. `wait_ready` waits."""
        ...

    async def wait_ready(self) -> None:
        """Returns when the engine answers; raises EngineUnavailableError when it failed to start."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        """Submit and yield the outputs of all choices as they come, until every choice has finished.

        Closing the generator early aborts what still runs. Raises EngineUnavailableError or QueueFullError before the
        first output, RequestFailedError at any time. A restart of the engine is not seen here: outputs go on where
        they stopped.
        """
        ...

    def abort_choice(self, request_id: str, choice: int) -> None:
        """End one choice of a running request (a stop string was found); no more outputs of it are yielded."""
        ...

    async def drain(self, grace_s: float) -> None:
        """Take no new requests, wait for the running ones at most this long, then fail what is left."""
        ...

    async def stop(self) -> None:
        """End the engine at once."""
        ...
