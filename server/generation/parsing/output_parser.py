"""The parser of a choice's output: a format's reading, fed as the output comes."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol, cast

from server.generation.constraints.fragment import Fragment
from server.generation.parsing.call_grammar import Wanted
from server.generation.parsing.parts import CallArguments, Content, Part, Reasoning, content, reasoning
from server.generation.parsing.reader import WHITESPACE, Reader, Steps


@dataclass(frozen=True, slots=True)
class Expected:
    """The request's side of reading an output."""

    tools: Mapping[str, Any] = field(default_factory=dict)
    """The JSON schema of the arguments of each tool that was offered, by its name."""
    only_offered: bool = False
    """Whether a call of any other tool is text."""
    has_form: bool = False
    """Whether an answer without calls is held to a form."""
    is_thinking: bool = False
    """Whether the prompt has begun the reasoning already."""
    reasons_to_its_end: bool = False
    """Whether the reasoning goes on to its own end, whatever text is in it: a grammar takes it so."""
    calls_are_whole: bool = False
    """Whether a call that has begun can end in no other way than whole, or cut off by the end of the output: a grammar
    holds the model to it. Then its arguments are passed on as they come. Otherwise a call is passed on when it is
    complete; one that turns out to be none comes back as text, and one that was cut off is left out."""


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The tags of a family of models. Whitespace that adjoins them is the template's and not the text's."""

    name: str
    """The name by which they can be chosen."""
    begin: str
    end: str
    control: str = ""
    """The beginning of `begin`, where that alone may be a token."""

    @property
    def markers(self) -> Sequence[str]:
        """Texts that are control tokens, or may be, in the vocabularies of such models."""
        return self.control or self.begin, self.end

    def read(self, reader: Reader, *, is_begun: bool, ends: Sequence[str] = ()) -> Steps[None]:
        """Read the reasoning, if there is any, with what separates it from the answer.

        Args:
            reader: of the output.
            is_begun: whether the prompt has begun it.
            ends: texts that are no part of it, even if its end is missing; they are left unread.
        """
        opened = yield from reader.spaced_literal(self.begin)
        if opened is None and not is_begun:
            return
        yield from reader.skip(WHITESPACE)
        marker = yield from reader.until(self.end, emit=reasoning, trim=WHITESPACE, stops=ends)
        if marker is not None:
            yield from reader.skip(WHITESPACE)


THINK_TAGS = (
    ThinkTags("think", "<think>", "</think>"),
    ThinkTags("mistral_think", "[THINK]", "[/THINK]"),
    ThinkTags("seed_think", "<seed:think>", "</seed:think>"),
    ThinkTags("thought", "<thought>", "</thought>"),
    ThinkTags("gemma4", "<|channel>thought", "<channel|>", control="<|channel>"),
    ThinkTags("granite_think", "Here is my thought process:", "Here is my response:"),
)
"""All tags that are known."""


class ToolFormat(Protocol):
    """The format in which a family of models writes calls of tools, and with some families everything else as well.

    A format's `read` is a generator, see reader.py; text that is no call, a broken call included, it passes on as it
    is. It must go on to the end of the output.
    """

    @property
    def name(self) -> str:
        """The name by which it can be chosen."""
        ...

    @property
    def markers(self) -> Collection[str]:
        """Texts that are control tokens, or may be, in the vocabularies of such models."""
        ...

    @property
    def ends_reasoning(self) -> Sequence[str]:
        """With these a call begins, even where the model forgot to end its reasoning."""
        ...

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        """Read everything after the reasoning."""
        ...

    def grammar(self, wanted: Wanted) -> Fragment | None:
        """The grammar of an answer in which every call is whole; None where that is not known.

        Raises ConstraintError for a schema that is to be refused.
        """
        ...


class OutputParser:
    """Finds parts in an output that comes in pieces; whichever these are, the parts together are the same."""

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ThinkTags | None,
        expected: Expected,
        controls: Collection[str] = (),
    ) -> None:
        """`controls` are markers that the model has as single tokens, so that the same text in others means nothing."""
        self._reader = Reader(controls, expected.tools if expected.only_offered else None)
        self._steps = self._read(tools, reasoning, expected)

    def push(self, text: str, *, is_control: bool = False) -> Sequence[Part]:
        """The parts that the next piece of the output brings; pass a control token as a piece of its own."""
        self._reader.feed(text, is_control=is_control)
        return self._advance()

    def finish(self, *, is_cut: bool = False) -> Sequence[Part]:
        """The parts left when the output has ended; `is_cut` says that the model did not end it."""
        self._reader.end(is_cut=is_cut)
        return self._advance()

    def _read(self, tools: ToolFormat | None, reasoning: ThinkTags | None, expected: Expected) -> Steps[None]:
        if reasoning is not None:
            ends = () if tools is None or expected.reasons_to_its_end else tools.ends_reasoning
            yield from reasoning.read(self._reader, is_begun=expected.is_thinking, ends=ends)
        if tools is not None:
            yield from tools.read(self._reader, expected)
        yield from self._reader.until(emit=content)

    def _advance(self) -> Sequence[Part]:
        found: list[Part] = []
        for part in self._steps:
            if part is None:
                break
            found.append(part)
        return found if len(found) < 2 else _joined(found)


def _joined(parts: Sequence[Part]) -> Sequence[Part]:
    """These parts, with pieces of the same text joined; however many they are, each is copied once."""
    joined: list[Part] = []
    for kind, same in groupby(parts, type):
        if kind is Content or kind is Reasoning or kind is CallArguments:
            joined.append(kind("".join(part.text for part in cast(Iterable[Content], same))))
        else:
            joined += same
    return joined


def calls_after(
    reader: Reader, expected: Expected, begins: Sequence[str], read_call: Callable[[str], Steps[bool]], trim: str = ""
) -> Steps[None]:
    """Read text with calls in it to the end of the output.

    Args:
        reader: of the output.
        expected: what the output is read with.
        begins: texts with which a call begins.
        read_call: reads the rest of a call, given its beginning.
        trim: characters before a call that do not belong to the text.
    """
    while (begin := (yield from reader.until(*begins, emit=content, trim=trim))) is not None:
        yield from reader.attempt(begin, read_call(begin), emit=content, at_once=expected.calls_are_whole)
