"""The arguments of a call in a whole answer, which a stream brings as the text that they are."""

import json
from typing import NoReturn

import msgspec
from pydantic_core import from_json


def as_written(text: str) -> object:
    """The value that a text of JSON stands for, for msgspec to write.

    It is the text itself, since not every number and not every string of JSON has a value in Python that is written
    the same. One that was cut off has what is complete of it, as clients read a stream, or nothing if that cannot be
    told.
    """
    try:
        json.loads(text, parse_constant=_refuse, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        return _complete(text)
    return msgspec.Raw(text.encode())


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON.")


def _complete(text: str) -> object:
    try:
        return from_json(text, allow_partial=True)
    except ValueError:
        return {}
