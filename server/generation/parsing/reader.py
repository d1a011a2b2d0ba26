"""Reading a text that is still being written.

A format is read by a generator that is written as if all of the output were there: it asks the reader for what comes
next, and where that is not known yet, it yields None, is suspended, and goes on when more has come. So what is found
cannot depend on how the output was cut into pieces, as long as a reader decides on nothing but what is certain.
"""

import functools
import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar, cast

from server.generation.parsing.parts import CallBegin, Emit, Part

T = TypeVar("T")
Steps = Generator[Part | None, None, T]
"""Finds parts, and yields None to ask for more of the output."""
WHITESPACE = " \t\r\n"


def result(steps: Steps[T]) -> T:
    """The value that such steps return, where all of the output is there; the parts are dropped."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return cast(T, stop.value)


class Reader:
    """The output as far as it was written and not yet read."""

    def __init__(self, controls: Collection[str] = (), names: Collection[str] | None = None) -> None:
        """Make a reader of one output.

        Args:
            controls: markers that count only where they were written as one control token. The same text in ordinary
                tokens is text then.
            names: of the tools that may be called; None for any.
        """
        self._controls = frozenset(controls)
        self._names = names
        self._text = ""
        self._at = 0
        """The index in the text at which the unread part begins. The read part goes when more is fed."""
        self._num_gone = 0
        self._control_at: set[int] = set()
        self._is_ended = False
        self.is_cut = False
        """Whether the output has ended where the model did not end it."""
        self._kept: list[str] | None = None
        """The text that was read since `attempt` began."""

    # -- writing -------------------------------------------------------------------------------------------------------

    def feed(self, text: str, *, is_control: bool = False) -> None:
        """Add the next piece of the output; a control token is a piece of its own."""
        if is_control:
            self._control_at.add(self._num_gone + len(self._text))
        self._text = self._text[self._at :] + text
        self._num_gone += self._at
        self._at = 0

    def end(self, *, is_cut: bool) -> None:
        """There will be no more; `is_cut` says that the model had not come to its end."""
        self._is_ended = True
        self.is_cut = is_cut

    # -- looking -------------------------------------------------------------------------------------------------------

    def need(self, count: int = 1) -> Steps[str]:
        """The next so many characters, or what is left of the output if that is less; they stay unread."""
        while self._num_known < count and not self._is_ended:
            yield None
        return self._text[self._at : self._at + count]

    def more(self) -> Steps[bool]:
        """Wait until more is known than now; whether there is anything more."""
        known = self._num_known
        while self._num_known == known and not self._is_ended:
            yield None
        return self._num_known > known

    def match(self, pattern: re.Pattern[str]) -> str:
        """The known text that the pattern matches, from its beginning on; it stays unread."""
        found = pattern.match(self._text, self._at)
        return found[0] if found else ""

    def spaced_ahead(self, *options: str) -> Steps[str | None]:
        """The one of these texts that comes next, with any whitespace before it; all of it stays unread."""
        found = yield from self.spaced_literal(*options)
        self.unread(found or "")
        return found

    # -- reading -------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> str:
        """Read so many characters, which are known."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def unread(self, text: str) -> None:
        """Undo having read this text, which is what was read last.

        So a reader can pass over what may have any length, and go back to it once, instead of looking at all of it
        again whenever more has come.
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
        """Read all of these characters that come next; the pattern matches any number of them."""
        taken = ""
        while (yield from self.need()) and (more := self.match(characters)):
            taken += self.take(len(more))
        return taken

    def sequence(self, *texts: str) -> Steps[str | None]:
        """Read these texts, one after the other; None, and nothing read, if they do not come next."""
        length = 0
        for text in texts:
            while not self._is_ended and self._may_begin(text, self._at + length):
                yield None
            if not self._is_at(text, self._at + length):
                return None
            length += len(text)
        return self.take(length)

    def literal(self, *options: str) -> Steps[str | None]:
        """Read the one of these texts that comes next; None, and nothing read, if none does.

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
        """Read whitespace and the one of these texts that comes next; None, and nothing read, if none does."""
        blank = yield from self.skip()
        found = yield from self.literal(*options)
        if found is None:
            self.unread(blank)
            return None
        return blank + found

    def until(self, *markers: str, emit: Emit, trim: str = "", stops: Collection[str] = ()) -> Steps[str | None]:
        """Pass on the text before the first of these markers, and read the marker.

        Args:
            markers: none may begin with another one, or contain one except as its end.
            emit: takes the pieces of the text.
            trim: characters that do not belong to the text where they stand directly before a marker.
            stops: texts at which to stop as well; they stay unread, and so does what is trimmed before them.

        Returns:
            The marker with what was trimmed before it; None at a stop, or at the end.
        """
        all_markers = (*markers, *stops)
        blank = ""  # read already; it belongs to the text unless a marker follows
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
        """Read one item or more, with commas between them, up to this end; False where there is something else."""
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
        """Read something that may turn out not to be what it seemed; then all of it is text, and passed on as such.

        But what was cut off might have become what it seemed: that is left out. What calls a tool that may not be
        called is text in any case.

        Args:
            before: the text already read that belongs to it.
            reading: returns whether it is what it seemed, or what it is; nothing that is false then.
            emit: takes the text that it is otherwise.
            at_once: from its first part on, its parts are passed on as they are found, since after that it cannot fail
                but by the end of the output. Then nothing of it comes back as text.
        """
        self._kept = [before]
        parts: list[Part] = []
        is_strange = False
        while True:
            try:
                part = next(reading)
            except StopIteration as stop:
                outcome: T = stop.value
                break
            is_strange = is_strange or self._is_strange(part)
            if part is None:
                yield None
            elif at_once and not is_strange:
                self._kept = None
                yield part
                outcome = yield from reading
                if not outcome and self.is_cut:
                    self.take(self._num_known)
                return outcome
            else:
                parts.append(part)
        text, self._kept = "".join(self._kept), None
        if outcome and not is_strange:
            yield from parts
        elif self.is_cut and not is_strange:
            self.take(self._num_known)
        elif text:
            yield from emit(text)
        return outcome

    def _is_strange(self, part: Part | None) -> bool:
        return self._names is not None and isinstance(part, CallBegin) and part.name not in self._names

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _num_known(self) -> int:
        """The number of characters that are known and not read."""
        return len(self._text) - self._at

    def _after(self, characters: str) -> int:
        """The end of these characters, as far as they come next."""
        at = self._at
        while at < len(self._text) and self._text[at] in characters:
            at += 1
        return at

    def _trimmed(self, end: int, trim: str) -> int:
        """The end of the unread text up to there, without these characters."""
        while end > self._at and self._text[end - 1] in trim:
            end -= 1
        return end

    def _is_at(self, marker: str, at: int) -> bool:
        return self._text.startswith(marker, at) and self._counts(marker, at)

    def _counts(self, marker: str, at: int) -> bool:
        """Whether all control tokens in the marker that was found there were written as such."""
        start = self._num_gone + at
        return all(start + marker.find(control) in self._control_at for control in self._controls if control in marker)

    def _may_begin(self, marker: str, at: int) -> bool:
        """Whether the marker may come there, of which no more is known; a control token comes as a whole."""
        num_known = len(self._text) - at
        return not num_known or (
            marker not in self._controls and num_known < len(marker) and marker.startswith(self._text[at:])
        )

    def _first(self, markers: tuple[str, ...]) -> re.Match[str] | None:
        """The first marker in what is known."""
        pattern = _any_of(markers)
        found = pattern.search(self._text, self._at)
        while found and not self._counts(found[0], found.start()):
            found = pattern.search(self._text, found.start() + 1)
        return found

    def _certain(self, markers: tuple[str, ...]) -> int:
        """Up to where what is known cannot belong to a marker."""
        end = len(self._text)
        longest = max(map(len, markers), default=1) - 1
        starts = range(max(self._at, end - longest), end)
        return next((at for at in starts if any(self._may_begin(marker, at) for marker in markers)), end)


@functools.cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Matches these texts; nothing if there are none."""
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")


def _drop_end(pieces: list[str], count: int) -> None:
    """Drop so many characters at the end of all pieces together."""
    while count > 0:
        last = pieces.pop()
        if len(last) > count:
            pieces.append(last[:-count])
        count -= len(last)


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


NAME = re.compile(r"[^\s<>\[\](){}=,;'\"]+")
IN_TAG = re.compile(r"[^<>\r\n]+")
