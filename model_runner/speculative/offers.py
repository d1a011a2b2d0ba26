"""What a method of speculation offers, and what it takes to ask it."""

import math
import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np

from model_runner.draft_tree import DraftTree
from model_runner.runner_interface import SpeculationStats
from model_runner.speculative.step_times import FloatArray
from model_runner.speculative.verify import Verdict

_BINS = 10
_PRIOR = 4.0
"""Observations that the proposer's own guess counts as; they fade as others do."""
_MEMORY = 0.98
"""What is left of an observation's weight after the next in its bin: what runs now counts."""


class Calibration:
    """The share of a method's nodes that were accepted, by the confidence that it gave them."""

    def __init__(self) -> None:
        self._accepted = [0.0] * _BINS
        self._seen = [0.0] * _BINS
        self._prior = [_PRIOR] * _BINS

    def probability(self, confidence: float) -> float:
        """That a node with this confidence follows its parent."""
        place = _bin(confidence)
        prior = self._prior[place]
        return (prior * confidence + self._accepted[place]) / (prior + self._seen[place])

    def observe(self, confidence: float, *, accepted: bool) -> None:
        """A node whose parent was accepted was accepted, or not."""
        place = _bin(confidence)
        self._accepted[place] = _MEMORY * self._accepted[place] + accepted
        self._seen[place] = _MEMORY * self._seen[place] + 1
        self._prior[place] *= _MEMORY


def _bin(confidence: float) -> int:
    return min(int(confidence * _BINS), _BINS - 1)


class Tally:
    """Counts of one method since the start; see SpeculationStats."""

    def __init__(self) -> None:
        self._drafted = 0
        self._accepted_by_depth: list[int] = []
        self._verified_by_depth: list[int] = []
        self._steps = 0
        self._tokens = 0
        self.draft_s = 0.0
        self._verify_s = 0.0

    def count(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        """A choice's drafts were verified, in its share of the step's time."""
        accepted, deepest = len(verdict.nodes), max(tree.depths())
        self._drafted += len(tree)
        self._steps += 1
        self._tokens += len(verdict.tokens)
        self._verify_s += seconds
        for counts in (self._accepted_by_depth, self._verified_by_depth):
            counts.extend([0] * (deepest - len(counts)))
        for depth in range(accepted):
            self._accepted_by_depth[depth] += 1
        for depth in range(min(accepted + 1, deepest)):
            self._verified_by_depth[depth] += 1

    def stats(self, method: str) -> SpeculationStats:
        """The counts under the method's name."""
        return SpeculationStats(
            method=method,
            drafted=self._drafted,
            accepted_by_depth=tuple(self._accepted_by_depth),
            verified_by_depth=tuple(self._verified_by_depth),
            steps=self._steps,
            tokens=self._tokens,
            draft_s=self.draft_s,
            verify_s=self._verify_s,
        )


_RATE = 0.03
"""How quickly what is known of a method's offers follows, ..."""
_RATE_OF_OLD = 0.1
"""... and where it is asked so rarely that what is known is old."""
_RANKS = 64
"""So many nodes of a draft are told apart, the most probable ones."""
_SAVING_RATE = 0.02
"""How quickly what asking it saved follows, and ..."""
_EXPECTED = 8
"""... as how many steps it counts what was expected beforehand."""
_TIMES = 9
"""So many last times are known for each number of choices; their median counts, so one outlier changes nothing."""


class _Saved:
    """How many steps' time steps saved for which a method was asked, with what was expected at first as the prior."""

    def __init__(self, expected: float) -> None:
        self.mean = expected
        self._weight = _EXPECTED

    def observe(self, saving: float, rate: float) -> None:
        self._weight += 1
        self.mean += max(rate, 1 / self._weight) * (saving - self.mean)


class Offers:
    """What one method offers a choice that it is asked to draft for, and the time that its drafts take."""

    def __init__(self) -> None:
        self.nodes: FloatArray = np.zeros(_RANKS)
        """How often it offers a first node, a second one, ..."""
        self.gain: FloatArray = np.zeros(_RANKS)
        """... and how often these would become output."""
        self.total_gain = 0.0
        """Tokens that a draft brings a choice, on average."""
        self.is_old = False
        """Whether it is asked to find out, and not because it pays."""
        self.num_observed = 0
        self.asked_at = -math.inf
        """When it was asked last, in cycles; long ago if it shall be asked again at once."""
        self.fruitless = 0
        """How often it was asked since drafts of its last came true more often than was expected, or paid."""
        self.rests_until: dict[tuple[int, int], int] = {}
        """The cycle before which it is not asked, by the classes of two numbers: of the choices that get a token, and
        of those among them that would ask."""
        self._saved: dict[int, _Saved] = {}
        """By the class of the number of choices that get a token."""
        self._last_s: dict[int, deque[float]] = {}
        """What it took, by the class of the number of choices (see `size_class`), and ..."""
        self._median_s: dict[int, float] = {}
        """... what of these counts."""

    def observe(self, offers: Sequence[Sequence[float]], most: int) -> None:
        """Take in what it offered each choice that it was asked for, in one step.

        Args:
            offers: the nodes' probabilities to become output, in descending order.
            most: how many nodes it was asked for at most. Nothing is learnt of further ones.
        """
        nodes, gain = np.zeros(_RANKS), np.zeros(_RANKS)
        for offer in offers:
            if offer:
                nodes[: len(offer)] += 1
                gain[: len(offer)] += offer[:_RANKS]
        self.num_observed += 1
        rate = max(_RATE_OF_OLD if self.is_old else _RATE, 1 / self.num_observed) * (np.arange(_RANKS) < most)
        self.nodes += rate * (nodes / len(offers) - self.nodes)
        self.gain += rate * (gain / len(offers) - self.gain)
        self.total_gain = float(self.gain.sum())

    def encourage(self) -> None:
        """More came true than was expected: it shall be asked again soon, if only to find out."""
        self.fruitless = 0
        self.ask_again()

    def ask_again(self) -> None:
        """As soon as there is a step to ask it for."""
        self.asked_at = -math.inf
        self.rests_until.clear()

    def forget_savings(self) -> None:
        """What it saved or lost before tells nothing any more."""
        self._saved.clear()
        self.encourage()

    def bounded(self, size: int, saving: float) -> float:
        """What a step for which it is asked should save, but not more than such steps saved of late.

        Args:
            size: the class of the number of choices that get a token.
            saving: in steps' time, by what it offers.
        """
        if saving <= 0:
            return saving
        return min(saving, self._saved.setdefault(size, _Saved(saving)).mean)

    def observe_saving(self, size: int, saving: float) -> None:
        """Take in how many steps' time a step saved for which it was asked, or lost."""
        if size in self._saved:
            self._saved[size].observe(saving, _RATE_OF_OLD if self.is_old else _SAVING_RATE)

    def observe_seconds(self, seconds: float, choices: int) -> None:
        """Take in how long it took to make drafts for so many choices."""
        size = size_class(choices)
        last = self._last_s.setdefault(size, deque(maxlen=_TIMES))
        last.append(seconds)
        self._median_s[size] = statistics.median(last)

    def seconds(self, choices: int) -> float:
        """To make drafts for so many choices; at first, as for the nearest number that is known."""
        size = size_class(choices)
        if size not in self._median_s:
            size = min(self._median_s, key=lambda known: abs(known - size), default=-1)
        return self._median_s.get(size, 0.0)


def size_class(count: int) -> int:
    """Counts up to 1, 2, 4, 8, ... are of one class each."""
    return (count - 1).bit_length() if count > 0 else 0
