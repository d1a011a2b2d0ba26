"""How many draft tokens a step can afford."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model_runner.speculative.step_times import FloatArray, StepTimes

_PROBE = 32
"""A method that does not pay is asked again each time after so many steps."""
_PROBE_SIZE = 4
"""So often, too, so many drafts are verified although they should not pay: what a step takes may have changed."""
_RATE = 0.1


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes apart from drafts."""

    rows: int
    context: int
    """Positions that all rows together attend to."""
    num_ready: int
    """Choices that get a token."""

    @property
    def context_of_row(self) -> float:
        """Mean over the rows."""
        return self.context / max(self.rows, 1)


@dataclass(slots=True)
class _Record:
    """What a method's drafts are worth, for one choice in one step; moving averages."""

    nodes: float = 0.0
    gain: float = 0.0
    seconds: float = 0.0
    """To make them, for all choices of the step."""
    is_known: bool = False
    skipped: int = 0

    def mix(self, **values: float) -> None:
        for name, value in values.items():
            setattr(self, name, value if not self.is_known else getattr(self, name) * (1 - _RATE) + value * _RATE)


class Budget:
    """Chooses the number of draft tokens that gives the most tokens per second; zero is a valid answer.

    All candidates of all choices compete by their probability to become output (SmartSpec's goodput, arXiv:2406.14066,
    with trees and single tokens in place of lengths). The probabilities only decide what is computed in vain.
    """

    def __init__(self) -> None:
        self.times = StepTimes(np.array([1.0, 2.0]), np.array([1.0, 1.0]), 0.0)
        """Of this model on this machine; until they are measured, drafts cost nothing."""
        self._refused = 0
        self._records: dict[str, _Record] = {}

    def choose(self, load: StepLoad, survival: FloatArray) -> int:
        """How many of the candidates to verify.

        Args:
            load: the step without them.
            survival: [n] their probabilities to become output, in descending order.
        """
        count = np.arange(len(survival) + 1, dtype=np.float64)
        gain = load.num_ready + np.concatenate([[0.0], survival.cumsum()])
        best = int((gain / self._seconds(load, count)).argmax())
        if best:
            return best
        self._refused = (self._refused + 1) % _PROBE
        return min(len(survival), _PROBE_SIZE) if self._refused == 0 else 0

    def observe_step(self, load: StepLoad, num_draft: int, seconds: float) -> None:
        """Take in how long a step took that verified so many drafts."""
        self.times.observe(load.rows + num_draft, int(load.context + load.context_of_row * num_draft), seconds)

    def observe_drafts(self, method: str, choices: int, survival: Sequence[float]) -> None:
        """Take in the candidates of a method that were chosen: their probabilities, over so many choices."""
        record = self._records.setdefault(method, _Record())
        record.mix(nodes=len(survival) / choices, gain=sum(survival) / choices)
        record.is_known = True

    def observe_drafting(self, method: str, seconds: float) -> None:
        """Take in how long a method took for its drafts of a step."""
        self._records.setdefault(method, _Record()).mix(seconds=seconds)

    def wants(self, method: str, load: StepLoad, choices: int) -> bool:
        """Whether it pays to have a method make drafts for so many choices; now and then yes, to find out again."""
        record = self._records.get(method)
        if record is None or not record.is_known or self._pays(record, load, choices):
            return True
        record.skipped = (record.skipped + 1) % _PROBE
        return record.skipped == 0

    def _pays(self, record: _Record, load: StepLoad, choices: int) -> bool:
        without, with_drafts = self._seconds(load, np.array([0.0, record.nodes * choices]))
        rate = (load.num_ready + record.gain * choices) / (with_drafts + record.seconds)
        return bool(rate > load.num_ready / without)

    def _seconds(self, load: StepLoad, num_draft: FloatArray) -> FloatArray:
        return self.times.predict(load.rows + num_draft, load.context + load.context_of_row * num_draft)
