"""How many draft tokens a step can afford."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from model_runner.batch import IntArray
from model_runner.speculative.comparison import Comparison
from model_runner.speculative.offers import Offers, size_class
from model_runner.speculative.step_times import FloatArray, StepLoad, StepTimes

_BEARABLE = 1.08
"""No choice shall wait longer for a token, on average, than so many times what it would without anybody's drafts. So it
is at most a tenth even where times are predicted wrongly by a fiftieth."""
_MOST_PATIENCE = 4.0
"""What a choice has gained by drafts it may lose again by those of others, up to so many steps; ..."""
_LEAST_PATIENCE = -1.0
"""... and what it lost beyond that is made good, up to so many."""
_DISTURBED = 1.5
"""A step that took so many times longer than expected counts as this where it is asked what drafts saved."""
_LOOKING = 0.005
"""The share of the time that a method may take to look for drafts while these do not pay, ..."""
_FRUITLESS = 8
"""... a half of it after so many fruitless times, a third after twice as many, and so on to ..."""
_LEAST_LOOKING = 0.25
"""... so much of it."""
_LONGEST_REST = 16
"""A method that does not pay is not thought of again for so many cycles, at most."""
_TRYING = 0.002
"""The share of the time that may be lost by verifying drafts that should not pay, ..."""
_TRIED = 4
"""... so many at once, ..."""
_ENCOURAGED = 0.5
"""... and after more came true than was expected, so many steps' time at once."""
_HOLDING_OUT = 0.005
"""The share of the time that may be lost by steps without drafts that should pay, ..."""
_HELD_OUT = 4
"""... so many in a row, and ..."""
_MOST_HELD_OUT = 1 / 16
"""... at most this share of the steps."""
_SAVING_RATE = 0.05
"""How quickly the estimate of what is lost by them follows."""
_NEVER = 1e-3
"""Nodes that are offered less often than this are not thought of."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a choice that gets a token would like to verify."""

    survival: Sequence[float] = ()
    """Of each node the probability to become output, in descending order."""
    rows: int = 1
    """That each node takes: two where the choice has a guide."""
    patience: float = 0.0
    """So many steps longer than is bearable the choice may wait; see Budget.patience."""
    is_cut: bool = False
    """Whether there was no room for more of its draft."""


class _SizeClass:
    """What is known of steps with about so many ready choices, which differ in more than their rows."""

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self.comparison = Comparison()
        self._saving = 0.0
        """How many steps' time a step with drafting saves."""
        self._owed = _HELD_OUT - 0.5
        """Steps without drafting that the hold-out lacks, ..."""
        self._is_held_out = False
        """... and whether it is getting them."""

    def holds_out(self) -> bool:
        """Whether the next step is one without drafting, to compare others with."""
        self._is_held_out = self._owed > 0 if self._is_held_out else self._owed >= _HELD_OUT
        return self._is_held_out

    def book_plain(self) -> None:
        """There was a step without drafting, for whatever reason."""
        self._owed = max(self._owed - 1, -_HELD_OUT)

    def book_drafting(self, saving: float) -> None:
        """There was a step with drafting that saved the time of so many steps, or lost it."""
        self._saving += _SAVING_RATE * (saving - self._saving)
        self._owed += min(_HOLDING_OUT / max(self._saving, _HOLDING_OUT), _MOST_HELD_OUT)


@dataclass(slots=True)
class _Cycle:
    """All that is done from one drafting to the next."""

    is_plain: bool
    """No method is to be asked, except for drafts that do not compete."""
    load: StepLoad | None = None
    """Of its step, drafts that do not compete included."""
    num_rows: int = 0
    """Of drafts that compete."""
    expected: float = 0.0
    """How many of these should become output, by their probabilities, and ..."""
    deviation: float = 0.0
    """... by how many that may be wrong."""
    gained: int = 0
    """How many did."""
    drafting_s: float = 0.0
    is_late: bool = True
    """The step had been launched before there were drafts for it."""
    is_cut: bool = False
    """There was no room for all drafts."""
    offering: set[str] = field(default_factory=set)
    """Methods that found something."""


