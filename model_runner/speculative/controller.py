"""How many tokens to draft, and which drafts to verify: by measured step times and calibrated probabilities."""

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from model_runner.batch import IntArray
from model_runner.speculative.step_times import FloatArray, StepLoad, StepTimes

_BINS, _OWN_GUESS, _CALIBRATION_MEMORY = 10, 4.0, 0.98
"""A method's own confidence counts as some observations; each observation leaves the earlier ones this weight."""
_RANKS, _NEVER, _TIMES = 64, 1e-3, 9
"""Nodes of a draft that are counted separately, if they are offered this often, and drafting times of a median."""
_RATE, _STALE_RATE, _SAVING_RATE = 0.03, 0.1, 0.01
"""How quickly averages follow: in general, for a method that is asked so rarely that they are old, and of savings."""
_PREDICTED, _DEVIATION, _TRUST_MEMORY = 8.0, 0.08, 0.998
"""Steps that a prediction counts as, and the standard deviation of a step's speed relative to it."""
_BEARABLE, _LEAST_PATIENCE, _MOST_PATIENCE = 1.08, -1.0, 4.0
"""How many times longer a choice may wait for a token because of other choices' drafts, on average: below 1.1 even
where predicted times are wrong by 2 %. The other two are the bounds of `patience`."""
_LOOKING, _LONGEST_REST = 0.0025, 16
"""The share of the time that a method may take to look for drafts that do not pay, and how many cycles it rests."""
_TRYING, _TRIED, _ENCOURAGED = 0.002, 4, 0.5
"""The share of the time that may be lost by verifying drafts that should not pay, their number in a step, and how many
steps' time may be lost at once after more drafts were accepted than expected."""
_PERIOD, _HELD_OUT = 512, 4
"""In so many cycles, so many steps in a row run without drafts."""


class Calibration:
    """The share of a method's nodes that were accepted, by the confidence that it gave them."""

    def __init__(self) -> None:
        self._bins = [(0.0, 0.0, _OWN_GUESS)] * (_BINS + 1)  # certainty has one, too
        """Weights of nodes that were accepted, of all that were seen, and of the method's own guess."""

    def probability(self, confidence: float) -> float:
        """The probability that a node with this confidence is accepted if its parent is."""
        accepted, seen, guess = self._bins[int(confidence * _BINS)]
        return (guess * confidence + accepted) / (guess + seen)

    def observe(self, confidence: float, *, accepted: bool) -> None:
        """Record whether a node was accepted whose parent was."""
        before, seen, guess = (_CALIBRATION_MEMORY * weight for weight in self._bins[int(confidence * _BINS)])
        self._bins[int(confidence * _BINS)] = before + accepted, seen + 1, guess


class DraftStats:
    """Statistics of one method: its drafts, how often they are accepted, and how long drafting takes."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.offered: FloatArray = np.zeros(_RANKS)
        """How often a draft has a first node, a second node, and so on."""
        self.gain: FloatArray = np.zeros(_RANKS)
        """How often a first node, a second node, ... becomes output."""
        self.num_observed = 0
        self.asked_at = -math.inf
        """The cycle in which the method was asked last; -inf to ask again at once."""
        self.is_stale = False
        """Whether the method is asked to find out, and not because it pays."""
        self.rests_until = 0
        """The cycle in which to consider the method again."""
        self._savings: dict[int, tuple[float, float]] = {}
        """Average saving by asking the method, in steps' time, and its weight, by the batch's size class."""
        self._seconds: dict[int, deque[float]] = {}
        """Drafting times, by the class of the number of choices."""

    def observe_drafts(self, drafts: Sequence[Sequence[float]], most: int, seconds: float) -> None:
        """Record drafts of at most `most` nodes: these nodes' probabilities to become output, in descending order."""
        offered, gain = np.zeros(_RANKS), np.zeros(_RANKS)
        for draft in drafts:
            offered[: len(draft)] += 1
            gain[: len(draft)] += draft[:_RANKS]
        self.num_observed += 1
        rate = max(_STALE_RATE if self.is_stale else _RATE, 1 / self.num_observed) * (np.arange(_RANKS) < most)
        self.offered += rate * (offered / len(drafts) - self.offered)
        self.gain += rate * (gain / len(drafts) - self.gain)
        self._seconds.setdefault(size_class(len(drafts)), deque(maxlen=_TIMES)).append(seconds)

    def seconds(self, choices: int) -> float:
        """How long drafting for this many choices takes, or for the nearest size that was measured."""
        nearest = min(self._seconds, key=lambda known: abs(known - size_class(choices)), default=None)
        return 0.0 if nearest is None else statistics.median(self._seconds[nearest])

    def bounded(self, size: int, saving: float) -> float:
        """A predicted saving, at most the measured one, which begins with the first prediction."""
        return saving if saving <= 0 else min(saving, self._savings.setdefault(size, (saving, _PREDICTED))[0])

    def observe_saving(self, size: int, saving: float) -> None:
        """Record how many steps' time a step saved for which the method was asked."""
        if size in self._savings:
            mean, weight = self._savings[size]
            rate = _STALE_RATE if self.is_stale else _SAVING_RATE
            self._savings[size] = mean + max(rate, 1 / (weight + 1)) * (saving - mean), weight + 1

    def forget_savings(self) -> None:
        """Measure again: the method drafts with other weights now."""
        self._savings.clear()
        self.encourage()

    def encourage(self) -> None:
        """Ask the method at the next opportunity, if only to find out."""
        self.asked_at, self.rests_until = -math.inf, 0


