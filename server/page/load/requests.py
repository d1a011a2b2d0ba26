"""The server's records of recent requests, and how the page shows them."""

import msgspec

from server.page.load.figures import NOTHING, Bar, Figures, Table, bar, duration

PHASES = ("before", "queue", "prefill", "decode", "after")


class Times(msgspec.Struct):
    """Phases of a request or choice in milliseconds; None if a phase was not reached."""

    total: float | None = None
    before: float | None = None
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    after: float | None = None


class Drafts(msgspec.Struct):
    """Draft tokens of one speculation method."""

    method: str
    accepted_tokens: int
    rejected_tokens: int


class Choice(msgspec.Struct):
    """A choice of a request."""

    prompt: int
    index: int
    state: str
    finish_reason: str | None = None
    times_ms: Times | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    steps: int | None = None
    preemptions: int | None = None
    drafts: list[Drafts] = []


class RequestRecord(msgspec.Struct):
    """A record of /v1/requests."""

    id: str
    state: str
    endpoint: str
    model: str
    started_at: float
    """Unix time in seconds."""
    times_ms: Times
    status: int | None = None
    error: str | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    time_to_first_token_ms: float | None = None
    steps: int | None = None
    prefill_chunks: int | None = None
    preemptions: int | None = None
    waited_again_ms: float | None = None
    drafts: list[Drafts] = []
    restarts: list[float] = []
    num_choices: int = 0
    choices: list[Choice] = []

    @property
    def is_running(self) -> bool:
        return self.state == "running"


class RequestList(msgspec.Struct):
    """The answer of /v1/requests, newest first."""

    data: list[RequestRecord]


class Row(msgspec.Struct, frozen=True):
    """A row of the requests table."""

    id: str
    started_at: float
    """Unix time in seconds; the browser shows it in its time zone."""
    endpoint: str
    is_running: bool
    outcome: str
    is_problem: bool
    tokens_in: str
    tokens_out: str
    first_token: str
    total: str
    time: Bar | None
    """The request's phases; None while it runs, or if they are unknown."""


class Details(msgspec.Struct, frozen=True):
    """The contents of an expanded row."""

    figures: Figures
    choices: Table | None


def row_of(record: RequestRecord) -> Row:
    """The table row of a request."""
    cached = f" ({record.cached_tokens:,} cached)" if record.cached_tokens else ""
    return Row(
        id=record.id,
        started_at=record.started_at,
        endpoint=record.endpoint.removeprefix("/v1"),
        is_running=record.is_running,
        outcome=_outcome(record),
        is_problem=record.error is not None or (record.status or 0) >= 400,
        tokens_in=f"{record.input_tokens:,}{cached}",
        tokens_out=f"{record.output_tokens:,}",
        first_token=_ms(record.time_to_first_token_ms),
        total=_ms(record.times_ms.total),
        time=None if record.is_running else _time_of(record),
    )


def details_of(record: RequestRecord) -> Details:
    """The contents of a request's expanded row."""
    return Details(_figures(record), _choices(record.choices))


def _outcome(record: RequestRecord) -> str:
    if record.is_running:
        return "running"
    status = "ended" if record.status is None else str(record.status)
    if record.status == 200 and record.error is None:
        return "OK"
    return f"{status} {record.error}" if record.error else status


def _time_of(record: RequestRecord) -> Bar | None:
    known = {name: spent for name in PHASES if (spent := getattr(record.times_ms, name)) is not None}
    whole = sum(known.values())
    if not whole:
        return None
    return bar("Time by phase", ((name, name, _ms(spent), spent / whole) for name, spent in known.items()))


def _figures(record: RequestRecord) -> Figures:
    figures = {"Request": record.id, "Model": record.model}
    phases = {name.capitalize(): getattr(record.times_ms, name) for name in PHASES}
    phases["Requeued"] = record.waited_again_ms or None
    figures |= {name: _ms(spent) for name, spent in phases.items() if spent is not None}
    counts = {"Steps": record.steps, "Prefill chunks": record.prefill_chunks, "Preemptions": record.preemptions}
    figures |= {name: f"{number:,}" for name, number in counts.items() if number is not None}
    figures |= {f"Drafts by {drafts.method}": _drafted(drafts) for drafts in record.drafts}
    if record.restarts:
        figures["Engine restarts"] = str(len(record.restarts))
    if record.num_choices > len(record.choices):
        figures["Choices"] = f"{record.num_choices:,} (first {len(record.choices)} shown)"
    return figures


def _choices(choices: list[Choice]) -> Table | None:
    if not choices:
        return None
    columns = ["Choice", "State", "Cached", "Out", "Queue", "Prefill", "Decode", "Steps", "Preemptions", "Drafts"]
    return Table(columns, [_choice(choice) for choice in choices])


def _choice(choice: Choice) -> list[str]:
    times = choice.times_ms or Times()
    return [
        f"{choice.prompt}.{choice.index}",
        choice.finish_reason or choice.state,
        _count(choice.cached_tokens),
        _count(choice.output_tokens),
        *(_ms(spent) for spent in (times.queue, times.prefill, times.decode)),
        _count(choice.steps),
        _count(choice.preemptions),
        "; ".join(f"{drafts.method} {_drafted(drafts)}" for drafts in choice.drafts) or NOTHING,
    ]


def _drafted(drafts: Drafts) -> str:
    return f"{drafts.accepted_tokens:,} of {drafts.accepted_tokens + drafts.rejected_tokens:,} accepted"


def _count(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"


def _ms(value: float | None) -> str:
    return duration(None if value is None else value / 1000)
