"""Reads numbers in text that strangers wrote: headers, keys, arguments.

`int` and `float` raise errors for thousands of digits, and for characters such as `²` that `str.isdigit` takes. They
also read spaces, underscores and the digits of every script. A test fails for other uses of `isdigit` and its like.
"""

# Short: the server and the packages below it import nothing else together.
import math

LARGEST = 2**63 - 1
"""The largest whole number that is read, which is also the largest size of a file."""


def whole_number(text: str, most: int = LARGEST) -> int | None:
    """The number that ASCII digits write; None for any other text, and for numbers above `most`."""
    if not (text.isascii() and text.isdecimal()):
        return None
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(most)):
        return None
    number = int(digits)
    return number if number <= most else None


def decimal_number(text: str) -> float | None:
    """The finite number in a text such as `12`, `-1.5` or `2e3`; None for any other text."""
    if not text.isascii() or "_" in text or text != text.strip():
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