def size_class(count: int) -> int:
    """The class of a count: up to 1, up to 2, up to 4, up to 8, and so on."""
    return (count - 1).bit_length() if count > 0 else 0


@dataclass(frozen=True, slots=True)
class DraftOffer:
    """One choice's draft, to be verified as far as that pays."""

    survival: Sequence[float] = ()
    """Each node's probability to become output, in descending order."""
    rows_of_node: int = 1
    patience: float = 0.0
    is_cut: bool = False
    """Whether there was no room for the whole draft."""


class _BatchSize:
    """Measurements of batches of one size class."""

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._tokens = np.array([_PREDICTED, _PREDICTED])
        self._num_cycles = _PERIOD - 2 * _HELD_OUT

    def holds_out(self) -> bool:
        """Whether the next step runs without drafts, so that the time of plain steps is known."""
        self._num_cycles += 1
        return self._num_cycles % _PERIOD < _HELD_OUT

    @property
    def trust(self) -> float:
        """The share of a predicted speed that is certain: of the expected tokens came that share, less one error."""
        tokens, expected = self._tokens
        return min(float(tokens / expected * (1 - _DEVIATION / expected**0.5)), 1.0)

    def observe_tokens(self, tokens: float, expected: float) -> None:
        """Record the tokens that a step with drafts brought, relative to a plain step."""
        self._tokens = _PREDICTED + _TRUST_MEMORY * (self._tokens - _PREDICTED) + (tokens, expected)


@dataclass(slots=True)
class _Cycle:
    """The drafts for a step, from when they are made until the step has run."""

    without_drafts: bool = False
    """Whether no method is asked for drafts that compete."""
    asked: list[str] = field(default_factory=list)
    has_drafts: bool = False
    drafting_s: float = 0.0
    is_late: bool = True
    """Whether the step was launched before there were drafts for it."""
    is_cut: bool = False
    """Whether there was no room for all drafts."""
    num_expected: float = 0.0
    """How many of the chosen nodes should be accepted."""
    deviation: float = 0.0


