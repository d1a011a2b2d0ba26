"""What is noted of one HTTP request, for its line in the log and its timeline."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

CLIENT_CLOSED = 499
"""Status of a request whose client left before the response began."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Whom a body is from, for sharing the work that comes before a request is known."""

    name: str
    is_background: bool = False
    """Whether nobody waits for it."""


@dataclass(slots=True)
class RequestRecord:
    """What the access line says about a request; whoever learns something fills it in."""

    request_id: str
    path: str = ""
    answer_id: str | None = None
    """The answer's own; the ids of its requests in the engine's log begin with it."""
    client: str = ""
    """Who asks, as the keys tell: a name that is no secret, empty where there are no keys."""
    is_background: bool = False
    """Whether the server has sent it to itself, for a client that waits for no single answer."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of the answer, whatever it is."""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """What the client says of the trace that it belongs to, as in the headers of the same names."""
    started: float = field(default_factory=time.perf_counter)
    status: int = CLIENT_CLOSED
    stream_error: int | None = None
    """Status of the error that ended a stream, whose own status had been sent before."""
    error: str | None = None
    """The class of what went wrong."""
    answered_at: float | None = None
    """When the response was over, as `started`; from the beginning where nobody waits for one."""
    on_answered: list[Callable[[], None]] = field(default_factory=list)
    """Called then."""
    tokens_in: int | None = None
    tokens_out: int | None = None
    ttft_s: float | None = None
    prompt: str | None = None
    """Only if the server is told to log prompts; so is `output`."""
    output: str | None = None

    def answered(self) -> None:
        """The response is over."""
        self.answered_at = time.perf_counter()
        for tell in self.on_answered:
            tell()

    @property
    def ids(self) -> dict[str, str | None]:
        """For a line of the log."""
        return {"request_id": self.request_id, "answer_id": self.answer_id}
