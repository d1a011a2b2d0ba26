"""The last minute, second by second: tokens per second, and tokens computed per step."""

from collections import Counter, deque

import msgspec

from server.client.load import Load
from server.page.load.figures import Chart, Figures, chart, duration

SECONDS = 60
_LATELY_S = 5
_RATES = (("prompt", "in", "prompt_tokens_total"), ("decode", "out", "generation_tokens_total"))
_MEANS = (
    ("prompt", "of prompts"),
    ("decode", "of answers"),
    ("accepted", "accepted drafts"),
    ("rejected", "rejected drafts"),
)


class Step(msgspec.Struct):
    """A step of the engine."""

    number: int
    ended_at: float
    """Unix time in seconds."""
    duration_ms: float = 0.0
    prompt_tokens: int = 0
    decode_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class Cache(msgspec.Struct):
    """The KV cache's properties."""

    block_size: int
    """In tokens."""


class StepList(msgspec.Struct):
    """The answer of /v1/steps, oldest step first."""

    data: list[Step]
    last_step: int
    kv_cache: Cache | None = None


class Throughput:
    """Tokens per second over the last minute. `add` is called once a second."""

    def __init__(self) -> None:
        self._rates: deque[tuple[float, ...]] = deque([(0.0,) * len(_RATES)] * SECONDS, maxlen=SECONDS)
        self._is_known = False

    def add(self, load: Load) -> None:
        self._is_known = all(load.has_metric(metric) for _, _, metric in _RATES)
        self._rates.append(tuple(load.rate(metric) or 0.0 for _, _, metric in _RATES))

    def chart(self) -> Chart | None:
        """The chart; None if the server does not count tokens."""
        if not self._is_known:
            return None
        by_series = zip(_RATES, zip(*self._rates, strict=True), strict=True)
        return chart("Tokens per second", ((kind, name, rates[-1], rates) for (kind, name, _), rates in by_series))


class StepHistory:
    """Means over each second's steps, which stay correct if the server has dropped some steps."""

    def __init__(self) -> None:
        self._seconds: dict[int, Counter[str]] = {}
        self._newest = 0
        self.last_step = 0
        """Number of the last step added."""

    def add(self, steps: StepList) -> None:
        """Add the steps after `last_step`."""
        self.last_step = steps.last_step
        for step in steps.data:
            second = int(step.ended_at)
            self._newest = max(self._newest, second)
            self._seconds.setdefault(second, Counter()).update(
                steps=1,
                busy_us=round(1000 * step.duration_ms),
                prompt=step.prompt_tokens,
                decode=step.decode_tokens,
                accepted=step.accepted_draft_tokens,
                rejected=step.draft_tokens - step.accepted_draft_tokens,
            )

    def forget(self) -> None:
        """Forget all steps, because the server counts from 1 again."""
        self._seconds.clear()
        self.last_step = 0

    def chart(self, now: float) -> Chart:
        """The minute up to `now` (Unix time), or up to the last step if the server's clock is ahead."""
        sums = self._last(SECONDS, now)
        lately = sum(sums[-_LATELY_S:], Counter())
        series = ((kind, name, _mean(lately, kind), [_mean(one, kind) for one in sums]) for kind, name in _MEANS)
        return chart("Tokens per step", series)

    def figures(self, now: float) -> Figures:
        """Figures for the last few seconds."""
        lately = sum(self._last(_LATELY_S, now), Counter())
        return {"Step time": duration(_mean(lately, "busy_us") / 1e6 if lately else None)}

    def _last(self, seconds: int, now: float) -> list[Counter[str]]:
        """Sums for each of the last seconds. Drops seconds too old for the chart."""
        end = max(int(now), self._newest) + 1
        for second in [second for second in self._seconds if second < end - SECONDS]:
            del self._seconds[second]
        return [self._seconds.get(second, Counter()) for second in range(end - seconds, end)]


def _mean(total: Counter[str], name: str) -> float:
    """The mean over steps; 0 if there are none."""
    return total[name] / total["steps"] if total else 0.0
