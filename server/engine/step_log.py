"""What engines did in their last steps."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from model_runner.runner_interface import SpeculationStats
from scheduler.interface import EngineStats

MOST_STEPS: Final = 240
"""That are remembered."""


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step whose results are in."""

    number: int
    """The first one of all engines is 1."""
    ended_unix: float
    """When its results were heard of: Unix time in seconds."""
    seconds: float
    """That it took: see EngineStats."""
    prefill_tokens: int
    """Computed of prompts, and of what was preempted."""
    decode_tokens: int
    """Computed of all that generates: one for each sequence."""
    draft_tokens: int
    """Verified beside these, and ..."""
    accepted_tokens: int
    """... accepted."""
    num_running: int
    """Choices after it, and ..."""
    num_waiting: int
    """... those in the queue."""


class StepLog:
    """Remembers the last steps by the snapshots that came with them. What a step did is their difference, which is
    found when somebody asks.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[float, EngineStats, EngineStats]] = deque(maxlen=MOST_STEPS)
        """The oldest first: when it ended, what the engine had told before, and with it."""
        self.num_steps = 0
        """Of all engines; the number of the last one."""

    def note(self, before: EngineStats, after: EngineStats) -> None:
        """An engine has told of itself, for the first time since `before`, mostly because a step is done."""
        if after.steps_done != before.steps_done:
            self.num_steps += 1
            self._ended.append((time.time(), before, after))

    def since(self, number: int) -> list[DoneStep]:
        """Those that are remembered of the steps after this one, the oldest first."""
        first = self.num_steps - len(self._ended) + 1
        numbered = enumerate(self._ended, first)
        return [_difference(index, *ended) for index, ended in numbered if index > number]


def _difference(number: int, ended_unix: float, before: EngineStats, after: EngineStats) -> DoneStep:
    drafted_before, accepted_before = _drafts(before.speculation)
    drafted, accepted = _drafts(after.speculation)
    return DoneStep(
        number=number,
        ended_unix=ended_unix,
        seconds=after.step_s - before.step_s,
        prefill_tokens=after.prefill_tokens - before.prefill_tokens,
        decode_tokens=after.decode_tokens - before.decode_tokens,
        draft_tokens=drafted - drafted_before,
        accepted_tokens=accepted - accepted_before,
        num_running=after.num_running,
        num_waiting=after.num_waiting,
    )


def _drafts(methods: tuple[SpeculationStats, ...]) -> tuple[int, int]:
    """Draft tokens verified and accepted so far, of all methods."""
    return sum(one.drafted for one in methods), sum(sum(one.accepted_by_depth) for one in methods)
