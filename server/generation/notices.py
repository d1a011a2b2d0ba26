"""Notices of ignored or changed request fields, which the answer reports."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from server.errors import InvalidRequestError

MAX_NOTICES = 32
"""Limit on the notices of an answer, so that it does not outgrow the request."""
_UNSAFE = re.compile(r"[^\x21-\x2b\x2d-\x7e]")
"""Characters that an entry of a header cannot contain."""
_LONGEST_HEADER = 1024
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class Notice:
    """A request field that was ignored or changed."""

    path: Annotated[str, Meta(description="The field.")]
    """Path of the field in the request's own API."""
    reason: Annotated[str, Meta(description="Why, or into what.")]


def to_report(notices: Iterable[Notice], *, strict: bool) -> Sequence[Notice]:
    """The notices for the answer; of the same notice for several messages, only the first.

    With `strict`, raises InvalidRequestError for any notice.
    """
    first: dict[tuple[str, str], Notice] = {}
    for notice in notices:
        if strict:
            message = f"Unsupported parameter: '{notice.path}' is refused, because this server runs with --strict. "
            raise InvalidRequestError(message + notice.reason, param=notice.path, code="unsupported_parameter")
        first.setdefault((_INDEX.sub("[]", notice.path), notice.reason), notice)
    return tuple(first.values())[:MAX_NOTICES]


def as_headers(notices: Sequence[Notice]) -> dict[str, str]:
    """The notices' paths as a response header."""
    if not notices:
        return {}
    paths = ", ".join(dict.fromkeys(_UNSAFE.sub("?", notice.path) for notice in notices))
    return {"x-samewise-ignored": paths[:_LONGEST_HEADER]}


def as_warnings(notices: Sequence[Notice]) -> Mapping[str, Sequence[Mapping[str, str]]]:
    """The notices as the property `warnings`, which an answer without notices lacks."""
    if not notices:
        return {}
    return {"warnings": [{"path": notice.path, "reason": notice.reason} for notice in notices]}
