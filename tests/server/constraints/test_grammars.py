"""Grammars of clients, alone and in the server's own."""

import pytest

from server.generation.constraints.constraint import grammar_of
from server.generation.constraints.errors import ConstraintError
from server.generation.constraints.fragment import FREE_TEXT, Fragment, either, sequence, text, tokens, until, whole
from server.generation.constraints.json_text import JsonObject
from server.generation.constraints.lark import Gbnf, Lark
from server.generation.constraints.texts import Choice, Regex
from tests.server.constraints.matching import END, MARKER, accepts, accepts_tokens

_SUM = """
start: term ("+" term)*   // a comment with a }
term: NUMBER | "(" start ")"
NUMBER: DIGIT{1,3}
DIGIT: /[0-9]/
%ignore / {1,2}/
"""
_ARITHMETIC = r"""
# a comment
root ::= expr "\n"
expr ::= term ([-+*/] term)*
term ::= num | "(" expr ")"
num  ::= [0-9]+
"""
_JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws     ::= [ \t\n]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "fitting", "unfitting"),
    [
        ('start: "a" "b"?', ["a", "ab"], ["b", ""]),
        (_SUM, ["1+22", "(1 + 2)+  333"], ["1+", "1234", "1\n+2", "1 }"]),
        ('%llguidance {}\nstart: INT\n%import common.INT', ["12"], ["a"]),
        ('start: "}" /[}]+/ "{" x\nx: "\\"}"', ['}}}{"}'], ["}"]),
        ('start: x ";"\nx: %json {"type": "object", "required": ["a"]}', ['{"a": null};'], ["{};"]),
        ('?start: A | B\nA: "x"\n  | "y"\nB: /z/i', ["x", "y", "Z"], ["xy"]),
        ('start: t "x"\nt[lazy]: /(.|\\n)*</', ["ab<x"], ["ab<<x", "x"]),
        ('start: perm::0x0\nperm::_: "" %if is_ones([0:2])\n | "a" perm::set_bit(0) %if bit_clear(0)\n'
         ' | "b" perm::set_bit(1) %if bit_clear(1)', ["ab", "ba"], ["aa", "a"]),
    ],
)  # fmt: skip
def test_lark(grammar: str, fitting: list[str], unfitting: list[str]) -> None:
    made = grammar_of(Lark(grammar, "grammar"), "grammar")
    embedded = whole(sequence(text("<"), Lark(grammar, "grammar").fragment("inner"), text(">")))
    for fits, texts in ((True, fitting), (False, unfitting)):
        for each in texts:
            assert accepts(made, each) == fits, each
            assert accepts(embedded, f"<{each}>") == fits, each


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: <[2]>", "Special tokens"),
        ("start: <[*]>", "Special tokens"),
        ("start: <|end|>", "Special tokens"),
        ('start: "a" <[^3-4]> "b"', "Special tokens"),
        ("start: @other", "no other grammar"),
        ("start: x\nx[max_tokens=3]: /a*/", "max_tokens"),
        ("start: x\nx[lazy, temperature=0.5]: /a*/", "temperature"),
        ('start: x "b"\nx[stop="b"]: /a*/', "stop"),
        ('%llguidance {"no_forcing": false}\nstart: "a"', "%llguidance"),
        ('start: %lark {\nstart: "a"\n}', "%lark"),
        ('start: "a"\n}\nstart: "b"\nx: %lark {', "without a '{'"),
        ('start: "a" {', "without a '}'"),
        ('start: %json {"type": "string", "pattern": "(?=a)"}', "lookahead"),
        ("start: %json {", "JSON"),
        ("start: A\nA: /(x{1000}){1000}/", "10000"),
        ("start: /(x{1000}){1000}/", "10000"),
        ('start: A\nA: B{1000}\nB: C{1000}\nC: "x"', "10000"),
        ('start: A\nA: B B\nB: C C\nC: "' + "x" * 4000 + '"', "10000"),
        ("start: A\nA: A", "itself"),
        ("start: b", "unknown name"),
        ('a: "x"', "start"),
        ('start: "a', "grammar"),
        ("", "start"),
        ('start: "\ud800"', "surrogate"),
        ('start: "' + "x" * 300_000 + '"', "characters"),
    ],
)
def test_lark_is_refused(grammar: str, reason: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        grammar_of(Lark(grammar, "grammar"), "grammar")
    assert caught.value.path.startswith("grammar")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("grammar", "fitting", "unfitting"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["yesno", ""]),
        (_ARITHMETIC, ["1+2\n", "(1-2)*33\n"], ["1+\n", "1+2"]),
        (_JSON, ['{"a": [1, 2.5, "x\\n", null]}', "{}"], ["[]", '{"a":}']),
        ('root ::= a-b{2}\na-b ::= [a-c]', ["ab"], ["a", "abc"]),
        ('root ::= "\\x41\\u00e9\\U0001F600" [\\x30-\\x39]', ["Aé😀7"], ["Aé😀"]),
        ('root ::= "\\x22" | "\\x5c"', ['"', "\\"], ["x"]),
    ],
)  # fmt: skip
def test_gbnf(grammar: str, fitting: list[str], unfitting: list[str]) -> None:
    made = grammar_of(Gbnf(grammar, "grammar"), "grammar")
    assert all(accepts(made, each) for each in fitting)
    assert not any(accepts(made, each) for each in unfitting)


@pytest.mark.parametrize(
    "grammar",
    ["", "root", "root ::= missing", 'x ::= "a"', 'root ::= "a', "root ::= [a", "root ::= " + "(" * 5000,
     'root ::= "\\',
     'root ::= x{1000}\nx ::= y{1000}\ny ::= [a]{1000}', 'root ::= "' + "x" * 300_000 + '"'],
)  # fmt: skip
def test_gbnf_is_refused(grammar: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        grammar_of(Gbnf(grammar, "grammar"), "grammar")
    assert caught.value.path == "grammar"


def test_a_grammar_can_begin_with_free_text() -> None:
    thinking = whole(sequence(until(FREE_TEXT, "</think>", "thinking"), JsonObject().fragment("x")))
    assert accepts(thinking, "hm\n<{}</think>{}")
    assert not accepts(thinking, "hm</think>x</think>{}")


def test_free_text_ends_at_a_token_and_not_at_its_letters() -> None:
    grammar = whole(sequence(Fragment(FREE_TEXT), tokens([MARKER]), Regex("[0-9]", "regex").fragment("x")))
    assert accepts_tokens(grammar, [*b"a<|marker|>", MARKER, *b"1"])
    assert not accepts_tokens(grammar, [*b"a<|marker|>1"])
    assert not accepts_tokens(grammar, [*b"a", END])


def test_fragments_are_put_together() -> None:
    parts = [Choice(["a", "ab"], "c").fragment("one"), Regex("[x-z]+", "r").fragment("two"), JsonObject().fragment("n")]
    grammar = whole(sequence(either(*parts), text("!")))
    assert all(accepts(grammar, each) for each in ("a!", "ab!", "xyz!", '{"a": 1}!'))
    assert not any(accepts(grammar, each) for each in ("!", "axy!", "a"))
