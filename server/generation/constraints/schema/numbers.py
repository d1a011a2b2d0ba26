"""Numbers of a schema, in the forms that llguidance takes and means exactly."""

import math

from server.generation.constraints.errors import ConstraintError

MAX_MULTIPLE = 10_000
"""Of `multipleOf`, without its decimal point: each is as many states of an automaton, and they multiply."""
_EXACT = 2**53
_LARGEST = 2**63 - 1024
"""The largest double in 64 signed bits: beyond, llguidance takes another bound than it was given."""
_LONGEST_MAXIMUM = 2**31 - 1
_LONGEST_MINIMUM = 1_000_000
_MAX_DECIMALS = 12


def read_count(value: object, path: str, *, is_minimum: bool) -> int | None:
    """A number of items, characters or properties; None for a maximum that no answer reaches."""
    number = read_number(value, path)
    if number < 0 or number != int(number):
        raise ConstraintError(path, "Expected an integer that is not negative.")
    if is_minimum and number > _LONGEST_MINIMUM:
        raise ConstraintError(path, f"More than {_LONGEST_MINIMUM} are not supported.")
    return None if number > _LONGEST_MAXIMUM else int(number)


def read_number(value: object, path: str) -> int | float:
    """Raises ConstraintError for what is no number of JSON."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConstraintError(path, "Expected a number.")
    if isinstance(value, float) and not math.isfinite(value):  # an integer may be more than any double
        raise ConstraintError(path, "Expected a number.")
    return value


def read_bound(value: object, path: str, *, is_minimum: bool, exclusive: bool) -> dict[str, int | float]:
    """A bound as a keyword of its own. Bounds are doubles: those that are none are moved inwards, so that whatever
    is generated is valid.

    That concerns integers beyond 2**53 only. Raises ConstraintError for a bound that leaves only numbers beyond 2**63.
    """
    number = read_number(value, path)
    sign = 1 if is_minimum else -1
    if number * sign > _LARGEST:
        raise ConstraintError(path, "Numbers of more than 63 bits cannot be told apart.")
    number = max(number, -_LARGEST) if is_minimum else min(number, _LARGEST)
    if abs(number) >= _EXACT:
        number, exclusive = _inwards(number, sign, exclusive=exclusive), False
    keyword = "minimum" if is_minimum else "maximum"
    return {f"exclusive{keyword.capitalize()}" if exclusive else keyword: number}


def _inwards(number: int | float, sign: int, *, exclusive: bool) -> int:
    """The nearest double that keeps the bound."""
    nearest = float(number)
    if (int(nearest) - number) * sign < 0 or (exclusive and int(nearest) == number):
        nearest = math.nextafter(nearest, math.inf * sign)
    return int(nearest)


def read_multiple(value: object, path: str) -> int | float:
    """Raises ConstraintError for a `multipleOf` that would take too long, or that llguidance reads as another."""
    number = read_number(value, path)
    if number <= 0:
        raise ConstraintError(path, "Expected a number above 0.")
    if multiple_size(number) > MAX_MULTIPLE:
        raise ConstraintError(path, f"More than the digits of {MAX_MULTIPLE} are not supported.")
    return int(number) if number == int(number) else number


def multiple_size(number: int | float) -> int:
    """The number without its decimal point, as llguidance finds it: by multiplying doubles by ten."""
    if isinstance(number, int):
        return number
    if math.isinf(number):
        return MAX_MULTIPLE + 1
    scaled = number
    for _ in range(_MAX_DECIMALS):
        if scaled == int(scaled):
            return int(scaled)
        scaled *= 10
    return MAX_MULTIPLE + 1
