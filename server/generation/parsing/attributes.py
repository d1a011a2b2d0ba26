"""Attributes in a tag."""

import re

from server.generation.parsing.reader import Reader, Steps

_KEY = re.compile(r"\w*")
_VALUE = re.compile(r'[^"]*')


def attributes(reader: Reader) -> Steps[dict[str, str]]:
    """Read as many of ` key="value"` as come next, with the whitespace around them; values are as they were written."""
    found: dict[str, str] = {}
    while True:
        yield from reader.skip()
        key = yield from reader.span(_KEY)
        if (yield from reader.literal('="')) is None:
            return found
        found[key] = yield from reader.span(_VALUE)
        yield from reader.literal('"')
