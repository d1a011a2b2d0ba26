"""Log of the engines' last steps."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from model_runner.runner_interface import SpeculationStats
from scheduler.interface import EngineStats

MOST_STEPS: Final = 240
"""Steps that the log keeps."""


@dataclass(frozen=True, slots=True)
class DoneStep:
    """One completed step."""

    number: int
    """Counted over all engines, from 1."""
    ended_unix: float
    """When its results arrived, in Unix time (seconds)."""
    seconds: float
    """Its duration, as in `EngineStats.step_s`."""
    prefill_tokens: int
    """Tokens computed for prompts, and again for preempted choices."""
    decode_tokens: int
    """Tokens computed for generating sequences, one each."""
    draft_tokens: int
    """Draft tokens verified in this step."""
    accepted_tokens: int
    """Draft tokens accepted in this step."""
    num_running: int
    """Running choices after the step."""
    num_waiting: int
    """Queued choices after the step."""


class StepLog:
    """Keeps the snapshots that came with the last steps. A step's counts are differences, computed on demand."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, EngineStats, EngineStats]] = deque(maxlen=MOST_STEPS)
        """The oldest first: end in Unix time, the snapshot before, the snapshot after."""
        self.num_steps = 0
        """Steps of all engines; also the number of the last one."""

    def note(self, before: EngineStats, after: EngineStats) -> None:
        """Add the snapshot that follows `before`, if it completed a step."""
        if after.steps_done != before.steps_done:
            self.num_steps += 1
            self._ended.append((time.time(), before, after))

    def since(self, number: int) -> list[DoneStep]:
        """The steps in the log after this one, oldest first."""
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
