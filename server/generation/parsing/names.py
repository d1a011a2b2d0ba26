"""Names as formats without JSON write them."""

import re

from server.generation.parsing.reader import Reader, Steps

_NAME = re.compile(r"[^\s<>\[\](){}=,;'\"]+")


def name(reader: Reader) -> Steps[str]:
    """Read the characters that may stand in the name of a tool or of an argument; empty if there are none."""
    found = ""
    while (yield from reader.need()) and (more := _NAME.match(reader.known)):
        found += reader.take(more.end())
    return found
