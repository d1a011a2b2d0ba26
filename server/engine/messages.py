"""Messages between the HTTP process and the engine process, as msgpack.

Every message is one frame: four bytes of length, then the payload. A new engine process answers any number of `Plan`,
and then `Load` with `Ready` or `LoadFailed`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from model_runner.config import RunnerConfig
from model_runner.model_needs import ModelNeeds
from model_runner.runner_interface import RunnerInfo
from scheduler.interface import ChoiceHistory, EngineRequest, EngineStats, Policy, RequestOutput

_LENGTH_BYTES = 4


def framed(payload: bytes) -> bytes:
    """The payload as one frame. Raises OverflowError from 4 GiB on."""
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


class FrameReader:
    """Joins the pieces of a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that these bytes complete."""
        self._buffer += data
        start, end = 0, len(self._buffer)
        while end - start >= _LENGTH_BYTES:
            payload = start + _LENGTH_BYTES
            length = int.from_bytes(self._buffer[start:payload], "big")
            if end - payload < length:
                break
            yield bytes(memoryview(self._buffer)[payload : payload + length])
            start = payload + length
        del self._buffer[:start]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of an engine process."""

    runner: RunnerConfig
    policy: Policy = "fcfs"
    prefix_caching: bool = True
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    kv_events: bool = False
    """Whether to report changes of the prefix cache."""
    snapshot_every: int | None = None
    """`SchedulerConfig.snapshot_every`; None: the default of models with recurrent layers."""


class Plan(msgspec.Struct, frozen=True, tag=True):
    """Find out what an engine will need; only before `Load`. Answered by `Planned` or `PlanFailed`."""

    config: EngineConfig
    budgets: dict[str, int] = {}
    """Memory that the process may take in all, by the kind of its device ("cpu", "cuda"); without an entry, what the
    device has free."""
    cache_share: float | None = None
    """Share of the memory that the weights leave free that goes to a cache without a configured size; None: the
    platform's."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load the model and become ready."""

    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Run a request, from its start or from the outputs that its choices already have."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End one choice of a request, or all of them. Unknown choices have finished already and are no error.

    Answered by `Aborted`.
    """

    request_id: str
    choice: int | None = None


class Explain(msgspec.Struct, frozen=True, tag=True):
    """Ask for the history of a request's unfinished choices. Answered by `Explained`, between two steps."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Exit with code 0."""


class Warmed(msgspec.Struct, frozen=True, tag=True):
    """A process that was started to wait for `Load` has imported everything. Sent once, before all answers."""

    num_bytes: int
    """The private memory of the process."""


class Planned(msgspec.Struct, frozen=True, tag=True):
    """Memory that the engine will need."""

    needs: ModelNeeds


class PlanFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be served, or not with so much memory. The message is for the person who configured it."""

    message: str
    may_pass: bool = True
    """Whether it may be served later with the same settings: when memory is free, or files are repaired."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded, and the engine accepts requests."""

    info: RunnerInfo


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be served. The message is for the person who started the server."""

    message: str


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """The outputs of one step and the state after it. Sent after every step, even without outputs."""

    outputs: tuple[RequestOutput, ...]
    stats: EngineStats
    kv_events: bytes | None = None
    """Changes of the prefix cache as an encoded batch (kv_events.py); None without changes or subscribers."""


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The request can never run here, for instance because it does not fit."""

    request_id: str
    reason: str


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """The choices that an `Abort` named do not run any more."""

    request_id: str
    choice: int | None
    """The `choice` of the `Abort`."""
    histories: tuple[ChoiceHistory, ...]
    """Histories of the choices that this abort ended. Choices that ended earlier were reported before."""


class Explained(msgspec.Struct, frozen=True, tag=True):
    """The history of a request so far."""

    request_id: str
    histories: tuple[ChoiceHistory, ...]
    """One for each unfinished choice; empty if the request is unknown."""


ToEngine = Plan | Load | Submit | Abort | Explain | Shutdown
FromEngine = Warmed | Planned | PlanFailed | Ready | LoadFailed | StepDone | Rejected | Aborted | Explained


def _to_plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no wire format")


def _from_plain(kind: type, value: Any) -> Path:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} has no wire format")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=_from_plain)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The message as one frame."""
    return _ENCODER.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Raises msgspec.DecodeError for a frame that `encode` did not make."""
    return _TO_ENGINE.decode(frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    """Raises msgspec.DecodeError for a frame that `encode` did not make."""
    return _FROM_ENGINE.decode(frame)
