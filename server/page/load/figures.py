"""A server's load as the browser draws it: figures, bars, charts and tables, with all texts and numbers formatted."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from server.client.load import Load, Quantile

NAMES = (
    "engine_state",
    "engine_sleep_state",
    "engine_restarts",
    "num_requests_running",
    "num_background_running",
    "num_requests_waiting",
    "num_preemptions",
    "kv_cache_usage_perc",
    "kv_cache_blocks",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "prompt_tokens",
    "generation_tokens",
    "request_prompt_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "spec_decode_num_drafts",
    "spec_decode_num_emitted_tokens",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)
"""Metrics that the figures need, without prefix and suffix."""
NOTHING = "–"
_LATENCIES = (
    ("First token", "time_to_first_token_seconds"),
    ("Between tokens", "inter_token_latency_seconds"),
)
_RATES = (
    ("Tokens/s in", "prompt_tokens_total"),
    ("Tokens/s out", "generation_tokens_total"),
    ("Requests/s", "request_prompt_tokens_count"),
)
_CACHE = ("held", "cached", "free")
_STEPS_OF_SCALES = (1, 2, 5, 10)


Figures = dict[str, str]
"""Formatted numbers by name."""


class Part(msgspec.Struct, frozen=True):
    """A part of a bar."""

    kind: str
    """Name of the colour in page.css."""
    name: str
    value: str
    percent: float


class Bar(msgspec.Struct, frozen=True):
    """A bar divided into parts, from left to right."""

    title: str
    summary: str
    """A description for screen readers."""
    parts: list[Part]


class Series(msgspec.Struct, frozen=True):
    """A series of a chart: one value per second, oldest first."""

    kind: str
    name: str
    now: str
    values: list[float]


class Chart(msgspec.Struct, frozen=True):
    """A stacked column chart over time, with the first series at the bottom."""

    title: str
    summary: str
    top: float
    """Upper end of the scale."""
    series: list[Series]


class Table(msgspec.Struct, frozen=True):
    """Rows of texts; the first text of a row is its name."""

    columns: list[str]
    rows: list[list[str]]


def bar(title: str, parts: Iterable[tuple[str, str, str, float]]) -> Bar:
    """Build a bar with a summary. `parts` are tuples of kind, name, value and fraction."""
    made = [Part(kind, name, value, round(100 * share, 2)) for kind, name, value, share in parts]
    return Bar(title, f"{title}: {', '.join(f'{one.name} {one.value}' for one in made)}", made)


def chart(title: str, series: Iterable[tuple[str, str, float, Sequence[float]]]) -> Chart:
    """Build a chart with a summary and a fitting scale. `series` are tuples of kind, name, current value and values."""
    made = [Series(kind, name, rate(now), [round(one, 2) for one in values]) for kind, name, now, values in series]
    highest = max(map(sum, zip(*(one.values for one in made), strict=True)), default=0.0)
    summary = f"{title}, the last minute. Now: {', '.join(f'{one.name} {one.now}' for one in made)}"
    return Chart(title, summary, scale_of(highest), made)


def scale_of(highest: float) -> float:
    """The smallest round number that is at least `highest` and at least 1."""
    decade = 1.0
    while decade * 10 < highest:
        decade *= 10
    return next((decade * step for step in _STEPS_OF_SCALES if decade * step >= highest), decade * 10)


def server_figures(load: Load, models: str, version: str, up_s: float | None) -> Figures:
    """The server's state, model, version, uptime and restarts."""
    found = {"State": load.state, "Model": models}
    if version:
        found["Version"] = version
    if up_s is not None:
        found["Uptime"] = long_time(up_s)
    return found | known({"Engine restarts": load.restarts})


def queue_figures(load: Load) -> Figures:
    """Choices in flight and queued, and preemptions."""
    return known({"Running choices": load.running, "Waiting choices": load.waiting, "Preemptions": load.preemptions})


def rate_figures(load: Load) -> Figures:
    """Tokens and requests per second, and the prefix cache's hit rate."""
    found = {name: rate(load.rate(metric)) for name, metric in _RATES if load.has_metric(metric)}
    if load.has_metric("prefix_cache_queries_total"):
        found["Prefix cache hits"] = percent(load.hit_rate)
    return found


def latency_figures(load: Load) -> Figures:
    """Quantiles of the latencies that clients see."""
    return {
        f"{name}, {title}": _quantile(load.quantile(metric, share))
        for name, metric in _LATENCIES
        if load.has_metric(f"{metric}_bucket")
        for title, share in (("p50", 0.5), ("p95", 0.95))
    }


def cache_bar(load: Load, block_size: int | None) -> Bar | None:
    """Use of the KV cache: in tokens if the block size is known, otherwise in blocks or as fractions."""
    blocks = load.kv_blocks
    total = sum(blocks.values())
    if total:
        unit, factor = ("blocks", 1) if block_size is None else ("tokens", block_size)
        held = {kind: blocks.get(kind, 0) for kind in _CACHE}
        parts = [(kind, kind, f"{number * factor:,.0f}", number / total) for kind, number in held.items()]
        return bar(f"KV cache, in {unit}", parts)
    used = load.kv_usage
    if used is None:
        return None
    return bar("KV cache", [("held", "used", percent(used), used), ("free", "free", percent(1 - used), 1 - used)])


def speculation_table(load: Load) -> Table | None:
    """Acceptance and tokens per step of each method; None if no drafts were made yet."""
    if not load.drafting_methods:
        return None
    now = {one.method: one for one in load.speculation}
    rows = []
    for method in load.drafting_methods:
        one = now.get(method)
        gain = [NOTHING, NOTHING] if one is None else [percent(one.acceptance), f"{one.tokens_per_step:.2f}"]
        rows.append([method or "all", *gain])
    return Table(["Method", "Accepted", "Tokens per step"], rows)


def long_time(seconds: float) -> str:
    """A duration in its two largest units."""
    minutes = int(max(0.0, seconds) // 60)
    hours, days = minutes // 60, minutes // (24 * 60)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(max(0.0, seconds))} s"


def known(values: Mapping[str, float | None]) -> Figures:
    """Format the numbers that are not None."""
    return {name: whole(value) for name, value in values.items() if value is not None}


def whole(value: float | None) -> str:
    """A number without decimals; in thousands if it is large."""
    if value is None:
        return NOTHING
    return f"{value:.0f}" if value < 1e5 else f"{value / 1000:.0f}k"


def rate(value: float | None) -> str:
    """A number per second, with one decimal if it is below 10."""
    return f"{value:.1f}" if value is not None and 0 < value < 10 else whole(value)


def percent(share: float | None) -> str:
    """A fraction as a percentage."""
    return NOTHING if share is None else f"{share:.0%}"


def duration(seconds: float | None) -> str:
    """A duration in milliseconds or seconds."""
    if seconds is None:
        return NOTHING
    if seconds < 0.9995:
        return f"{seconds * 1000:.{1 if seconds < 0.00995 else 0}f} ms"
    return f"{seconds:.{1 if seconds < 99.95 else 0}f} s"


def _quantile(quantile: Quantile | None) -> str:
    if quantile is None:
        return NOTHING
    return ("> " if quantile.is_less else "") + duration(quantile.seconds)
