"""What is left out of a request or changed, and told to the client: nothing is ignored in silence."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from server.errors import InvalidRequestError

MAX_NOTICES = 32
"""More would be a longer answer than the request's own."""
_UNSAFE = re.compile(r"[^\x21-\x2b\x2d-\x7e]")
"""Characters that cannot stand in an entry of a header."""
_LONGEST_HEADER = 1024
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class Notice:
    """Something of the request that was left out or changed."""

    path: Annotated[str, Meta(description="The field.")]
    """Of the field, in the request's own API."""
    reason: Annotated[str, Meta(description="Why, or into what.")]


def to_report(notices: Iterable[Notice], *, strict: bool) -> Sequence[Notice]:
    """Those that an answer reports: of what several messages have alike, the first. With `strict` nothing is left out.

    Raises InvalidRequestError then.
    """
    first: dict[tuple[str, str], Notice] = {}
    for notice in notices:
        if strict:
            message = f"Unsupported parameter: '{notice.path}' is refused by this server, which is strict. "
            raise InvalidRequestError(message + notice.reason, param=notice.path, code="unsupported_parameter")
        first.setdefault((_INDEX.sub("[]", notice.path), notice.reason), notice)
    return tuple(first.values())[:MAX_NOTICES]


def as_headers(notices: Sequence[Notice]) -> dict[str, str]:
    """Their paths, as the headers of an answer say them."""
    if not notices:
        return {}
    paths = ", ".join(dict.fromkeys(_UNSAFE.sub("?", notice.path) for notice in notices))
    return {"x-samewise-ignored": paths[:_LONGEST_HEADER]}


def as_warnings(notices: Sequence[Notice]) -> Mapping[str, Sequence[Mapping[str, str]]]:
    """As the property `warnings`, which only answers have that left something out."""
    if not notices:
        return {}
    return {"warnings": [{"path": notice.path, "reason": notice.reason} for notice in notices]}