class Budget:
    """Decides when methods draft, how much, and how much of it is verified: what gives the most tokens per second.

    All candidates of all choices compete by their probability to become output (SmartSpec's goodput, arXiv:2406.14066,
    with trees and single tokens in place of lengths). The probabilities only decide what is computed in vain.

    Time is that of whole cycles, from one drafting to the next: forward pass, grammars, scheduler, Python. What
    drafting takes of it is known for each method, the rest by the rows of steps with about as many choices. Four
    things keep this from costing more than it brings:

    - Steps without any drafting are held out, and the speed that others gained over them is compared with what was
      predicted. Only a gain that is left after what predictions were too high by, and one standard error, is taken.
    - What steps saved for which a method was asked says whether it goes on being asked, not only what it offers.
    - Nobody's patience is strained: each choice has an account of the time that it waits and the tokens that it gets.
    - What does not pay is tried again, since it may do so by now, but only with a small share of all time, as in
      conservative bandits (Wu et al., arXiv:1602.04282): looking for drafts, verifying them, and holding out steps.
    """

    def __init__(self) -> None:
        self.times = StepTimes(np.array([1.0, 2.0]), np.array([1.0, 1.0]), 0.0)
        """First guesses, of this model on this machine; until they are measured, drafts cost nothing."""
        self._classes: dict[int, _SizeClass] = {}
        self._offers: dict[str, Offers] = {}
        self._asked: list[str] = []
        """Methods asked in this cycle."""
        self._num_cycles = 0
        self._cycle = _Cycle(is_plain=False)
        self._follows_plain = False
        """Whether there was no drafting in the cycle before, so that nothing of it is left in this one."""
        self._to_try = 0.0
        """Steps' time that may be lost by verifying drafts that should not pay."""

    # -- cycles --------------------------------------------------------------------------------------------------------

    def begin_cycle(self, load: StepLoad, *, all_bear: bool, num_rested: int = 0) -> None:
        """Drafting for a step begins.

        Args:
            load: of the step, as far as it is known.
            all_bear: whether no choice has waited longer than it can bear.
            num_rested: cycles since the last one that began here, in which nobody was to draft: see `rest`.
        """
        self._num_cycles += 1 + num_rested
        self._to_try = min(self._to_try + (1 + num_rested) * _TRYING, 1.0)
        self._follows_plain = not (self._asked or self._cycle.num_rows)
        self._cycle = _Cycle(is_plain=not all_bear or self._class_of(load).holds_out())
        self._asked = []

    def end_cycle(self, seconds: float) -> None:
        """The cycle took so long, and its step is observed. A cycle in which there was nothing to do is not ended."""
        cycle, load = self._cycle, self._cycle.load
        if load is None or seconds <= cycle.drafting_s:
            return
        kind = self._class_of(load)
        seconds -= cycle.drafting_s
        rows, context = load.rows + cycle.num_rows, load.context + int(load.context_of_row * cycle.num_rows)
        undisturbed = kind.times.undisturbed(rows, context)
        plain = kind.times.seconds(load.rows, load.context)
        expected_s = kind.times.seconds(rows, context)
        kind.times.observe(rows, context, seconds)
        if not load.only_decodes:
            return
        if cycle.num_rows:
            came, expected = (1 + count / load.num_ready for count in (cycle.gained, cycle.expected))
            kind.comparison.observe_with(undisturbed, seconds, expected, came)
        if self._asked or cycle.num_rows:
            seconds = min(seconds, _DISTURBED * expected_s)
            saving = max(1 + cycle.gained / load.num_ready - (seconds + cycle.drafting_s) / plain, -1.0)
            kind.book_drafting(saving)
            self._judge_asked(size_class(load.num_ready), saving)
            return
        kind.book_plain()
        if self._follows_plain:
            kind.comparison.observe_without(undisturbed, seconds)

    def _judge_asked(self, size: int, saving: float) -> None:
        """What a step saved tells of the method that was asked for it, if that was one and all its drafts had room.
        Drafts that came too late for their step tell nothing: the next ones will.
        """
        for method in self._asked:
            if self._cycle.is_late:
                if method in self._cycle.offering:
                    self._offers[method].ask_again()
            elif len(self._asked) == 1 and not self._cycle.is_cut:
                self._offers[method].observe_saving(size, saving)

    def _class_of(self, load: StepLoad) -> _SizeClass:
        size = size_class(load.num_ready)
        if size not in self._classes:
            nearest = min(self._classes, key=lambda known: abs(known - size), default=None)
            times = self.times if nearest is None else self._classes[nearest].times
            self._classes[size] = _SizeClass(times.handed_on())
        return self._classes[size]

    # -- drafting ------------------------------------------------------------------------------------------------------

    def rest(self, method: str, load: StepLoad, choices: int) -> int:
        """For how many cycles, this one included, it is known that a method is not to draft for so many choices."""
        offers = self._offers.get(method)
        sizes = size_class(load.num_ready), size_class(choices)
        rest = 0 if offers is None else max(offers.rests_until.get(sizes, 0) - self._num_cycles, 0)
        return max(rest, 1) if self._cycle.is_plain else rest

    def num_wanted(self, method: str, load: StepLoad, choices: int, most: int) -> int:
        """How many nodes at most a method is to draft for each of so many choices; 0 if it is not to draft at all."""
        if self.rest(method, load, choices):
            return 0
        offers = self._offers.setdefault(method, Offers())
        wanted, saving = self._num_paying(offers, load, choices)
        saving = offers.bounded(size_class(load.num_ready), saving)
        offers.is_old = saving < 0
        if saving >= 0:
            offers.fruitless = 0
        else:
            ask_at = offers.asked_at - saving / _looking_share(offers.fruitless)
            if ask_at > self._num_cycles:
                sizes = size_class(load.num_ready), size_class(choices)
                offers.rests_until[sizes] = min(math.ceil(ask_at), self._num_cycles + _LONGEST_REST)
                return 0
            offers.fruitless += 1
        offers.asked_at = self._num_cycles
        self._asked.append(method)
        return min(wanted or most, most)

    def _num_paying(self, offers: Offers, load: StepLoad, choices: int) -> tuple[int, float]:
        """One node more than should pay, so that it is known what the next one would bring, or 0 if that is not known;
        and how many steps' time it would save to ask for these.
        """
        kind, share = self._class_of(load), choices / load.num_ready
        drafting = offers.seconds(choices) / kind.times.seconds(load.rows, load.context)
        if not offers.num_observed:
            return 0, 0.0
        often = min(choices * float(offers.nodes[0]), 1.0)
        num_ranks = int((offers.nodes > _NEVER).sum())
        if not num_ranks or (1 + share * offers.total_gain / often) * kind.comparison.trust <= 1:
            return 0, -drafting
        gain = 1 + share / often * offers.gain[:num_ranks].cumsum()
        time = _relative(kind.times, load, choices / often * offers.nodes[:num_ranks].cumsum())
        best = int((gain / time).argmax())
        saving = often * float(kind.comparison.trust * gain[best] - time[best]) - drafting
        return (best + 2, saving) if saving > 0 else (0, max(saving, -drafting))

    def observe_offers(self, method: str, offers: Sequence[Sequence[float]], most: int) -> None:
        """Take in what a method offered each choice that it was asked for; see Offers.observe."""
        if any(offers):
            self._cycle.offering.add(method)
        self._offers.setdefault(method, Offers()).observe(offers, most)

    def observe_drafting(self, method: str, seconds: float, choices: int) -> None:
        """Take in how long a method took to draft for so many choices that compete."""
        self._cycle.drafting_s += seconds
        if choices:
            self._offers.setdefault(method, Offers()).observe_seconds(seconds, choices)

    def forget_savings(self, method: str) -> None:
        """Its drafts are made by other weights from now on."""
        self._offers.setdefault(method, Offers()).forget_savings()

    def expected_gain(self, method: str) -> float | None:
        """How many tokens a method's draft would bring a choice, on average; None if that is not known."""
        offers = self._offers.get(method)
        return offers.total_gain if offers is not None and offers.num_observed else None

    # -- verifying -----------------------------------------------------------------------------------------------------

    def choose(self, load: StepLoad, offers: Sequence[Offer]) -> list[int]:
        """How many nodes of each offer to verify; of a choice's nodes always the first ones.

        Args:
            load: the step without them.
            offers: of all choices that get a token, also where there is none.
        """
        self._cycle.is_late, self._cycle.is_cut = False, any(offer.is_cut for offer in offers)
        counts = [len(offer.survival) for offer in offers]
        num_nodes = sum(counts)
        if not num_nodes:
            return counts
        kind = self._class_of(load)
        survival = np.array([value for offer in offers for value in offer.survival])
        owner = np.repeat(np.arange(len(offers)), counts)
        rows = np.repeat([offer.rows for offer in offers], counts)
        order = np.argsort(-survival, kind="stable")
        survival, owner, rows = survival[order], owner[order], rows[order].cumsum()
        gain = survival.cumsum()
        time = _relative(kind.times, load, rows)
        speed = (1 + gain / load.num_ready) / time
        drafting = self._cycle.drafting_s / kind.times.seconds(load.rows, load.context)
        best = _best_bearable(speed, time + drafting, survival, owner, offers)
        if best < 0 or speed[best] * kind.comparison.trust <= 1:
            few = slice(0, _TRIED if best < 0 or speed[best] <= 1 else best + 1)
            best = _best_bearable(
                np.arange(float(num_nodes))[few], time[few] + drafting, survival[few], owner[few], offers
            )
            if best < 0 or not self._can_try(time[best] - kind.comparison.trust * speed[best] * time[best]):
                return [0] * len(offers)
        chosen = survival[: best + 1]
        self._cycle.num_rows = int(rows[best])
        self._cycle.expected = float(gain[best])
        self._cycle.deviation = float((chosen * (1 - chosen)).sum()) ** 0.5
        nodes: list[int] = np.bincount(owner[: best + 1], minlength=len(offers)).tolist()
        return nodes

    def _can_try(self, loss: float) -> bool:
        if loss > self._to_try:
            return False
        self._to_try -= loss
        return True

    def observe_step(self, load: StepLoad, num_rows: int, gained: int) -> float:
        """Take in what a step computed, drafts that do not compete included, and what drafts that do brought.

        Args:
            load: the step without drafts that compete.
            num_rows: of these.
            gained: how many of them became output.

        Returns:
            How long the step should take with all drafting for it, relative to a step without.
        """
        cycle = self._cycle
        cycle.load, cycle.num_rows, cycle.gained = load, num_rows, gained
        if num_rows and gained > cycle.expected + cycle.deviation:
            self._to_try = max(self._to_try, _ENCOURAGED)
            for method in self._asked:
                self._offers[method].encourage()
        times = self._class_of(load).times
        drafting = cycle.drafting_s / times.seconds(load.rows, load.context) if cycle.drafting_s else 0.0
        return drafting + (float(_relative(times, load, np.array([num_rows]))[0]) if num_rows else 1.0)

    @staticmethod
    def patience(patience: float, num_tokens: int, time: float) -> float:
        """A choice's account after a step of so many steps' time that brought it so many tokens."""
        return min(max(patience + _BEARABLE * num_tokens - time, _LEAST_PATIENCE), _MOST_PATIENCE)


