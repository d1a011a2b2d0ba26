"""How much background work a step may include, based on measured step times."""

from dataclasses import dataclass

_SHARE = 0.06
"""Long-run share of foreground step time that background work may add."""
_CHEAP = 0.05
"""If background work adds at most this share to a step, nearly every step may include some."""
_ALTERNATE = 2
"""Otherwise this many steps without background work follow each step with some, so most tokens are not delayed."""
_FEW, _MANY = 0.2, 0.5
"""A mixed step should take longer than one without background work, by a share between these two."""
_FIRST_WIDTH = 4
"""Background tokens in the first mixed step."""
_TOO_FAST = 0.8
"""If a mixed step takes less than this share of a step without background work, that earlier measurement was wrong."""
_HOLD_OUT = 16
"""At least one of this many steps has no background work, to keep its time measured."""
_WEIGHT = 0.1
"""Weight of the latest step in the moving average."""
_ALONE = 4
"""A step with only background work gets the full token budget divided by this, so that new requests wait less."""


@dataclass(frozen=True, slots=True)
class OthersLoad:
    """The foreground work of a step."""

    num_rows: int
    only_decodes: bool
    """Whether all foreground choices are past their prompt."""


class BackgroundBudget:
    """Limits the background work per step.

    Background work is added to steps in which foreground choices only decode. It is limited so that the time between
    foreground tokens grows by less than a tenth. Where extra rows cost nothing, nearly every step includes some.
    """

    def __init__(self, most: int) -> None:
        """`most` is the token limit of a step."""
        self._most = most
        self._alone: dict[int, float] = {}
        """Seconds per step without background work, by number of foreground rows."""
        self._width = min(_FIRST_WIDTH, most)
        self._credit = 0.0
        """Seconds that background work may still add."""
        self._cost = 0.0
        """Time that background work adds to a mixed step, as a share of the step."""
        self._num_mixed = 0
        """Consecutive steps with background work."""
        self._num_alone = 0
        """Consecutive steps without background work."""

    def num_tokens(self, others: OthersLoad, least: int) -> int:
        """How many background tokens the next step may include. Fewer than `least` would make no progress."""
        if not others.num_rows:
            return max(least, self._most // _ALONE)
        is_known = _size_class(others.num_rows) in self._alone
        is_turn = self._num_mixed < _HOLD_OUT - 1 if self._cost < _CHEAP else self._num_alone >= _ALTERNATE
        is_allowed = others.only_decodes and is_known and is_turn and self._credit >= 0
        return max(least, self._width) if is_allowed else 0

    def observe(self, others: OthersLoad, num_added: int, seconds: float) -> None:
        """Record the duration of a step with `num_added` tokens of background work."""
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
    """Round to a class: exact for few rows, within an eighth for many."""
    unit = 1 << max(0, num_rows.bit_length() - 4)
    return num_rows // unit * unit
