"""Arguments that are written one by one, and not as JSON: put together to an object."""

from collections.abc import Sequence

from server.generation.parsing.json_text import escaped
from server.generation.parsing.output_parser import arguments
from server.generation.parsing.parts import CallArguments, Part
from server.generation.parsing.reader import Steps, T


class Members:
    """The members of an object, as far as they have been read. No key comes twice."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def begin(self, key: str) -> Steps[bool]:
        """Pass on what comes before a member's value; False if there is such a member already."""
        if key in self._keys:
            return False
        yield CallArguments(f'{", " if self._keys else "{"}"{escaped(key)}": ')
        self._keys.add(key)
        return True

    def end(self) -> Sequence[Part]:
        """What closes the object."""
        return arguments("}" if self._keys else "{}")


def quoted(reading: Steps[T]) -> Steps[bool]:
    """Put quotes around what a reading passes on by `in_quotes`; whether that came to its end, as it returns."""
    yield CallArguments('"')
    if not (yield from reading):
        return False
    yield CallArguments('"')
    return True


def in_quotes(text: str) -> Sequence[Part]:
    """A piece of a string that was written raw, as it stands between quotes."""
    return arguments(escaped(text))
