"""Llama 3.2 and 4, as their makers advise: a list of calls in Python syntax, with literal arguments."""

import re

from server.generation.constraints.fragment import FREE_TEXT, Fragment, either, sequence, text
from server.generation.parsing.arguments import Members
from server.generation.parsing.call_grammar import GrammarBuilder, OfferedTool, optional, unique
from server.generation.parsing.json_text import PYTHON, json_value
from server.generation.parsing.notation_grammar import Keys, NotationGrammar, Writing
from server.generation.parsing.output_parser import Expected
from server.generation.parsing.parts import CallBegin, CallEnd, arguments, content
from server.generation.parsing.reader import NAME, Reader, Steps

_SPACE = r"[ \t\r\n]*"
_TAG, _BEGIN, _END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"


class Pythonic:
    """Implements ToolFormat. Without a marker, a list is a list of calls only at the beginning of the output."""

    name = "pythonic"
    markers = (_TAG, _BEGIN, _END)
    ends_reasoning = ()

    def read(self, reader: Reader, expected: Expected) -> Steps[None]:
        before: str | None = yield from reader.skip()
        at_once = (
            expected.calls_are_whole and not expected.has_constraint
        )  # a constraint on the text may allow half a call
        while before is not None:
            yield from reader.attempt(before, _calls(reader), emit=content, at_once=at_once)
            before = yield from reader.until(_TAG, _BEGIN, emit=content)

    def grammar(self, builder: GrammarBuilder) -> Fragment | None:
        """In free text, everything that begins like a call of an offered tool is a call."""
        given = [(tool.name, builder.rule(_arguments_as_written(builder, tool))) for tool in builder.tools]
        call = either(*(sequence(text(f"{name}("), rest) for name, rest in given))
        calls = builder.rule(sequence(text("["), _and_more(builder, call, call), text("]")))
        marked = builder.rule(sequence(calls, optional(builder.text(_END))))
        markers = sorted((_BEGIN, _TAG), key=builder.is_control, reverse=True)
        if builder.needs_call or builder.answer is not None:
            begun = [sequence(builder.text(marker), marked) for marker in markers]
            return unique(either(*([] if builder.answer is None else [builder.answer]), calls, *begun))
        first = either(*(sequence(Fragment(f"/{_header(re.escape(name))}/"), rest) for name, rest in given))
        bare = sequence(_and_more(builder, first, call), text("]"))
        names = "|".join(re.escape(tool.name) for tool in builder.tools)
        other = builder.new_name().upper()
        rule = f"{other}: {FREE_TEXT} & ~(/{_header(names)}/ {FREE_TEXT})\n"
        begun = [sequence(builder.until(marker, other), marked) for marker in markers]
        return unique(either(bare, *begun, Fragment(other, rule)))


def _header(name: str) -> str:
    """An expression for the beginning of an output that is a call; `name` is an expression, too."""
    return rf"{_SPACE}\[{_SPACE}({name})\("


def _and_more(builder: GrammarBuilder, first: Fragment, call: Fragment) -> Fragment:
    """A call, and more calls after it if that is allowed."""
    return sequence(first, builder.more(sequence(Fragment("/, ?/"), call))) if builder.is_parallel else first


def _arguments_as_written(builder: GrammarBuilder, tool: OfferedTool) -> Fragment:
    return sequence(NotationGrammar(builder, tool, _WRITING).arguments(_ARGUMENTS), text(")"))


_ESCAPES = {"\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"}


def _spelt(value: str) -> list[str]:
    """Both spellings of a string: in single and in double quotes."""
    escaped = "".join(_ESCAPES.get(character, character) for character in value)
    return [f"{quote}{escaped.replace(quote, chr(92) + quote)}{quote}" for quote in "'\""]


_IN_STRING = r"\\[nrtbfav0\\'\"]|\\x[0-9a-fA-F]{2}|\\u(?:[0-9a-cefA-CEF][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{2}"
_WRITING = Writing(
    string=Fragment(rf"""(/'([^'\\]|{_IN_STRING})*'/ | /"([^"\\]|{_IN_STRING})*"/)"""),
    constant=lambda value: either(*map(text, _spelt(value))),
    names={True: "True", False: "False", None: "None"},
    keys=Keys(_spelt, r"""'[^'\\\r\n]*'|"[^"\\\r\n]*\"""", "/: ?/"),
)
_ARGUMENTS = Keys(lambda key: [key] if NAME.fullmatch(key) else [], "[A-Za-z_][A-Za-z0-9_]*", '"="')


def _calls(reader: Reader) -> Steps[bool]:
    if (yield from reader.spaced_literal("[")) is None:
        return False
    if not (yield from reader.items(lambda: _call(reader), "]")):
        return False
    yield from reader.spaced_literal(_END)
    return True


def _call(reader: Reader) -> Steps[bool]:
    tool = yield from reader.span(NAME)
    if not tool or (yield from reader.literal("(")) is None:
        return False
    yield CallBegin(tool)
    members = Members()
    has_arguments = (yield from reader.spaced_literal(")")) is None
    if has_arguments and not (yield from reader.items(lambda: _argument(reader, members), ")")):
        return False
    yield from members.end()
    yield CallEnd()
    return True


def _argument(reader: Reader, members: Members) -> Steps[bool]:
    key = yield from reader.span(NAME)
    if not key or (yield from reader.spaced_literal("=")) is None or not (yield from members.begin(key)):
        return False
    return (yield from json_value(reader, arguments, PYTHON))
