"""Names as formats without JSON write them."""

import re

from server.generation.parsing.reader import Reader, Steps

_NAME = re.compile(r"[^\s<>\[\](){}=,;'\"]+")
IN_TAG = re.compile(r"[^<>\r\n]+")
"""Names that stand in tags."""


def read_name(reader: Reader, pattern: re.Pattern[str] = _NAME) -> Steps[str]:
    """Read the characters that may stand in a name, of which `pattern` matches one or more; empty if there are none."""
    found = ""
    while (yield from reader.need()) and (more := pattern.match(reader.known)):
        found += reader.take(more.end())
    return found
