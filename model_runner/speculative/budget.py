"""How many draft tokens a step can afford."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from model_runner.speculative.step_times import FloatArray, StepTimes

_PROBE_SIZE = 4
"""A probe verifies so many drafts although they should not pay."""
_FREE = 0.01
"""Drafts that take no more than this share of a step are made in any case."""
_RATE = 0.1


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes apart from drafts that compete."""

    rows: int
    context: int
    """Positions that all rows together attend to."""
    num_ready: int
    """Choices that get a token."""

    @property
    def context_of_row(self) -> float:
        """Mean over the rows."""
        return self.context / max(self.rows, 1)

    def plus(self, num_draft: int) -> "StepLoad":
        """With draft rows that are computed in any case."""
        return StepLoad(self.rows + num_draft, self.context + int(self.context_of_row * num_draft), self.num_ready)


@dataclass(slots=True)
class _Probe:
    """When to try again what should not pay; the rarer, the more often it really did not."""

    interval: int = 16
    waited: int = 0

    def is_due(self) -> bool:
        self.waited += 1
        return self.waited >= self.interval

    def take_in(self, *, paid: bool) -> None:
        self.waited = 0
        self.interval = max(self.interval // 2, 4) if paid else min(self.interval * 2, 256)


@dataclass(slots=True)
class _Record:
    """What a method is worth for one choice that it is asked to draft for, in one step; moving averages."""

    nodes: float = 0.0
    """Chosen to be verified, and ..."""
    gain: float = 0.0
    """... of these, expected to be accepted."""
    seconds: float = 0.0
    """To make the drafts, for all choices of the step."""
    is_known: bool = False
    probe: _Probe = field(default_factory=_Probe)

    def mix(self, **values: float) -> None:
        for name, value in values.items():
            setattr(self, name, value if not self.is_known else getattr(self, name) * (1 - _RATE) + value * _RATE)


class Budget:
    """Chooses the number of draft tokens that gives the most tokens per second; zero is a valid answer.

    All candidates of all choices compete by their probability to become output (SmartSpec's goodput, arXiv:2406.14066,
    with trees and single tokens in place of lengths). The probabilities only decide what is computed in vain.

    What step times and probabilities say about drafts that are not made or not verified grows old. So both are probed:
    soon after the last success, up to 16 times as rarely where probes keep failing.
    """

    def __init__(self) -> None:
        self.times = StepTimes(np.array([1.0, 2.0]), np.array([1.0, 1.0]), 0.0)
        """Of this model on this machine; until they are measured, drafts cost nothing."""
        self._records: dict[str, _Record] = {}
        self._probe = _Probe()
        self._is_probing = False
        """Whether the step at hand verifies drafts that should not pay."""
        self._is_drafting_in_vain = False
        """Whether drafts for the next step were made that should not pay."""

    def choose(self, load: StepLoad, survival: FloatArray) -> int:
        """How many of the candidates to verify.

        Args:
            load: the step without them.
            survival: [n] their probabilities to become output, in descending order.
        """
        count = np.arange(len(survival) + 1, dtype=np.float64)
        gain = load.num_ready + np.concatenate([[0.0], survival.cumsum()])
        best = int((gain / self._seconds(load, count)).argmax())
        self._is_probing = best == 0 and (self._probe.is_due() or self._is_drafting_in_vain)
        self._is_drafting_in_vain = False
        return min(len(survival), _PROBE_SIZE) if self._is_probing else best

    def observe_step(self, load: StepLoad, num_draft: int, num_accepted: int, seconds: float) -> None:
        """Take in how long a step took that verified so many drafts, and how many of them became output."""
        self.times.observe(load.rows + num_draft, int(load.context + load.context_of_row * num_draft), seconds)
        if self._is_probing:
            self._probe.take_in(paid=self._is_better(load, num_draft, num_accepted, 0.0))
            self._is_probing = False

    def observe_drafts(self, method: str, choices: int, survival: Sequence[float]) -> None:
        """Take in what a method brought that was asked for so many choices: the survival of what was chosen."""
        record = self._records.setdefault(method, _Record())
        record.mix(nodes=len(survival) / choices, gain=sum(survival) / choices)
        record.is_known = True

    def observe_drafting(self, method: str, seconds: float) -> None:
        """Take in how long a method took for its drafts of a step."""
        self._records.setdefault(method, _Record()).mix(seconds=seconds)

    def expected_gain(self, method: str) -> float | None:
        """How many tokens a method's drafts bring a choice, on average; None if that is not known."""
        record = self._records.get(method)
        return record.gain if record is not None and record.is_known else None

    def wants(self, method: str, load: StepLoad, choices: int) -> bool:
        """Whether it pays to have a method make drafts for so many choices; now and then yes, to find out again."""
        record = self._records.get(method)
        if record is None or not record.is_known or self._pays(record, load, choices):
            return True
        is_due = record.probe.is_due()
        if is_due:
            record.probe.take_in(paid=False)
            self._is_drafting_in_vain = True
        return is_due

    def _pays(self, record: _Record, load: StepLoad, choices: int) -> bool:
        if record.seconds <= _FREE * float(self._seconds(load, np.zeros(1))[0]):
            return True
        pays = self._is_better(load, record.nodes * choices, record.gain * choices, record.seconds)
        if pays:
            record.probe = _Probe()
        return pays

    def _is_better(self, load: StepLoad, num_draft: float, gain: float, extra_seconds: float) -> bool:
        """Whether a step with these drafts brings more tokens per second than without."""
        without, with_drafts = self._seconds(load, np.array([0.0, num_draft]))
        return bool((load.num_ready + gain) / (with_drafts + extra_seconds) > load.num_ready / without)

    def _seconds(self, load: StepLoad, num_draft: FloatArray) -> FloatArray:
        return self.times.predict(load.rows + num_draft, load.context + load.context_of_row * num_draft)
