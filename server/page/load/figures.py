"""What the numbers of a server say about its load, in words. What it does not tell is left out."""

from collections.abc import Iterator, Mapping

from server.client import formats
from server.client.load import Load, Quantile, Speculation
from server.page.load.shapes import Bar, Figure, Table, bar, part

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
"""Of the metrics that are looked at here."""
_NOTHING = "–"
_LATENCIES = (
    ("First token", "time_to_first_token_seconds"),
    ("Between tokens", "inter_token_latency_seconds"),
)
_RATES = (
    ("Tokens/s in", "prompt_tokens_total"),
    ("Tokens/s out", "generation_tokens_total"),
    ("Requests/s", "request_prompt_tokens_count"),
)
_CACHE = (("held", "held"), ("cached", "cached"), ("free", "free"))


def server_figures(load: Load, models: str, version: str, up_s: float | None) -> list[Figure]:
    """Which server it is, and how it is."""
    found = [Figure("State", load.state), Figure("Model", models)]
    if version:
        found.append(Figure("Version", version))
    if up_s is not None:
        found.append(Figure("Up for", long_time(up_s)))
    return [*found, *_counts({"Engine restarts": load.restarts})]


def queue_figures(load: Load) -> list[Figure]:
    """What it has to do."""
    counts = {"Running choices": load.running, "Waiting choices": load.waiting, "Preemptions": load.preemptions}
    return list(_counts(counts))


def rate_figures(load: Load) -> list[Figure]:
    """How much of it is done in a second."""
    found = [Figure(name, _rate(load.rate(metric))) for name, metric in _RATES if load.tells(metric)]
    if load.tells("prefix_cache_queries_total"):
        found.append(Figure("Prefix cache hits", _share(load.hit_rate)))
    return found


def latency_figures(load: Load) -> list[Figure]:
    """How long one waits for it."""
    return [
        Figure(f"{name}, {title}", _duration(load.quantile(metric, share)))
        for name, metric in _LATENCIES
        if load.tells(f"{metric}_bucket")
        for title, share in (("p50", 0.5), ("p95", 0.95))
    ]


def cache_bar(load: Load, block_size: int | None) -> Bar | None:
    """What the KV cache is used for; without the size of its blocks in blocks, without their numbers in shares."""
    blocks = load.kv_blocks
    total = sum(blocks.values())
    if total:
        unit, factor = ("blocks", 1) if block_size is None else ("tokens", block_size)
        parts = [
            part(kind, name, f"{blocks.get(kind, 0) * factor:,.0f}", blocks.get(kind, 0) / total)
            for kind, name in _CACHE
        ]
        return bar(f"KV cache, in {unit}", parts)
    used = load.kv_usage
    if used is None:
        return None
    shares = (("held", "used", used), ("free", "free", 1 - used))
    return bar("KV cache", [part(kind, name, formats.share(share), share) for kind, name, share in shares])


def speculation_table(load: Load) -> Table | None:
    """What each method brings now; None where there was no speculation yet."""
    if not load.drafting_methods:
        return None
    now = {one.method: one for one in load.speculation}
    rows = [[method or "all", *_brings(now.get(method))] for method in load.drafting_methods]
    return Table(["Method", "Accepted", "Tokens a step"], rows)


def long_time(seconds: float) -> str:
    """In the largest two units."""
    minutes = int(max(0.0, seconds) // 60)
    hours, days = minutes // 60, minutes // (24 * 60)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(max(0.0, seconds))} s"


def _counts(values: Mapping[str, float | None]) -> Iterator[Figure]:
    for name, value in values.items():
        if value is not None:
            yield Figure(name, formats.count(value))


def _brings(method: Speculation | None) -> tuple[str, str]:
    if method is None:
        return _NOTHING, _NOTHING
    return _share(method.acceptance), f"{method.tokens_per_step:.2f}"


def _share(value: float | None) -> str:
    return _NOTHING if value is None else formats.share(value)


def _rate(value: float | None) -> str:
    return _NOTHING if value is None else formats.rate(value)


def _duration(quantile: Quantile | None) -> str:
    if quantile is None:
        return _NOTHING
    return ("> " if quantile.is_less else "") + formats.duration(quantile.seconds)
