"""Gemma 4: calls in its own object notation."""

import re

from server.generation.constraints.fragment import Fragment, either, sequence, text
from server.generation.parsing.call_grammar import GrammarBuilder, calls_in_text
from server.generation.parsing.json_text import Notation, escaped, json_value
from server.generation.parsing.notation_grammar import Keys, NotationGrammar, Writing
from server.generation.parsing.output_parser import Expected, calls_after
from server.generation.parsing.parts import CallBegin, CallEnd, Emit, arguments
from server.generation.parsing.reader import Reader, Steps

_BEGIN, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[^\s<{]*")
_KEY = re.compile(r"[^:<]*")
_WRITABLE = re.compile(r"[^\s:<{}\[\],]([^:<\r\n]*[^\s:<])?")
_KEYS = Keys(lambda key: [key] if _WRITABLE.fullmatch(key) else [], "[A-Za-z_][A-Za-z0-9_]*", '":"')


class Gemma4:
    """Implements ToolFormat."""

    name = "gemma4"
    markers = (_BEGIN, _END, _QUOTE)
    ends_reasoning = (_BEGIN,)

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        return calls_after(reader, expected, (_BEGIN,), lambda _: _call(reader))

    def grammar(self, builder: GrammarBuilder) -> Fragment | None:
        quote = builder.text(_QUOTE)
        writing = Writing(
            string=builder.rule(sequence(quote, builder.until(_QUOTE))),
            constant=lambda value: sequence(quote, text(value), quote),
            names={True: "true", False: "false", None: "null"},
            keys=_KEYS,
        )
        calls = [
            sequence(text(f"call:{tool.name}{{"), NotationGrammar(builder, tool, writing).arguments(_KEYS))
            for tool in builder.tools
        ]
        return calls_in_text(builder, {_BEGIN: sequence(either(*calls), text("}"), builder.text(_END))}, "")


def _call(reader: Reader) -> Steps[bool]:
    if (yield from reader.literal("call:")) is None:
        return False
    name = yield from reader.span(_NAME)
    if not name or (yield from reader.need()) != "{":
        return False
    yield CallBegin(name)
    if not (yield from json_value(reader, arguments, _NOTATION)):
        return False
    if (yield from reader.spaced_literal(_END)) is None:
        return False
    yield CallEnd()
    return True


def _string(reader: Reader, emit: Emit) -> Steps[bool]:
    if (yield from reader.literal(_QUOTE)) is None:
        return False
    yield from emit('"')
    if (yield from reader.until(_QUOTE, emit=lambda text: emit(escaped(text)))) is None:
        return False
    yield from emit('"')
    return True


def _key(reader: Reader, emit: Emit) -> Steps[bool]:
    key = yield from reader.span(_KEY)
    yield from emit(f'"{escaped(key.strip())}"')
    return True


_NOTATION = Notation(_QUOTE[0], _string, _key)
"""Strings are unescaped between quote tokens, and keys have no quotes. The rest is JSON."""
