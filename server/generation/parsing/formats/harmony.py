"""Harmony, the format of gpt-oss: messages with headers that name their channel and recipient."""

import re

from server.generation.constraints.fragment import Fragment, either, repeated, sequence
from server.generation.parsing.call_grammar import FREE, GrammarBuilder
from server.generation.parsing.json_text import json_object
from server.generation.parsing.output_parser import Expected
from server.generation.parsing.parts import CallBegin, CallEnd, Emit, Kept, arguments, content, reasoning
from server.generation.parsing.reader import Reader, Steps

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_FUNCTIONS = "functions."
_HEADER = re.compile(
    r"\s*+(?:<\|start\|>)?(?:assistant)?(?:\s*+to=[^\s<]++)?"  # the role
    r"(?:<\|channel\|>\s*+[^\s<]*+(?:\s*+to=[^\s<]++)?(?:\s*+(?:<\|constrain\|>)?\s*+[^\s<]++)?\s*+)*"  # and a type
    r"<\|message\|>"
)
_TO = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_BUILT_IN = re.compile(r"(?:python|browser|container)\b.*")


class Harmony:
    """Implements ToolFormat. Reads all of the output; the prompt has begun the first header."""

    name = "harmony"
    markers = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
    ends_reasoning = ()

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        while (yield from reader.need()):
            header = yield from reader.attempt("", _header(reader), emit=content, at_once=False)
            name = _function(header, expected)
            if name:
                reading = _call(reader, name)
                yield from reader.attempt(header, reading, emit=content, at_once=expected.calls_are_whole)
            yield from _text(reader, content if name else _emit(header))

    def grammar(self, builder: GrammarBuilder) -> Fragment | None:
        if not all(map(builder.is_control, self.markers)):
            return None
        next_message = sequence(FREE, builder.text(f"{_ENDS[0]}{_START}assistant"))
        before = [
            sequence(builder.text(f"{_CHANNEL}{channel}{_MESSAGE}"), next_message)
            for channel in ("analysis", "commentary")
        ]
        calls = [
            sequence(
                builder.text(f"{_CHANNEL}commentary to={_FUNCTIONS}{tool.name} {_CONSTRAIN}json{_MESSAGE}"),
                tool.arguments(),
            )
            for tool in builder.tools
        ]
        final = sequence(builder.text(f"{_CHANNEL}final{_MESSAGE}"), builder.answer or FREE)
        return sequence(repeated(either(*before)), either(*calls, *([] if builder.needs_call else [final])))


def _header(reader: Reader) -> Steps[str]:
    """Read a message's header; empty if it is missing or broken."""
    begin = yield from reader.spaced_literal(_START, _CHANNEL, _MESSAGE, "to=")
    if begin is None or begin.endswith(_MESSAGE):
        return begin or ""
    rest = Kept()
    end = yield from reader.until(_MESSAGE, emit=rest, stops=(_START, *_ENDS))
    header = begin + rest.text + (end or "")
    return header if _HEADER.fullmatch(header) else ""


def _recipient(header: str) -> str:
    """The recipient of a message, named after the role or after the channel; empty without one."""
    found = _TO.findall(header)
    return found[-1] if found else ""


def _function(header: str, expected: Expected) -> str:
    """The tool that a message calls; empty if it is not a call."""
    recipient = _recipient(header)
    name = recipient.removeprefix(_FUNCTIONS)
    return name if name != recipient or name in expected.tools else ""


def _emit(header: str) -> Emit:
    """The kind of a message's text. Text for the model's built-in tools is dropped, because they are not available."""
    if _BUILT_IN.match(_recipient(header)):
        return Kept()
    channels = _CHANNEL_NAME.findall(header)
    return reasoning if channels and channels[-1] == "analysis" else content


def _call(reader: Reader, name: str) -> Steps[bool]:
    yield CallBegin(name)
    if not (yield from json_object(reader, arguments)):
        return False
    yield from reader.skip()
    if (yield from reader.literal(*_ENDS)) is None:
        following = yield from reader.need(len(_START))
        if following != _START and (following or reader.is_cut):
            return False
    yield CallEnd()
    return True


def _text(reader: Reader, emit: Emit) -> Steps[None]:
    """Emit a message's text. An end marker without another message after it is part of the text."""
    while (marker := (yield from reader.until(*_ENDS, emit=emit, stops=(_START,)))) is not None:
        if _START.startswith((yield from reader.need(len(_START)))):
            return
        yield from emit(marker)
