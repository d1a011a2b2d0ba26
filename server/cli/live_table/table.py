"""How the numbers look on a terminal, narrow or wide."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from server.cli.console import printable
from server.client import formats
from server.client.load import Load, Quantile, together
from server.client.snapshot import Source

_WIDE = 132
"""Characters that one table for all takes."""
_MOST_TENANTS = 5
_NOTHING = Text("–", style="dim")
_LATENCIES = (
    ("TTFT", "time_to_first_token_seconds"),
    ("ITL", "inter_token_latency_seconds"),
    ("E2E", "e2e_request_latency_seconds"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A model on a server or on one of its replicas, or all of them."""

    name: str
    load: Load


@dataclass(frozen=True, slots=True)
class Screen:
    """All that is shown at a time. Rendered by rich, to the width that it has."""

    title: str
    """What all rows have in common; a single one needs no name beside it."""
    rows: Sequence[Row]
    problems: Sequence[str]
    seconds: float
    """What rates and latencies are of."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = (_LOAD, _LATENCY) if options.max_width < _WIDE else ((*_LOAD, *_LATENCY),)
        yield Text(printable(self.title), style="bold")
        yield Text()
        if self.rows:
            rows = [*self.rows, *_total(self.rows)]
            all_of_it = together([row.load for row in self.rows])
            for columns in parts:
                yield _table(columns, rows, options.max_width)
                yield Text()
            details = [table for table in (_speculation(all_of_it), _tenants(all_of_it), _learning(all_of_it)) if table]
            if details:
                yield Columns(details, padding=(0, 4))
                yield Text()
            yield Text(f"rates and latencies over {self.seconds:.0f} s, p50 and p95", style="dim")
        for problem in self.problems:
            yield Text(printable(problem), style="red")


def screen_of(loads: Mapping[str, Mapping[Source, Load]], problems: Sequence[str], seconds: float) -> Screen:
    """Of servers, what they serve; what is the same in all rows is in the title."""
    named = [(server, source, load) for server, of_server in loads.items() for source, load in of_server.items()]
    models = {source.model for _, source, _ in named}
    replicas = {source.replica for _, source, _ in named}
    rows = [
        Row(
            _join(server * (len(loads) > 1), source.replica * (len(replicas) > 1), source.model * (len(models) > 1)),
            load,
        )
        for server, source, load in named
    ]
    title = [names for names in (models, loads, replicas) if len(names) == 1]
    return Screen(_join(*(name for names in title for name in names)), rows, problems, seconds)


def _join(*names: str) -> str:
    return "  ".join(name for name in names if name)


def _total(rows: Sequence[Row]) -> Iterator[Row]:
    if len(rows) > 1:
        yield Row("total", together([row.load for row in rows]))


@dataclass(frozen=True, slots=True)
class _Column:
    """Numbers to the right of the name; `width` is the most that they take."""

    header: str
    width: int
    value: Callable[[Load], Text]
    justify: Literal["left", "right"] = "right"


def _table(columns: Sequence[_Column], rows: Sequence[Row], width: int) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for_numbers = sum(column.width + 2 for column in columns)
    name_width = max(8, width - for_numbers) if rows[0].name else 0
    table.add_column("", max_width=name_width, no_wrap=True, overflow="ellipsis")
    for column in columns:
        table.add_column(column.header, width=column.width, justify=column.justify, no_wrap=True)
    for row in rows:
        name = Text(printable(row.name), style="bold")
        table.add_row(name, *(column.value(row.load) for column in columns))
    return table


def _speculation(load: Load) -> Table | None:
    if not load.speculation:
        return None
    table = _small_table("speculation", "accepted", "tokens a step")
    for method in load.speculation:
        table.add_row(
            printable(method.method) or "all", _share(method.acceptance), Text(f"{method.tokens_per_step:.2f}")
        )
    return table


def _tenants(load: Load) -> Table | None:
    if not any(tenant for tenant, _ in load.tenants):
        return None  # there are no keys
    table = _small_table("tenant", "tokens/s")
    for tenant, rate in load.tenants[:_MOST_TENANTS]:
        table.add_row(printable(tenant) or "without a name", _rate(rate))
    rest = load.tenants[_MOST_TENANTS:]
    if rest:
        table.add_row(Text(f"{len(rest)} more", style="dim"), _rate(sum(rate for _, rate in rest)))
    return table


def _learning(load: Load) -> Table | None:
    learning = load.learning
    if learning is None:
        return None
    table = _small_table("learning", "")
    for name, value in (("at the start", learning.tokens_per_step_first), ("now", learning.tokens_per_step_current)):
        table.add_row(f"tokens a step {name}", _NOTHING if value is None else Text(f"{value:.2f}"))
    table.add_row("heads put to use", _count(learning.publications))
    table.add_row("taken back", _count(learning.rollbacks))
    return table


def _small_table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left", no_wrap=True)
    return table


def _state(load: Load) -> Text:
    styles = {"ready": "green", "up": "green", "failed": "bold red"}
    return Text(printable(load.state), style=styles.get(load.state, "yellow"))


def _count(value: float | None) -> Text:
    return _NOTHING if value is None else Text(formats.count(value))


def _alarming(value: float | None) -> Text:
    """A number that is best 0."""
    text = _count(value)
    return Text(text.plain, style="yellow") if value else text


def _rate(value: float | None) -> Text:
    return _NOTHING if value is None else Text(formats.rate(value))


def _share(value: float | None) -> Text:
    return _NOTHING if value is None else Text(formats.share(value))


def _fullness(value: float | None) -> Text:
    text = _share(value)
    if value is None or value < 0.75:
        return text
    return Text(text.plain, style="yellow" if value < 0.9 else "bold red")


def _duration(quantile: Quantile | None) -> Text:
    if quantile is None:
        return _NOTHING
    text = formats.duration(quantile.seconds)
    return Text(f">{text}" if quantile.is_less else text)


def _latency(metric: str, share: float) -> Callable[[Load], Text]:
    return lambda load: _duration(load.quantile(metric, share))


def _speed(name: str) -> Callable[[Load], Text]:
    return lambda load: _rate(load.rate(name))


_LOAD = (
    _Column("\nstate", 10, _state, "left"),
    _Column("\nrun", 4, lambda load: _count(load.running)),
    _Column("\nwait", 4, lambda load: _alarming(load.waiting)),
    _Column("\nKV", 4, lambda load: _fullness(load.kv_usage)),
    _Column("\nhits", 4, lambda load: _share(load.hit_rate)),
    _Column("tokens/s\nin", 8, _speed("prompt_tokens_total")),
    _Column("\nout", 6, _speed("generation_tokens_total")),
    _Column("\nreq/s", 5, _speed("request_prompt_tokens_count")),
)
_LATENCY = (
    *(
        _Column(header, 6, _latency(metric, share))
        for title, metric in _LATENCIES
        for header, share in ((f"{title}\np50", 0.5), ("\np95", 0.95))
    ),
    _Column("pre-\nempted", 6, lambda load: _alarming(load.preemptions)),
    _Column("re-\nstarts", 6, lambda load: _alarming(load.restarts)),
)
