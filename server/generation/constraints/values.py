"""Numbers and constants of a schema, restricted to what llguidance handles exactly.

It silently reads numbers as doubles, and drops control characters that JSON strings cannot contain unescaped.
"""

import math
from collections.abc import Sequence
from typing import Any

from server.generation.constraints.fragment import ConstraintError, check_text, under

UNWRITABLE = frozenset({*range(0x20), 0x7F} - {*b"\b\t\n\f\r"})
"""Characters that JSON strings contain only as `\\uXXXX`, which is not allowed here."""
MAX_MULTIPLE = 10_000
"""Largest `multipleOf` without its decimal point. It is a number of automaton states, which multiply."""
_EXACT = 2**53
_LARGEST = 2**63 - 1024
"""The largest double in 64 signed bits. Beyond it, llguidance uses another bound than the given one."""
_LONGEST_MAXIMUM = 2**31 - 1
_LONGEST_MINIMUM = 1_000_000
_MAX_DECIMALS = 12


def check_constant(value: Any, path: str, depth: int) -> int:
    """Count the values in a constant, including itself.

    Raises ConstraintError if it is nested deeper than `depth`, or llguidance cannot write it exactly.
    """
    if depth < 0:
        raise ConstraintError(path, "Nested too deeply.")
    if isinstance(value, str):
        check_text(value, path)
        if not UNWRITABLE.isdisjoint(map(ord, value)):
            raise ConstraintError(path, "Contains a control character, which is not supported.")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConstraintError(path, "Not a JSON number.")
    elif isinstance(value, int) and (abs(value) > _LARGEST or float(value) != value):
        raise ConstraintError(path, "Integers beyond 2**53 must be exact as doubles, and below 2**63.")
    elif isinstance(value, list):
        return 1 + sum(check_constant(item, under(path, index), depth - 1) for index, item in enumerate(value))
    elif isinstance(value, dict):
        for key in value:
            check_text(key, path)
        return 1 + sum(check_constant(item, under(path, key), depth - 1) for key, item in value.items())
    return 1


def read_count(value: object, path: str, *, is_minimum: bool) -> int | None:
    """A number of items, characters or properties; None for a maximum that no answer reaches."""
    number = _read_number(value, path)
    if number < 0 or number != int(number):
        raise ConstraintError(path, "Expected a non-negative integer.")
    if is_minimum and number > _LONGEST_MINIMUM:
        raise ConstraintError(path, f"More than {_LONGEST_MINIMUM} are not supported.")
    return None if number > _LONGEST_MAXIMUM else int(number)


def read_bound(value: object, path: str, *, is_minimum: bool, exclusive: bool) -> tuple[int | float, bool]:
    """A bound as a double, and whether it is exclusive. Integers beyond 2**53 move inwards to the next double.

    Raises ConstraintError for a bound that allows only numbers beyond 2**63.
    """
    number = _read_number(value, path)
    sign = 1 if is_minimum else -1
    if number * sign > _LARGEST:
        raise ConstraintError(path, "Only numbers beyond 2**63 fit, which are not supported.")
    number = max(number, -_LARGEST) if is_minimum else min(number, _LARGEST)
    if abs(number) < _EXACT:
        return number, exclusive
    nearest = float(number)
    if (int(nearest) - number) * sign < 0 or (exclusive and int(nearest) == number):
        nearest = math.nextafter(nearest, math.inf * sign)
    return int(nearest), False


def read_multiple(value: object, path: str, bounds: Sequence[int | float] = ()) -> int | float:
    """A valid `multipleOf`.

    Raises ConstraintError if it would take too long, or llguidance reads it as another number, or does not find out
    whether there is a multiple within the bounds of the same schema.
    """
    number = _read_number(value, path)
    if any(abs(bound) > _EXACT for bound in bounds):
        raise ConstraintError(path, "With bounds beyond 2**53, 'multipleOf' is not supported.")
    if number <= 0:
        raise ConstraintError(path, "Expected a number above 0.")
    if multiple_size(number) > MAX_MULTIPLE:
        raise ConstraintError(path, f"Must not exceed {MAX_MULTIPLE}, not counting the decimal point.")
    return int(number) if number == int(number) else number


def multiple_size(number: int | float) -> int:
    """The number without its decimal point, as llguidance computes it: by repeated multiplication of doubles by ten."""
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


def _read_number(value: object, path: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConstraintError(path, "Expected a number.")
    if isinstance(value, float) and not math.isfinite(value):  # integers may exceed all doubles
        raise ConstraintError(path, "Expected a number.")
    return value