def _looking_share(fruitless: int) -> float:
    return _LOOKING * max(1 / (1 + fruitless / _FRUITLESS), _LEAST_LOOKING)


def _relative(times: StepTimes, load: StepLoad, num_rows: FloatArray) -> FloatArray:
    """The time of steps with so many more rows, relative to the step without."""
    seconds = times.predict(load.rows + num_rows, load.context + load.context_of_row * num_rows)
    return seconds / times.seconds(load.rows, load.context)


def _best_bearable(
    worth: FloatArray, time: FloatArray, survival: FloatArray, owner: IntArray, offers: Sequence[Offer]
) -> int:
    """The last of the first nodes whose verification is worth the most, among those numbers that all can bear; or -1.

    Args:
        worth: [n] of verifying one node, two, ...
        time: [n] the same, with drafting.
        survival: [n] of each node.
        owner: [n] the offer that each belongs to.
        offers: all.
    """
    patience = np.array([offer.patience for offer in offers])
    best = int(worth.argmax())
    expected = np.bincount(owner[: best + 1], survival[: best + 1], len(offers))
    if (_BEARABLE * (1 + expected) + patience).min() >= time[best]:
        return best
    of_owner = np.where(owner[:, None] == np.arange(len(offers)), survival[:, None], 0.0)  # [n, offers]
    borne = (_BEARABLE * (1 + of_owner.cumsum(0)) + patience).min(1)
    bearable = np.where(borne >= time, worth, -np.inf)
    return int(bearable.argmax()) if np.isfinite(bearable).any() else -1