class SpeculationController:
    """Decides when methods draft, how much, and how much of it is verified: what gives the most tokens per second.

    All choices' nodes compete by their probability to become output (SmartSpec's goodput, arXiv:2406.14066, for nodes
    of trees). Time is the time of whole cycles, from one drafting to the next: the forward pass, the scheduler, Python.

    - Some steps are held out from drafting, so that the time of plain steps is known. What steps with drafts saved in
      comparison, and the tokens that they brought, bound what is expected of further ones: so speculation never loses.
    - What does not pay is tried again for a small share of all time, as in conservative bandits (arXiv:1602.04282).
    - Each choice has an account of its time and its tokens, so that it does not wait long for the drafts of others.
    """

    def __init__(self) -> None:
        self.times = StepTimes(np.array([1.0, 2.0]), np.array([1.0, 1.0]), 0.0)
        """First guesses for this model on this machine; drafts cost nothing until they are measured."""
        self._sizes: dict[int, _BatchSize] = {}
        self.stats: defaultdict[str, DraftStats] = defaultdict(DraftStats)
        """By method."""
        self._num_cycles = 0
        self._cycle = _Cycle()
        self._to_try = 0.0
        """Steps' time that may be lost by verifying drafts that should not pay."""

    def _size(self, load: StepLoad) -> _BatchSize:
        size = size_class(load.num_ready)
        if size not in self._sizes:
            nearest = min(self._sizes, key=lambda known: abs(known - size), default=None)
            times = self.times if nearest is None else self._sizes[nearest].times
            self._sizes[size] = _BatchSize(times.handed_on())
        return self._sizes[size]

    # -- cycles --------------------------------------------------------------------------------------------------------

    def begin_cycle(self, load: StepLoad, *, all_bear: bool, num_rested: int = 0) -> None:
        """Begin to draft for a step; only choices that do not compete get drafts if one has waited too long."""
        self._num_cycles += 1 + num_rested
        self._to_try = min(self._to_try + (1 + num_rested) * _TRYING, 1.0)
        self._cycle = _Cycle(without_drafts=self._size(load).holds_out() or not all_bear)

    # -- drafting ------------------------------------------------------------------------------------------------------

    def rest(self, method: str) -> int:
        """For how many cycles, this one included, a method will not be asked."""
        return max(self.stats[method].rests_until - self._num_cycles, int(self._cycle.without_drafts))

    def num_wanted(self, method: str, load: StepLoad, choices: int, most: int) -> int:
        """How many nodes at most a method should draft for each of these choices; 0 if it should not draft at all."""
        if self.rest(method) > 0:
            return 0
        stats = self.stats[method]
        wanted, saving = self._num_paying(stats, load, choices)
        saving = stats.bounded(size_class(load.num_ready), saving)
        stats.is_stale = saving < 0
        ask_at = stats.asked_at - min(saving, 0.0) / _LOOKING
        if ask_at > self._num_cycles:
            stats.rests_until = min(math.ceil(ask_at), self._num_cycles + _LONGEST_REST)
            return 0
        stats.asked_at = self._num_cycles
        self._cycle.asked.append(method)
        return min(wanted or most, most)

    def _num_paying(self, stats: DraftStats, load: StepLoad, choices: int) -> tuple[int, float]:
        """The profitable node count plus one, to learn the next node's value, or 0 if it is unknown; and the steps'
        time that asking should save.
        """
        size, share = self._size(load), choices / load.num_ready
        drafting = stats.seconds(choices) / size.times.seconds(load.rows, load.context)
        num_ranks = int((stats.offered > _NEVER).sum())
        if not num_ranks:
            return 0, -drafting
        often = min(choices * float(stats.offered[0]), 1.0)
        tokens = 1 + share / often * stats.gain[:num_ranks].cumsum()
        time = _relative(size.times, load, choices / often * stats.offered[:num_ranks].cumsum())
        best = int((tokens / time).argmax())
        saving = often * float(size.trust * tokens[best] - time[best]) - drafting
        return (best + 2, saving) if saving > 0 else (0, max(saving, -drafting))

    def observe_drafting(self, method: str, seconds: float, drafts: Sequence[Sequence[float]], most: int) -> None:
        """Record how long a method drafted, and the drafts that compete: see DraftStats.observe_drafts."""
        self._cycle.drafting_s += seconds
        self._cycle.has_drafts |= any(drafts)
        if drafts:
            self.stats[method].observe_drafts(drafts, most, seconds)

    def expected_gain(self, method: str) -> float | None:
        """Tokens that a method's draft brings a choice on average; None if that is not known."""
        stats = self.stats[method]
        return float(stats.gain.sum()) if stats.num_observed else None

    # -- verifying -----------------------------------------------------------------------------------------------------

    def choose(self, load: StepLoad, offers: Sequence[DraftOffer]) -> list[int]:
        """How many first nodes of each offer to verify in a step. All choices that get a token have an offer."""
        cycle, size = self._cycle, self._size(load)
        cycle.is_late, cycle.is_cut = False, any(offer.is_cut for offer in offers)
        counts = [len(offer.survival) for offer in offers]
        if not any(counts):
            return counts
        survival = np.array([value for offer in offers for value in offer.survival])
        order = np.argsort(-survival, kind="stable")
        survival, owner = survival[order], np.repeat(np.arange(len(offers)), counts)[order]
        rows = np.repeat([offer.rows_of_node for offer in offers], counts)[order].cumsum()
        time = _relative(size.times, load, rows)
        waiting = time + cycle.drafting_s / size.times.seconds(load.rows, load.context)
        speed = size.trust * (1 + survival.cumsum() / load.num_ready) / time
        best = _best_bearable(speed, waiting, survival, owner, offers)
        if best < 0 or speed[best] <= 1:
            few = slice(0, _TRIED)
            loss = ((1 - speed) * time)[few]
            worth = np.where(loss <= self._to_try, np.arange(float(len(loss))), -np.inf)
            best = _best_bearable(worth, waiting[few], survival[few], owner[few], offers)
            if best < 0:
                return [0] * len(offers)
            self._to_try -= max(float(loss[best]), 0.0)
        cycle.num_expected = float(survival[: best + 1].sum())
        cycle.deviation = float((survival * (1 - survival))[: best + 1].sum() ** 0.5)
        nodes: list[int] = np.bincount(owner[: best + 1], minlength=len(offers)).tolist()
        return nodes

    def observe_step(self, load: StepLoad, num_rows: int, num_accepted: int, cycle_s: float | None) -> float:
        """Learn from a step with drafts that compete. Returns its expected time with drafting, relative to one without.

        Args:
            load: the step with the drafts that do not compete.
            num_rows: rows of drafts that compete.
            num_accepted: nodes of these drafts that were accepted.
            cycle_s: time since the step before; None if the engine may have been idle meanwhile.
        """
        cycle, size, full = self._cycle, self._size(load), load.plus(num_rows)
        plain_s = size.times.seconds(load.rows, load.context)
        time = (cycle.drafting_s + size.times.seconds(full.rows, full.context)) / plain_s
        if num_rows and num_accepted > cycle.num_expected + cycle.deviation:
            self._to_try = max(self._to_try, _ENCOURAGED)
            for method in cycle.asked:
                self.stats[method].encourage()
        if cycle_s is not None and cycle_s > cycle.drafting_s:
            size.times.observe(full.rows, full.context, cycle_s - cycle.drafting_s)
            if load.only_decodes:
                tokens = 1 + num_accepted / load.num_ready
                if num_rows:
                    size.observe_tokens(tokens, 1 + cycle.num_expected / load.num_ready)
                self._observe_saving(load, max(tokens - cycle_s / plain_s, -1.0))
        return time

    def _observe_saving(self, load: StepLoad, saving: float) -> None:
        """Record how many steps' time the cycle saved for the methods that were asked."""
        cycle = self._cycle
        for method in cycle.asked:
            if cycle.is_late and cycle.has_drafts:
                self.stats[method].encourage()
            elif not cycle.is_late and not cycle.is_cut:
                self.stats[method].observe_saving(size_class(load.num_ready), saving)

    @staticmethod
    def patience(patience: float, num_tokens: int, time: float) -> float:
        """A choice's account after a step, in plain steps' time: tokens earn patience, and the step's time uses it."""
        return min(max(patience + _BEARABLE * num_tokens - time, _LEAST_PATIENCE), _MOST_PATIENCE)


