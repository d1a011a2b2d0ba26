"""What the engine's steps of the last minute computed."""

from dataclasses import dataclass, fields

from server.client import formats
from server.page.load.records import Step, StepList
from server.page.load.shapes import Chart, Figure, Series, chart

SECONDS = 60
_LATELY_S = 5
_SERIES = (
    ("prompt", "of prompts"),
    ("decode", "of answers"),
    ("accepted", "accepted drafts"),
    ("rejected", "rejected drafts"),
)


@dataclass(slots=True)
class _Sum:
    """Of the steps that ended within a second."""

    steps: int = 0
    busy_ms: float = 0.0
    prompt: int = 0
    decode: int = 0
    accepted: int = 0
    rejected: int = 0

    def add(self, step: Step) -> None:
        self.steps += 1
        self.busy_ms += step.duration_ms
        self.prompt += step.prompt_tokens
        self.decode += step.decode_tokens
        self.accepted += step.accepted_draft_tokens
        self.rejected += step.draft_tokens - step.accepted_draft_tokens

    def mean(self, name: str) -> float:
        """Of a step; 0 where there was none."""
        return float(getattr(self, name)) / self.steps if self.steps else 0.0


class StepHistory:
    """Means over the steps of each second, which are right also where there were more than the server remembers."""

    def __init__(self) -> None:
        self._seconds: dict[int, _Sum] = {}
        self._newest = 0
        self.last_step = 0
        """The number of the last one that was added."""

    def add(self, steps: StepList) -> None:
        """Those after the last one."""
        self.last_step = steps.last_step
        for step in steps.data:
            self._newest = max(self._newest, int(step.ended_at))
            self._seconds.setdefault(int(step.ended_at), _Sum()).add(step)

    def forget(self) -> None:
        """The server counts from 1 again."""
        self._seconds.clear()
        self.last_step = 0

    def chart(self, now: float) -> Chart:
        """Of the minute up to `now`, in Unix time; if the server's clock is ahead, up to what it says."""
        end = self._end(now)
        sums = [self._seconds.get(second, _Sum()) for second in range(end - SECONDS, end)]
        lately = _total(sums[-_LATELY_S:])
        series = [
            Series(kind, name, formats.rate(lately.mean(kind)), [round(one.mean(kind), 2) for one in sums])
            for kind, name in _SERIES
        ]
        return chart("Tokens that a step computes", series)

    def figures(self, now: float) -> list[Figure]:
        """Of the last seconds."""
        end = self._end(now)
        lately = _total([self._seconds.get(second, _Sum()) for second in range(end - _LATELY_S, end)])
        took = formats.duration(lately.mean("busy_ms") / 1000) if lately.steps else "–"
        return [Figure("Time of a step", took)]

    def _end(self, now: float) -> int:
        """The second after the last one that is shown. Forgets what is too old to be."""
        end = max(int(now), self._newest) + 1
        for second in [second for second in self._seconds if second < end - SECONDS]:
            del self._seconds[second]
        return end


def _total(sums: list[_Sum]) -> _Sum:
    return _Sum(*(sum(getattr(one, field.name) for one in sums) for field in fields(_Sum)))
