"""Reading a text that is still being written.

A format is read by a generator that is written as if all of the output were there: it asks the reader for what comes
next, and where that is not known yet, it yields None, is suspended, and goes on when more has come. So what is found
cannot depend on how the output was cut into pieces, as long as a reader decides on nothing but what is certain.
"""

import re
from collections.abc import Callable, Collection, Generator, Iterable
from typing import TypeVar

from server.generation.parsing.parts import Part

T = TypeVar("T")
Steps = Generator[Part | None, None, T]
"""Finds parts, and yields None to ask for more of the output."""
Emit = Callable[[str], Iterable[Part]]
"""Makes parts of a piece of text; none, if it is kept until more is known."""
WHITESPACE = " \t\r\n"


class Kept:
    """Keeps a piece of text, instead of passing it on."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def __call__(self, text: str) -> Iterable[Part]:
        """Implements Emit."""
        self._pieces.append(text)
        return ()

    @property
    def text(self) -> str:
        """All that was kept."""
        return "".join(self._pieces)


class Reader:
    """The output as far as it was written and not yet read."""

    def __init__(self, controls: Collection[str] = ()) -> None:
        """`controls` are markers that count only where they were written as one control token.

        The same text in ordinary tokens is text then.
        """
        self._controls = frozenset(controls)
        self._text = ""
        self._num_read = 0
        self._control_at: set[int] = set()
        self._is_ended = False
        self._is_cut = False
        self._kept: list[str] | None = None
        """What was read since `keep`."""

    # -- writing -------------------------------------------------------------------------------------------------------

    def feed(self, text: str, *, is_control: bool = False) -> None:
        """Add the next piece of the output; a control token is a piece of its own."""
        if is_control:
            self._control_at.add(self._num_read + len(self._text))
        self._text += text

    def end(self, *, is_cut: bool) -> None:
        """There will be no more; `is_cut` says that the model had not come to its end."""
        self._is_ended = True
        self._is_cut = is_cut

    # -- looking -------------------------------------------------------------------------------------------------------

    def need(self, count: int = 1) -> Steps[str]:
        """The next so many characters, or what is left of the output if that is less; they stay unread."""
        while len(self._text) < count and not self._is_ended:
            yield None
        return self._text[:count]

    def more(self) -> Steps[bool]:
        """Wait until more is known than now; whether there is anything more."""
        known = len(self._text)
        while len(self._text) == known and not self._is_ended:
            yield None
        return len(self._text) > known

    @property
    def known(self) -> str:
        """What is known and not read."""
        return self._text

    @property
    def is_cut(self) -> bool:
        """Whether the output has ended where the model did not end it."""
        return self._is_cut

    # -- reading -------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> str:
        """Read so many characters, which are known."""
        taken, self._text = self._text[:count], self._text[count:]
        self._num_read += len(taken)
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def skip(self, characters: str = WHITESPACE) -> Steps[str]:
        """Read all of these characters that come next, and return them."""
        skipped = ""
        while (yield from self.need())[:1] and self._text[0] in characters:
            rest = self._text.lstrip(characters)
            skipped += self.take(len(self._text) - len(rest))
        return skipped

    def span(self, characters: re.Pattern[str]) -> Steps[str]:
        """Read all of these characters that come next; the pattern matches any number of them."""
        taken = ""
        while (yield from self.need()):
            match = characters.match(self._text)
            taken += self.take(match.end() if match else 0)
            if self._text:
                break
        return taken

    def sequence(self, *texts: str) -> Steps[str | None]:
        """Read these texts, one after the other; None, and nothing read, if they do not come next."""
        end = 0
        for text in texts:
            while not self._is_ended and self._may_begin(text, self._text[end:]):
                yield None
            if not self._text.startswith(text, end) or not self._counts(text, end):
                return None
            end += len(text)
        return self.take(end)

    def literal(self, *options: str) -> Steps[str | None]:
        """Read the one of these texts that comes next; None, and nothing read, if none does.

        No option may begin with another one.
        """
        while True:
            for option in options:
                if self._text.startswith(option) and self._counts(option, 0):
                    return self.take(len(option))
            if self._is_ended or not any(self._may_begin(option, self._text) for option in options):
                return None
            yield None

    def spaced_literal(self, *options: str) -> Steps[str | None]:
        """The same with any whitespace before it, which is then read and returned, too."""
        while True:
            space = len(self._text) - len(self._text.lstrip(WHITESPACE))
            for option in options:
                if self._text.startswith(option, space) and self._counts(option, space):
                    return self.take(space + len(option))
            if self._is_ended or not any(self._may_begin(option, self._text[space:]) for option in options):
                return None
            yield None

    def until(self, *markers: str, emit: Emit, trim: str = "", stops: Collection[str] = ()) -> Steps[str | None]:
        """Pass on the text before the first of these markers, and read the marker.

        Args:
            markers: none may begin with another one, or contain one.
            emit: takes the pieces of the text.
            trim: characters that do not belong to the text where they stand directly before a marker.
            stops: texts at which to stop as well; they stay unread, and so does what is trimmed before them.

        Returns:
            The marker with what was trimmed before it; None at a stop, or at the end.
        """
        all_markers = (*markers, *stops)
        while True:
            found = self._first(all_markers)
            if found is not None:
                at, marker = found
                end = len(self._text[:at].rstrip(trim)) if trim else at
                if end:
                    yield from emit(self.take(end))
                return None if marker in stops else self.take(at - end + len(marker))
            if self._is_ended:
                if self._text:
                    yield from emit(self.take(len(self._text)))
                return None
            end = self._certain(all_markers, trim)
            if end:
                yield from emit(self.take(end))
            yield None

    # -- going back ----------------------------------------------------------------------------------------------------

    def attempt(self, before: str, reading: Steps[T], *, emit: Emit, at_once: bool) -> Steps[T]:
        """Read something that may turn out not to be what it seemed; then all of it is text, and passed on as such.

        But what was cut off might have become what it seemed: that is left out.

        Args:
            before: the text already read that belongs to it.
            reading: returns whether it is what it seemed, or what it is; nothing that is false then.
            emit: takes the text that it is otherwise.
            at_once: its parts are passed on as they are found, since it cannot fail but by the end of the output. Then
                nothing of it comes back as text.
        """
        if at_once:
            return (yield from reading)
        self._kept = [before]
        parts: list[Part] = []
        while True:
            try:
                part = next(reading)
            except StopIteration as stop:
                result: T = stop.value
                break
            if part is None:
                yield None
            else:
                parts.append(part)
        text, self._kept = "".join(self._kept), None
        if result:
            yield from parts
        elif self._is_cut:
            self.take(len(self._text))
        elif text:
            yield from emit(text)
        return result

    # ------------------------------------------------------------------------------------------------------------------

    def _counts(self, marker: str, at: int) -> bool:
        return marker not in self._controls or self._num_read + at in self._control_at

    def _may_begin(self, marker: str, tail: str) -> bool:
        """Whether what comes next may make this marker of it; a control token comes as a whole."""
        return not tail or (marker not in self._controls and len(tail) < len(marker) and marker.startswith(tail))

    def _first(self, markers: Collection[str]) -> tuple[int, str] | None:
        found: list[tuple[int, str]] = []
        for marker in markers:
            at = self._text.find(marker)
            while at >= 0 and not self._counts(marker, at):
                at = self._text.find(marker, at + 1)
            if at >= 0:
                found.append((at, marker))
        return min(found, default=None)

    def _certain(self, markers: Collection[str], trim: str) -> int:
        """How much of what is known cannot belong to a marker, or be trimmed before one."""
        longest = max(map(len, markers), default=1) - 1
        held = next(
            (
                length
                for length in range(min(longest, len(self._text)), 0, -1)
                if any(self._may_begin(marker, self._text[-length:]) for marker in markers)
            ),
            0,
        )
        end = len(self._text) - held
        return len(self._text[:end].rstrip(trim)) if trim else end