def _relative(times: StepTimes, load: StepLoad, num_rows: FloatArray) -> FloatArray:
    """The time of steps with this many rows more, relative to the step without."""
    seconds = times.predict(load.rows + num_rows, load.context + load.context_of_row * num_rows)
    return seconds / times.seconds(load.rows, load.context)


def _best_bearable(
    worth: FloatArray, time: FloatArray, survival: FloatArray, owner: IntArray, offers: Sequence[DraftOffer]
) -> int:
    """The index of the last node to verify, for the most worth that all choices can wait for; -1 if there is none.

    `worth` and `time` [n] result from verifying one node, two, and so on; `owner` [n] is each node's offer.
    """
    patience = np.array([offer.patience for offer in offers])
    best = int(worth.argmax())
    expected = np.bincount(owner[: best + 1], survival[: best + 1], len(offers))
    if worth[best] > -np.inf and (_BEARABLE * (1 + expected) + patience).min() >= time[best]:
        return best
    of_owner = np.where(owner[:, None] == np.arange(len(offers)), survival[:, None], 0.0)  # [n, offers]
    borne = (_BEARABLE * (1 + of_owner.cumsum(0)) + patience).min(1)
    bearable = np.where(borne >= time, worth, -np.inf)
    return int(bearable.argmax()) if np.isfinite(bearable).any() else -1
