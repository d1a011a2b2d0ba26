"""JSON in events: nothing but ASCII."""

import codecs

import msgspec

_ESCAPED = "samewise.json"


def ascii_json(value: object) -> bytes:
    """The value in one line. Some readers of events take U+2028 and its like for the end of one."""
    encoded = msgspec.json.encode(value)
    return encoded if encoded.isascii() else encoded.decode().encode("ascii", _ESCAPED)


def _escape(error: UnicodeError) -> tuple[str, int]:
    """The characters as JSON escapes them: they are in strings, where alone JSON has such characters."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be").hex(" ", 2)
    return "\\u" + units.replace(" ", "\\u"), error.end


codecs.register_error(_ESCAPED, _escape)
