"""Formats with calls between markers, in sections between markers."""

from collections.abc import Callable
from dataclasses import dataclass

from server.generation.constraints.fragment import Fragment, either, sequence, text
from server.generation.parsing.call_grammar import GrammarBuilder, calls_in_text, optional
from server.generation.parsing.output_parser import Expected
from server.generation.parsing.parts import Kept, content
from server.generation.parsing.reader import Reader, Steps


@dataclass(frozen=True, slots=True)
class CallSections:
    """The markers of a family of models.

    Text between the calls of a section is dropped. Calls outside a section are read, too.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    calls: tuple[str, ...]
    """Markers that begin a call."""
    trim: str = ""
    """Characters before a section that do not belong to the text."""

    def read(self, reader: Reader, expected: Expected, read_call: Callable[[Reader], Steps[bool]]) -> Steps[None]:
        """Read the output to its end. `read_call` reads what follows the marker of a call."""
        while True:
            before = yield from reader.until(*self.begins, emit=content, trim=self.trim, stops=self.calls)
            if before is None and not (yield from reader.need()):
                return
            yield from self._section(reader, expected, before or "", read_call)

    def grammar(self, builder: GrammarBuilder, call: Fragment) -> Fragment:
        """A grammar of answers with such calls, from the grammar of a call after its marker."""
        marked = {begin: builder.rule(sequence(builder.text(begin), call)) for begin in self.calls}
        calls = builder.several(sequence(either(*marked.values()), optional(text("\n"))))
        sections = {
            begin: sequence(calls, builder.text(end)) for begin, end in zip(self.begins, self.ends, strict=True)
        }
        return calls_in_text(builder, {**sections, **dict.fromkeys(self.calls, call)}, None)

    def _section(
        self, reader: Reader, expected: Expected, before: str, read_call: Callable[[Reader], Steps[bool]]
    ) -> Steps[None]:
        """Read calls to the end of a section, or to the first invalid one."""
        while (yield from reader.spaced_literal(*self.ends)) is None:
            reading = self._next(reader, read_call)
            if not (yield from reader.attempt(before, reading, emit=content, at_once=expected.calls_are_whole)):
                return
            before = ""

    def _next(self, reader: Reader, read_call: Callable[[Reader], Steps[bool]]) -> Steps[bool]:
        """Read the next call of a section, and drop the text before it."""
        marker = yield from reader.until(*self.calls, *self.ends, emit=Kept())
        return marker in self.calls and (yield from read_call(reader))
