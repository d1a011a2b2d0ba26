"""What became of requests, in words."""

from collections.abc import Iterator

import msgspec

from server.client import formats
from server.page.load.records import Choice, ChoiceTimes, Drafts, RequestRecord
from server.page.load.shapes import Bar, Figure, Table, bar, part

PHASES = ("before", "queue", "prefill", "decode", "after")
_NOTHING = "–"


class Row(msgspec.Struct, frozen=True):
    """A request in the list of them."""

    id: str
    started_at: float
    """Unix time in seconds: the browser knows what that is where it stands."""
    endpoint: str
    is_running: bool
    outcome: str
    is_problem: bool
    tokens_in: str
    tokens_out: str
    first_token: str
    total: str
    time: Bar | None
    """Where it went; None while the request runs, or where that is not known."""


class Details(msgspec.Struct, frozen=True):
    """All that is known of a request."""

    figures: list[Figure]
    choices: Table | None


def row_of(record: RequestRecord) -> Row:
    """For the list."""
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
        first_token=_milliseconds(record.time_to_first_token_ms),
        total=_milliseconds(record.times_ms.total),
        time=None if record.is_running else _time_of(record),
    )


def details_of(record: RequestRecord) -> Details:
    """For who looks closer."""
    return Details(list(_figures(record)), _choices(record.choices))


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
    parts = [part(name, name, _milliseconds(spent), spent / whole) for name, spent in known.items()]
    return bar("Where the time went", parts)


def _figures(record: RequestRecord) -> Iterator[Figure]:
    yield Figure("Request", record.id)
    yield Figure("Model", record.model)
    for name in PHASES:
        spent = getattr(record.times_ms, name)
        if spent is not None:
            yield Figure(name.capitalize(), _milliseconds(spent))
    if record.waited_again_ms:
        yield Figure("Waited again", _milliseconds(record.waited_again_ms))
    counts = {"Steps": record.steps, "Prefill chunks": record.prefill_chunks, "Preemptions": record.preemptions}
    for name, value in counts.items():
        if value is not None:
            yield Figure(name, f"{value:,}")
    for drafts in record.drafts:
        yield Figure(f"Drafts by {drafts.method}", _drafted(drafts))
    if record.restarts:
        yield Figure("Engine restarts", str(len(record.restarts)))
    if record.num_choices > len(record.choices):
        yield Figure("Choices", f"{record.num_choices:,}, of which the first {len(record.choices)} are shown")


def _choices(choices: list[Choice]) -> Table | None:
    if not choices:
        return None
    columns = ["Choice", "State", "Cached", "Out", "Queue", "Prefill", "Decode", "Steps", "Preemptions", "Drafts"]
    return Table(columns, [_choice(choice) for choice in choices])


def _choice(choice: Choice) -> list[str]:
    times = choice.times_ms or ChoiceTimes()
    return [
        f"{choice.prompt}.{choice.index}",
        choice.finish_reason or choice.state,
        _count(choice.cached_tokens),
        _count(choice.output_tokens),
        *(_milliseconds(spent) for spent in (times.queue, times.prefill, times.decode)),
        _count(choice.steps),
        _count(choice.preemptions),
        "; ".join(f"{drafts.method} {_drafted(drafts)}" for drafts in choice.drafts) or _NOTHING,
    ]


def _drafted(drafts: Drafts) -> str:
    return f"{drafts.accepted_tokens:,} of {drafts.accepted_tokens + drafts.rejected_tokens:,} accepted"


def _count(value: int | None) -> str:
    return _NOTHING if value is None else f"{value:,}"


def _milliseconds(value: float | None) -> str:
    return _NOTHING if value is None else formats.duration(value / 1000)
