"""How much background work a step may do beside other choices, from what steps were seen to take."""

from dataclasses import dataclass

_SHARE = 0.06
"""Of the time of steps of others that background work may add to them, in the long run."""
_CHEAP = 0.05
"""If it adds no more than this share to a step, it may be in nearly all; else ..."""
_ALTERNATE = 2
"""... so many steps without it come after each that has some: then most tokens come as they would."""
_FEW, _MANY = 0.2, 0.5
"""A step with background work should take longer than one without by a share between these."""
_FIRST_WIDTH = 4
"""Tokens of background work in the first step that has some."""
_TOO_FAST = 0.8
"""A step with background work that takes less than this share of one without shows that what was seen was no rule."""
_HOLD_OUT = 16
"""At least one in so many steps has none, so that it is known what such steps take."""
_WEIGHT = 0.1
"""Of the last step in the average."""
_ALONE = 4
"""A step that has nothing but background work has this part of the tokens that others may have: whoever comes
meanwhile waits for its end."""


@dataclass(frozen=True, slots=True)
class OthersLoad:
    """What a step computes for choices that are not in the background."""

    num_rows: int
    only_decodes: bool
    """Whether none of them is within its prompt."""


class BackgroundBudget:
    """How much background work a step may have.

    Background work is added to steps in which others only decode: so rarely, and so few tokens at a time, that the
    time between the tokens of others grows by less than a tenth. Where rows cost nothing, it is in nearly every step.
    """

    def __init__(self, most: int) -> None:
        """`most` are the tokens of a step."""
        self._most = most
        self._alone: dict[int, float] = {}
        """Seconds of a step without background work, by the rows of others."""
        self._width = min(_FIRST_WIDTH, most)
        self._credit = 0.0
        """Seconds that background work may add."""
        self._cost = 0.0
        """What background work adds to a step that has some, as a share of it."""
        self._num_mixed = 0
        """Steps with background work since the last one without, ..."""
        self._num_alone = 0
        """... and the other way round."""

    def num_tokens(self, others: OthersLoad, least: int) -> int:
        """Of background work that may be added to a step; less than `least` would bring nothing on."""
        if not others.num_rows:
            return max(least, self._most // _ALONE)
        is_known = _size_class(others.num_rows) in self._alone
        is_turn = self._num_mixed < _HOLD_OUT - 1 if self._cost < _CHEAP else self._num_alone >= _ALTERNATE
        is_allowed = others.only_decodes and is_known and is_turn and self._credit >= 0
        return max(least, self._width) if is_allowed else 0

    def observe(self, others: OthersLoad, num_added: int, seconds: float) -> None:
        """A step to which so many tokens of background work were added has taken so long."""
        if not others.num_rows or not others.only_decodes:
            return
        size = _size_class(others.num_rows)
        alone = self._alone.get(size, seconds)
        self._credit = min(self._credit + _SHARE * alone, alone)
        if num_added and seconds < _TOO_FAST * alone:
            self._alone[size] = alone = seconds
        if num_added:
            self._observe_added(seconds - alone, alone, num_added)
        else:
            self._num_alone, self._num_mixed = self._num_alone + 1, 0
            self._alone[size] = alone + _WEIGHT * (min(seconds, 2 * alone) - alone)

    def _observe_added(self, added: float, alone: float, num_added: int) -> None:
        self._num_alone, self._num_mixed = 0, self._num_mixed + 1
        self._credit -= max(added, 0.0)
        self._cost += _WEIGHT * (min(added / alone, 1.0) - self._cost)
        if added > _MANY * alone:
            self._width = max(1, self._width * 3 // 4)
        elif added < _FEW * alone and num_added == self._width:
            self._width = min(self._most, self._width + max(1, self._width // 4))


def _size_class(num_rows: int) -> int:
    """Exact for a few rows, to an eighth for many."""
    unit = 1 << max(0, num_rows.bit_length() - 4)
    return num_rows // unit * unit
