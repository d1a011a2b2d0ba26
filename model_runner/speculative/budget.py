"""How many draft tokens a step can afford."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from model_runner.speculative.step_times import FloatArray, StepTimes

_PROBE_SIZE = 4
"""A probe verifies so many drafts although they should not pay."""
_FREE = 0.01
"""Drafts that take no more than this share of a step are made in any case."""
_RATE = 0.1
_RANKS = 64
"""So many nodes of a draft are told apart, the most probable ones."""
Value = TypeVar("Value", float, FloatArray)


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
    """When to try again what should not pay; the rarer, the more often it came as expected."""

    interval: int = 16
    waited: int = 0

    def is_due(self) -> bool:
        self.waited += 1
        return self.waited >= self.interval

    def take_in(self, *, surprising: bool) -> None:
        self.waited = 0
        self.interval = max(self.interval // 3, 4) if surprising else min(self.interval * 2, 256)


class _Record:
    """What a method offers a choice that it is asked to draft for, in one step; moving averages."""

    def __init__(self) -> None:
        self.nodes = np.zeros(_RANKS)
        """How often it offers a first node, a second one, ..."""
        self.gain = np.zeros(_RANKS)
        """... and how often these would become output."""
        self.seconds = 0.0
        """To make the drafts, for all choices of the step."""
        self.is_known = False
        self.probe = _Probe()

    def observe_offers(self, offers: Sequence[Sequence[float]]) -> None:
        nodes, gain = np.zeros(_RANKS), np.zeros(_RANKS)
        for offer in offers:
            best = offer[:_RANKS]
            nodes[: len(best)] += 1
            gain[: len(best)] += best
        self.nodes = self._mix(self.nodes, nodes / len(offers))
        self.gain = self._mix(self.gain, gain / len(offers))
        self.is_known = True

    def observe_seconds(self, seconds: float) -> None:
        self.seconds = self._mix(self.seconds, seconds)

    def _mix(self, known: Value, new: Value) -> Value:
        return known * (1 - _RATE) + new * _RATE if self.is_known else new


class Budget:
    """Chooses the number of draft tokens that gives the most tokens per second; zero is a valid answer.

    All candidates of all choices compete by their probability to become output (SmartSpec's goodput, arXiv:2406.14066,
    with trees and single tokens in place of lengths). The probabilities only decide what is computed in vain.

    What is known of drafts that are not made, or not verified, grows old. So both are tried now and then: every 256
    steps where nothing new is ever found, and soon again after more were accepted than expected.
    """

    def __init__(self) -> None:
        self.times = StepTimes(np.array([1.0, 2.0]), np.array([1.0, 1.0]), 0.0)
        """Of this model on this machine; until they are measured, drafts cost nothing."""
        self._records: dict[str, _Record] = {}
        self._probe = _Probe()
        self._is_probing = False
        """Whether the step at hand verifies drafts that should not pay."""
        self._chosen = np.zeros(0)
        """The survival of what it verifies."""
        self._tried: list[_Record] = []
        """Methods that made drafts for the next step although these should not pay."""

    def choose(self, load: StepLoad, survival: FloatArray) -> int:
        """How many of the candidates to verify.

        Args:
            load: the step without them.
            survival: [n] their probabilities to become output, in descending order.
        """
        count = np.arange(len(survival) + 1, dtype=np.float64)
        gain = load.num_ready + np.concatenate([[0.0], survival.cumsum()])
        best = int((gain / self._seconds(load, count)).argmax())
        self._is_probing = best == 0 and (self._probe.is_due() or bool(self._tried))
        if self._is_probing:
            best = min(len(survival), _PROBE_SIZE)
        self._chosen = survival[:best]
        return best

    def observe_step(self, load: StepLoad, num_draft: int, num_accepted: int, seconds: float) -> None:
        """Take in how long a step took that verified so many drafts, and how many of them became output."""
        self.times.observe(load.rows + num_draft, int(load.context + load.context_of_row * num_draft), seconds)
        deviation = float((self._chosen * (1 - self._chosen)).sum()) ** 0.5
        surprising = num_accepted > float(self._chosen.sum()) + deviation
        if self._is_probing:
            self._probe.take_in(surprising=surprising)
        for record in self._tried:
            record.probe.take_in(surprising=surprising)
        self._is_probing, self._tried, self._chosen = False, [], np.zeros(0)

    def observe_offers(self, method: str, offers: Sequence[Sequence[float]]) -> None:
        """Take in what a method offered each choice that it was asked for: the nodes' survival, in descending order."""
        self._records.setdefault(method, _Record()).observe_offers(offers)

    def observe_drafting(self, method: str, seconds: float) -> None:
        """Take in how long a method took for its drafts of a step."""
        self._records.setdefault(method, _Record()).observe_seconds(seconds)

    def expected_gain(self, method: str) -> float | None:
        """How many tokens a method's draft would bring a choice, on average; None if that is not known."""
        record = self._records.get(method)
        return float(record.gain.sum()) if record is not None and record.is_known else None

    def wants(self, method: str, load: StepLoad, choices: int) -> bool:
        """Whether it pays to have a method make drafts for so many choices; now and then yes, to find out again."""
        record = self._records.get(method)
        if record is None or not record.is_known or self._pays(record, load, choices):
            return True
        if not record.probe.is_due():
            return False
        self._tried.append(record)
        record.is_known = False
        return True

    def _pays(self, record: _Record, load: StepLoad, choices: int) -> bool:
        if record.seconds <= _FREE * self._plain_seconds(load):
            return True
        gain = load.num_ready + choices * record.gain.cumsum()
        seconds = record.seconds + self._seconds(load, choices * record.nodes.cumsum())
        pays = bool((gain / seconds).max() > load.num_ready / self._plain_seconds(load))
        if pays:
            record.probe = _Probe()
        return pays

    def _plain_seconds(self, load: StepLoad) -> float:
        return float(self._seconds(load, np.zeros(1))[0])

    def _seconds(self, load: StepLoad, num_draft: FloatArray) -> FloatArray:
        return self.times.predict(load.rows + num_draft, load.context + load.context_of_row * num_draft)
