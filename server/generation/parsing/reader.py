"""Incremental reading of a text that is still being generated.

Each format is read by a generator, written as if the whole output were there. It asks the reader for the next text. If
that is not known yet, it yields None, and is resumed when more has arrived. So the result cannot depend on how the
output was cut into pieces, as long as generators decide only on certain text.
"""

import functools
import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar, cast

from server.generation.parsing.parts import CallBegin, Emit, Part

T = TypeVar("T")
Steps = Generator[Part | None, None, T]
"""Generator that finds parts, and yields None to ask for more of the output."""
WHITESPACE = " \t\r\n"


def result(steps: Steps[T]) -> T:
    """The return value of such a generator when the whole output is there. Its parts are dropped."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return cast(T, stop.value)


class Reader:
    """The output as far as it has arrived and was not read."""

    def __init__(self, controls: Collection[str] = (), names: Collection[str] | None = None) -> None:
        """Make a reader of one output.

        Args:
            controls: markers that count only as single control tokens; their text in other tokens is ordinary text.
            names: of the tools that may be called; None for any.
        """
        self._controls = frozenset(controls)
        self._names = names
        self._text = ""
        self._at = 0
        """Index in the text where the unread part begins. The read part is dropped when more is fed."""
        self._num_gone = 0
        self._control_at: set[int] = set()
        self._is_ended = False
        self.is_cut = False
        """Whether the output ended without the model ending it."""
        self._kept: list[str] | None = None
        """Text read since `attempt` began."""

    # -- writing -------------------------------------------------------------------------------------------------------

    def feed(self, text: str, *, is_control: bool = False) -> None:
        """Add the next piece of the output. A control token is a separate piece."""
        if is_control:
            self._control_at.add(self._num_gone + len(self._text))
        self._text = self._text[self._at :] + text
        self._num_gone += self._at
        self._at = 0

    def end(self, *, is_cut: bool) -> None:
        """The output is complete; `is_cut` says that the model did not end it."""
        self._is_ended = True
        self.is_cut = is_cut

    # -- looking -------------------------------------------------------------------------------------------------------

    def need(self, count: int = 1) -> Steps[str]:
        """The next `count` characters, or fewer at the end of the output. They stay unread."""
        while self._num_known < count and not self._is_ended:
            yield None
        return self._text[self._at : self._at + count]

    def more(self) -> Steps[bool]:
        """Wait until more of the output arrives. Returns False at its end."""
        known = self._num_known
        while self._num_known == known and not self._is_ended:
            yield None
        return self._num_known > known

    def match(self, pattern: re.Pattern[str]) -> str:
        """The known text from here on that the pattern matches. It stays unread."""
        found = pattern.match(self._text, self._at)
        return found[0] if found else ""

    def spaced_ahead(self, *options: str) -> Steps[str | None]:
        """The one of these texts that comes next, with whitespace before it. All of it stays unread."""
        found = yield from self.spaced_literal(*options)
        self.unread(found or "")
        return found

    # -- reading -------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> str:
        """Read `count` characters, which must be known."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def unread(self, text: str) -> None:
        """Undo reading this text, which must be what was read last.

        So a generator can skip text of any length and go back once, instead of scanning it again whenever more arrives.
        """
        if len(text) <= self._at:
            self._at -= len(text)
        else:
            self._text = text + self._text[self._at :]
            self._num_gone += self._at - len(text)
            self._at = 0
        if self._kept is not None:
            _drop_end(self._kept, len(text))

    def skip(self, characters: str = WHITESPACE) -> Steps[str]:
        """Read all of these characters that come next, and return them."""
        skipped = ""
        while (first := (yield from self.need())) and first in characters:
            skipped += self.take(self._after(characters) - self._at)
        return skipped

    def span(self, characters: re.Pattern[str]) -> Steps[str]:
        """Read all characters that come next and match the pattern, which must match any number of them."""
        taken = ""
        while (yield from self.need()) and (more := self.match(characters)):
            taken += self.take(len(more))
        return taken

    def sequence(self, *texts: str) -> Steps[str | None]:
        """Read these texts in order. Returns None and reads nothing if they do not come next."""
        length = 0
        for text in texts:
            while not self._is_ended and self._may_begin(text, self._at + length):
                yield None
            if not self._is_at(text, self._at + length):
                return None
            length += len(text)
        return self.take(length)

    def literal(self, *options: str) -> Steps[str | None]:
        """Read the one of these texts that comes next. Returns None and reads nothing if none does.

        No option may begin with another one.
        """
        while True:
            for option in options:
                if self._is_at(option, self._at):
                    return self.take(len(option))
            if self._is_ended or not any(self._may_begin(option, self._at) for option in options):
                return None
            yield None

    def spaced_literal(self, *options: str) -> Steps[str | None]:
        """Read whitespace and the one of these texts that follows it. Returns None and reads nothing if none does."""
        blank = yield from self.skip()
        found = yield from self.literal(*options)
        if found is None:
            self.unread(blank)
            return None
        return blank + found

    def until(self, *markers: str, emit: Emit, trim: str = "", stops: Collection[str] = ()) -> Steps[str | None]:
        """Emit the text before the first of these markers, and read the marker.

        Args:
            markers: none may begin with another one, or contain one except as its end.
            emit: gets the pieces of the text.
            trim: characters that do not belong to the text if they directly precede a marker.
            stops: further texts at which to stop; they stay unread, with what is trimmed before them.

        Returns:
            The marker with what was trimmed before it; None at a stop or at the end.
        """
        all_markers = (*markers, *stops)
        blank = ""  # already read; belongs to the text unless a marker follows
        while True:
            found = self._first(all_markers)
            certain = found.start() if found else len(self._text) if self._is_ended else self._certain(all_markers)
            if (end := self._trimmed(certain, trim)) > self._at:
                yield from emit(blank + self.take(end - self._at))
                blank = ""
            if certain > end:
                blank += self.take(certain - end)
            if found is not None and found[0] not in stops:
                return blank + self.take(found.end() - self._at)
            if found is not None:
                self.unread(blank)
                return None
            if self._is_ended:
                yield from emit(blank) if blank else ()
                return None
            yield None

    def items(self, item: Callable[[], Steps[bool]], end: str) -> Steps[bool]:
        """Read one or more comma-separated items up to `end`. Returns False for anything else."""
        while True:
            yield from self.skip()
            if not (yield from item()):
                return False
            yield from self.skip()
            following = yield from self.literal(",", end)
            if following != ",":
                return following is not None

    # -- going back ----------------------------------------------------------------------------------------------------

    def attempt(self, before: str, reading: Steps[T], *, emit: Emit, at_once: bool) -> Steps[T]:
        """Read something that may turn out to be plain text, and then emit it as text.

        If the output was cut, an incomplete reading is dropped instead, because it might have become valid. A call of a
        tool that was not offered is always text.

        Args:
            before: text that was read already and belongs to it.
            reading: returns a true value if the reading is valid.
            emit: gets the text if it is not.
            at_once: emit parts from the first one on, because the reading can then fail only at the end of the output.
                It never becomes text then.
        """
        self._kept = [before]
        parts: list[Part] = []
        is_unoffered = False
        while True:
            try:
                part = next(reading)
            except StopIteration as stop:
                outcome: T = stop.value
                break
            is_unoffered = is_unoffered or self._is_unoffered(part)
            if part is None:
                yield None
            elif at_once and not is_unoffered:
                self._kept = None
                yield part
                outcome = yield from reading
                if not outcome and self.is_cut:
                    self.take(self._num_known)
                return outcome
            else:
                parts.append(part)
        text, self._kept = "".join(self._kept), None
        if outcome and not is_unoffered:
            yield from parts
        elif self.is_cut and not is_unoffered:
            self.take(self._num_known)
        elif text:
            yield from emit(text)
        return outcome

    def _is_unoffered(self, part: Part | None) -> bool:
        return self._names is not None and isinstance(part, CallBegin) and part.name not in self._names

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _num_known(self) -> int:
        """Number of known characters that were not read."""
        return len(self._text) - self._at

    def _after(self, characters: str) -> int:
        """The end of the run of these characters that comes next."""
        at = self._at
        while at < len(self._text) and self._text[at] in characters:
            at += 1
        return at

    def _trimmed(self, end: int, trim: str) -> int:
        """The end of the unread text up to `end`, without trailing trimmed characters."""
        while end > self._at and self._text[end - 1] in trim:
            end -= 1
        return end

    def _is_at(self, marker: str, at: int) -> bool:
        return self._text.startswith(marker, at) and self._counts(marker, at)

    def _counts(self, marker: str, at: int) -> bool:
        """Whether all control tokens in a marker found here were written as control tokens."""
        start = self._num_gone + at
        return all(start + marker.find(control) in self._control_at for control in self._controls if control in marker)

    def _may_begin(self, marker: str, at: int) -> bool:
        """Whether the marker may start here, where the known text ends. Control tokens never arrive in pieces."""
        num_known = len(self._text) - at
        return not num_known or (
            marker not in self._controls and num_known < len(marker) and marker.startswith(self._text[at:])
        )

    def _first(self, markers: tuple[str, ...]) -> re.Match[str] | None:
        """The first marker in the known text."""
        pattern = _any_of(markers)
        found = pattern.search(self._text, self._at)
        while found and not self._counts(found[0], found.start()):
            found = pattern.search(self._text, found.start() + 1)
        return found

    def _certain(self, markers: tuple[str, ...]) -> int:
        """The end of the known text that cannot belong to a marker."""
        end = len(self._text)
        longest = max(map(len, markers), default=1) - 1
        starts = range(max(self._at, end - longest), end)
        return next((at for at in starts if any(self._may_begin(marker, at) for marker in markers)), end)


@functools.cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern for any of these texts; it matches nothing if there are none."""
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")


def _drop_end(pieces: list[str], count: int) -> None:
    """Drop `count` characters from the end of the concatenated pieces."""
    while count > 0:
        last = pieces.pop()
        if len(last) > count:
            pieces.append(last[:-count])
        count -= len(last)


_KEY = re.compile(r"\w*")
_VALUE = re.compile(r'[^"]*')


def attributes(reader: Reader) -> Steps[dict[str, str]]:
    """Read ` key="value"` pairs and the whitespace around them. Values are not unescaped."""
    found: dict[str, str] = {}
    while True:
        yield from reader.skip()
        key = yield from reader.span(_KEY)
        if (yield from reader.literal('="')) is None:
            return found
        found[key] = yield from reader.span(_VALUE)
        yield from reader.literal('"')


NAME = re.compile(r"[^\s<>\[\](){}=,;'\"]+")
IN_TAG = re.compile(r"[^<>\r\n]+")
