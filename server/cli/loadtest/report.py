"""From outcomes to numbers, and from numbers to a table and JSON."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from server.cli.loadtest.load import LoadResult, Outcome


@dataclass(frozen=True, slots=True)
class Distribution:
    """A summary of measured values, in their unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class FailureCount:
    """How many requests failed in one way, and what the first of them was told."""

    kind: str
    count: int
    first_message: str


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a load. Times in milliseconds; only complete answers enter them and the token counts."""

    duration_s: float
    num_requests: int
    num_completed: int
    failures: tuple[FailureCount, ...]
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    time_to_first_token_ms: Distribution | None
    inter_token_ms: Distribution | None
    """Gaps between the chunks of a stream."""
    time_per_output_token_ms: Distribution | None
    """For each request: time after the first token, divided by the tokens after the first."""
    end_to_end_ms: Distribution | None

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON takes it."""
        return asdict(self)


def summarize(result: LoadResult) -> Report:
    """Reduce a load to its report."""
    done = [outcome for outcome in result.outcomes if outcome.failure is None]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in done)
    output_tokens = sum(outcome.output_tokens for outcome in done)
    duration = max(result.duration_s, 1e-9)
    return Report(
        duration_s=result.duration_s,
        num_requests=len(result.outcomes),
        num_completed=len(done),
        failures=_count_failures(result.outcomes),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(done) / duration,
        output_tokens_per_s=output_tokens / duration,
        total_tokens_per_s=(prompt_tokens + output_tokens) / duration,
        time_to_first_token_ms=_milliseconds(
            [o.time_to_first_token for o in done if o.time_to_first_token is not None]
        ),
        inter_token_ms=_milliseconds([b - a for outcome in done for a, b in pairwise(outcome.chunk_times)]),
        time_per_output_token_ms=_milliseconds([t for outcome in done if (t := _time_per_token(outcome)) is not None]),
        end_to_end_ms=_milliseconds([outcome.latency for outcome in done]),
    )


def distribution(values: Sequence[float]) -> Distribution | None:
    """Mean, percentiles and maximum; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, q) for q in (50, 90, 99))
    return Distribution(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile of ascending values, linear between neighbours (Hyndman and Fan's type 7, as numpy does)."""
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _milliseconds(seconds: list[float]) -> Distribution | None:
    return distribution([1000 * value for value in seconds])


def _time_per_token(outcome: Outcome) -> float | None:
    if outcome.output_tokens < 2 or len(outcome.chunk_times) < 2:
        return None
    return (outcome.chunk_times[-1] - outcome.chunk_times[0]) / (outcome.output_tokens - 1)


def _count_failures(outcomes: Sequence[Outcome]) -> tuple[FailureCount, ...]:
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    first = {failure.kind: failure.message for failure in reversed(failures)}
    counts = Counter(failure.kind for failure in failures)
    return tuple(FailureCount(kind, count, first[kind]) for kind, count in counts.most_common())
