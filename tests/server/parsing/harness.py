"""Runs parsers over outputs in whatever pieces, and puts together what they find."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from server.generation.parsing.output_parser import Expected, OutputParser, ThinkTags, ToolFormat
from server.generation.parsing.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning


@dataclass
class Call:
    name: str
    arguments: str = ""
    id: str | None = None
    is_whole: bool = False


@dataclass
class Message:
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, part: Part) -> None:
        match part:
            case Content():
                self.content += part.text
            case Reasoning():
                self.reasoning += part.text
            case CallBegin():
                self.calls.append(Call(part.name, id=part.id))
            case CallArguments():
                self.calls[-1].arguments += part.text
            case CallEnd():
                self.calls[-1].is_whole = True


def parse(
    pieces: Iterable[str],
    tools: ToolFormat | None,
    reasoning: ThinkTags | None = None,
    expected: Expected | None = None,
    controls: Collection[str] = (),
    *,
    is_cut: bool = False,
) -> Message:
    """A parser's result for these pieces; pieces in `controls` count as control tokens."""
    parser = OutputParser(tools, reasoning, expected or Expected(), controls)
    message = Message()
    for piece in pieces:
        for part in parser.push(piece, is_control=piece in controls):
            message.add(part)
    for part in parser.finish(is_cut=is_cut):
        message.add(part)
    return message


def cuts(text: str, places: Sequence[int]) -> list[str]:
    """The text cut at these places."""
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]
