"""The parser of a choice's output: a format's reading, fed as the output comes."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol, cast

from server.generation.constraints.fragment import Fragment
from server.generation.parsing.call_grammar import Wanted
from server.generation.parsing.parts import CallArguments, Content, Part, Reasoning
from server.generation.parsing.reader import Reader, Steps
from server.generation.parsing.think_tags import ThinkTags


@dataclass(frozen=True, slots=True)
class Expected:
    """What the output is going to be read with."""

    tools: Mapping[str, Any] = field(default_factory=dict)
    """The JSON schema of the arguments of each tool that was offered, by its name."""
    only_offered: bool = False
    """Whether a call of any other tool is text."""
    has_form: bool = False
    """Whether an answer without calls is held to a form."""
    is_thinking: bool = False
    """Whether the prompt has begun the reasoning already."""
    reasons_to_its_end: bool = False
    """Whether the reasoning goes on to its own end, whatever stands in it: a grammar takes it so."""
    calls_are_whole: bool = False
    """Whether a call that has begun can end in no other way than whole, or cut off by the end of the output: a grammar
    holds the model to it. Then its arguments are passed on as they come. Otherwise a call is passed on when it is
    complete; one that turns out to be none comes back as text, and one that was cut off is left out."""


class ToolFormat(Protocol):
    """How a family of models writes calls of tools, and with some families everything else as well.

    A format's `read` is a generator, see reader.py; text that is no call, a broken call included, it passes on as it
    is. It must go on to the end of the output.
    """

    @property
    def name(self) -> str:
        """By which it can be chosen."""
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
        """All that comes after the reasoning."""
        ...

    def grammar(self, wanted: Wanted) -> Fragment | None:
        """What an answer is held to so that every call in it is whole; None where that is not known.

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
        """What the next piece of the output brings; a control token is to be a piece of its own."""
        self._reader.feed(text, is_control=is_control)
        return self._advance()

    def finish(self, *, is_cut: bool = False) -> Sequence[Part]:
        """What is left when the output has ended; `is_cut` says that the model did not end it."""
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


def content(text: str) -> Sequence[Part]:
    """Text of the answer, as a reader emits it."""
    return (Content(text),)


def arguments(text: str) -> Sequence[Part]:
    """Arguments of a call, as a reader emits them."""
    return (CallArguments(text),)


def _joined(parts: Sequence[Part]) -> Sequence[Part]:
    """These parts, with pieces of the same text joined; however many they are, each is copied once."""
    joined: list[Part] = []
    for kind, same in groupby(parts, type):
        if kind is Content or kind is Reasoning or kind is CallArguments:
            joined.append(kind("".join(part.text for part in cast(Iterable[Content], same))))
        else:
            joined += same
    return joined
