"""The lines of a batch's input file, and their results."""

import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec

from server.api.batches.objects import BatchError
from server.errors import shorten
from server.http.loopback import LoopbackAnswer
from server.storage.batches import LineResult

_MAX_ERRORS = 20
"""The most malformed lines that are reported."""
_ENVELOPE_BYTES = 64 << 10
"""The most bytes of a line in addition to its request's body."""
_MAX_MESSAGE = 512
"""Longest error message in characters; messages may quote the client."""
Fields = Mapping[str, Any]


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch."""

    number: int
    """Number of the line from 0, without empty lines."""
    custom_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of checking an input file."""

    num_lines: int
    errors: Sequence[BatchError]
    """Entries of `errors` in a batch's object; empty if all lines can be run."""


class _LineError(Exception):
    """A line is malformed."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def batch_error(code: str, message: str, line: int | None = None, param: str | None = None) -> BatchError:
    """An entry of `errors` in a batch's object."""
    return BatchError(code=code, line=line, message=shorten(message, _MAX_MESSAGE), param=param)


def check_lines(path: Path, endpoint: str, most_lines: int, max_body_bytes: int) -> Checked:
    """Check that each line is a request to this endpoint, with a unique id and within the size limit.

    Raises OSError.
    """
    errors: list[BatchError] = []
    seen: set[str] = set()
    number = 0
    most = max_body_bytes + _ENVELOPE_BYTES
    for place, text in _texts(path, most):
        if place > most_lines:
            message = f"The file has more than {most_lines} lines, the most that this server accepts in a batch."
            errors.append(batch_error("too_many_lines", message, place))
            break
        if not text.strip():
            continue
        try:
            if len(text) > most:
                reason = f"This line is too large: a request's body may have at most {max_body_bytes} bytes."
                raise _LineError("line_too_large", reason)
            written = _parsed(text)
            _check(written, endpoint, seen)
            seen.add(written.custom_id)
        except _LineError as wrong:
            errors.append(batch_error(wrong.code, str(wrong), place, wrong.param))
        number += 1
        if len(errors) == _MAX_ERRORS:
            break
    if not number and not errors:
        errors.append(batch_error("empty_file", "The file has no lines."))
    return Checked(number, errors)


def groups_in(path: Path, group_of: Callable[[bytes], str]) -> Sequence[str]:
    """The groups of the bodies of a checked file, in the order in which they first occur. Raises OSError."""
    return list(dict.fromkeys(group_of(line.body) for line in read_lines(path)))


def read_lines(path: Path, but: Collection[int] = ()) -> Iterator[Line]:
    """The requests of a checked file, except those with these numbers. Raises OSError."""
    for number, text in enumerate(text for _, text in _texts(path) if text.strip()):
        if number not in but:
            written = _parsed(text)
            yield Line(number, written.custom_id, bytes(written.body))


def result_of(batch_id: str, line: Line, answer: LoopbackAnswer) -> LineResult:
    """The result of a line that was answered."""
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": msgspec.Raw(answer.body),
    }
    return _result(batch_id, line, response, None, is_error=answer.status >= 400)


def unanswered(batch_id: str, line: Line, code: str, message: str) -> LineResult:
    """The result of a line that was never answered."""
    return _result(batch_id, line, None, {"code": code, "message": message}, is_error=True)


def _result(batch_id: str, line: Line, response: Fields | None, error: Fields | None, *, is_error: bool) -> LineResult:
    made = {
        "id": f"batch_req_{batch_id.removeprefix('batch_')}_{line.number}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return LineResult(line.number, is_error, msgspec.json.encode(made))


def _texts(path: Path, most: int = sys.maxsize - 1) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers from 1. Longer lines are cut off after `most` + 1 bytes."""
    with path.open("rb") as file:
        for place in count(1):
            text = rest = file.readline(most + 1)
            if place == 1:
                text = text.removeprefix(BOM_UTF8)  # some editors begin a file with it
            if not text:
                return
            while len(rest) > most and not rest.endswith(b"\n"):
                rest = file.readline(most + 1)
            yield place, text


def _parsed(text: bytes) -> _Written:
    try:
        return msgspec.json.decode(text, type=_Written)
    except msgspec.ValidationError as error:
        raise _LineError("invalid_line", f"This line is not a batch request: {error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _LineError("invalid_json_line", f"This line is not parseable as valid JSON: {error}.") from None


def _check(written: _Written, endpoint: str, seen: Collection[str]) -> None:
    if not written.custom_id:
        raise _LineError("missing_required_parameter", "The 'custom_id' of this line is empty.", "custom_id")
    if written.custom_id in seen:
        message = f"The custom_id '{shorten(written.custom_id)}' of this line was used by a line before it."
        raise _LineError("duplicate_custom_id", message, "custom_id")
    if written.url != endpoint:
        message = f"The url of this line is '{shorten(written.url)}', but the batch is for '{endpoint}'."
        raise _LineError("mismatched_endpoint", message, "url")
