"""Incremental parser of a choice's output."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol, cast

from server.generation.constraints.fragment import Fragment
from server.generation.parsing.call_grammar import GrammarBuilder
from server.generation.parsing.parts import CallArguments, Content, Part, Reasoning, content, reasoning
from server.generation.parsing.reader import WHITESPACE, Reader, Steps


@dataclass(frozen=True, slots=True)
class Expected:
    """The request's parameters for parsing an output."""

    tools: Mapping[str, Any] = field(default_factory=dict)
    """JSON schemas of the offered tools' arguments, by tool name."""
    only_offered: bool = False
    """Whether calls of other tools are treated as text."""
    has_constraint: bool = False
    """Whether an answer without calls is constrained."""
    is_thinking: bool = False
    """Whether the prompt has already opened the reasoning."""
    reasons_to_its_end: bool = False
    """Whether only its end tag ends the reasoning, whatever text is in it, because a grammar ensures that."""
    calls_are_whole: bool = False
    """Whether a grammar ensures that a call is complete, unless the end of the output cuts it off. Then arguments are
    passed on as they come. Otherwise a call is passed on once complete; an invalid one becomes text, and one that was
    cut off is dropped."""


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """Reasoning tags of a family of models. Whitespace around them belongs to the template, not to the text."""

    name: str
    """The name for the setting `reasoning_parser`."""
    begin: str
    end: str
    control: str = ""
    """Beginning of `begin`, if only that is a control token."""

    @property
    def markers(self) -> Sequence[str]:
        """Texts that may be control tokens in the vocabularies of these models."""
        return self.control or self.begin, self.end

    def read(self, reader: Reader, *, is_begun: bool, ends: Sequence[str] = ()) -> Steps[None]:
        """Read the reasoning, if there is any, and what separates it from the answer.

        Args:
            reader: the output.
            is_begun: whether the prompt has opened the reasoning.
            ends: texts that also end the reasoning, if its end tag is missing; they are left unread.
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
"""All known reasoning tags."""


class ToolFormat(Protocol):
    """The format in which a family of models writes tool calls, and in some families everything else, too.

    `read` is a generator (reader.py) that must read to the end of the output. It passes on text that is not a call,
    including broken calls, unchanged.
    """

    @property
    def name(self) -> str:
        """The name for the setting `tool_parser`."""
        ...

    @property
    def markers(self) -> Collection[str]:
        """Texts that may be control tokens in the vocabularies of these models."""
        ...

    @property
    def ends_reasoning(self) -> Sequence[str]:
        """Texts that begin a call even if the model forgot to end its reasoning."""
        ...

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        """Read everything after the reasoning."""
        ...

    def grammar(self, builder: GrammarBuilder) -> Fragment | None:
        """A grammar of answers in which every call is complete; None if the format has none.

        Raises ConstraintError for a schema that is refused.
        """
        ...


class OutputParser:
    """Finds the parts of an output, independently of the pieces in which it arrives."""

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ThinkTags | None,
        expected: Expected,
        controls: Collection[str] = (),
    ) -> None:
        """`controls` are markers that are single tokens. Their text in other tokens has no meaning."""
        self._reader = Reader(controls, expected.tools if expected.only_offered else None)
        self._steps = self._read(tools, reasoning, expected)

    def push(self, text: str, *, is_control: bool = False) -> Sequence[Part]:
        """The parts that the next piece of the output adds. Pass a control token as a separate piece."""
        self._reader.feed(text, is_control=is_control)
        return self._advance()

    def finish(self, *, is_cut: bool = False) -> Sequence[Part]:
        """The remaining parts at the end of the output; `is_cut` says that the model did not end it."""
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
    """The parts, with successive pieces of the same kind joined in linear time."""
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
        reader: the output.
        expected: parameters for parsing.
        begins: texts that begin a call.
        read_call: reads the rest of a call, given its beginning.
        trim: characters before a call that do not belong to the text.
    """
    while (begin := (yield from reader.until(*begins, emit=content, trim=trim))) is not None:
        yield from reader.attempt(begin, read_call(begin), emit=content, at_once=expected.calls_are_whole)
