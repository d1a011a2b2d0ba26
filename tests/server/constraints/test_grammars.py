"""Grammars of clients, alone, in the server's own, and as expressions."""

import re
from contextlib import suppress
from time import process_time

import pytest

from server.generation.constraints.check import grammar_of
from server.generation.constraints.fragment import (
    FREE_TEXT,
    ConstraintError,
    Fragment,
    either,
    sequence,
    text,
    tokens,
    until,
    whole,
)
from server.generation.constraints.json_schema import JsonObject
from server.generation.constraints.lark import Gbnf, Lark, regex_of_lark
from server.generation.constraints.texts import OneOfStrings, Regex
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
        ('start: e\ne[capture]: t\nt: "(" e ")" | "x"', ["x", "((x))"], ["(x", ""]),
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
        ("start: @other", "other grammars"),
        ('start: x\nx[stop="]", max_tokens=3]: /a*/', "stop"),
        ("start: x\nx[lazy, temperature=0.5]: /a*/", "temperature"),
        ('start: x "b"\nx[stop="b"]: /a*/', "stop"),
        ('%llguidance {"no_forcing": false}\nstart: "a"', "%llguidance"),
        ('start: %lark {\nstart: "a"\n}', "%lark"),
        ('start: "a"\n}\nstart: "b"\nx: %lark {', "%lark"),
        ('start: "a"\n}\nb: "b"', "without a '{'"),
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
    parts = [
        OneOfStrings(["a", "ab"], "c").fragment("one"),
        Regex("[x-z]+", "r").fragment("two"),
        JsonObject().fragment("n"),
    ]
    grammar = whole(sequence(either(*parts), text("!")))
    assert all(accepts(grammar, each) for each in ("a!", "ab!", "xyz!", '{"a": 1}!'))
    assert not any(accepts(grammar, each) for each in ("!", "axy!", "a"))


APPLY_PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""As coding agents send it."""
PATCH = '*** Begin Patch\n*** Add File: a.py\n+x = "1"\r\n+\n*** Update File: b\n@@ def f\n-a\n+b\n*** End Patch'


@pytest.mark.parametrize(
    ("grammar", "fitting", "others"),
    [
        (APPLY_PATCH, [PATCH, PATCH + "\n"], [PATCH.replace("+x", "x"), PATCH + " ", "", PATCH.replace("@@ ", "@")]),
        ('start: "a.b" | WORD~2..3\nWORD: /[x-z]/', ["a.b", "xy", "xyz"], ["axb", "x", "xyzx", "a.bxy"]),
        ('start: a\n  | "c"\n# a remark\na: "a" ["b" | /d.d/] "e"{2} // and another', ["aee", "abee", "adxdee", "c"],
         ["ae", "ad\ndee", "ace"]),
        ('start: /[.\\/]\\./+ INT?\n%import common.INT', ["..", "/...12"], ["", ".a", "a."]),
    ],
)  # fmt: skip
def test_what_fits(grammar: str, fitting: list[str], others: list[str]):
    expression = re.compile(regex_of_lark(grammar, "g"))
    assert [text for text in fitting if not expression.fullmatch(text)] == []
    assert [text for text in others if expression.fullmatch(text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        "", "a: /x/", "start: start", "start: a\na: start?", "start: b", 'start: ("a"', 'start: "a")', 'start: "a"i',
        'start: "a".."z"', "start: /a/i", "start: WS\n%ignore WS", "start: WS\n%import common.WS\n%ignore WS",
        "start: X\nX[lazy]: /a/", "start: X\nX.2: /a/", "start: X\n%import common.ESCAPED_STRING",
        "start", "start: * /a/", "start: /a/ + +", 'start: %json {"type": "object"}', "start: <|end|>",
        "start: " + "(" * 5000, "start: a0\n" + "\n".join(f"a{n}: a{n + 1} a{n + 1}" for n in range(40)) + "\na40: /x/",
    ],
)  # fmt: skip
def test_what_is_refused(grammar: str):
    with pytest.raises(ConstraintError) as refusal:
        regex_of_lark(grammar, "tools[0].definition")
    assert refusal.value.path == "tools[0].definition"


@pytest.mark.parametrize(
    "attributes", ["[max_tokens=3]", " [ max_tokens = 3 ] ", "[lazy,max_tokens=3]", "[max_tokens=3, lazy]"]
)
def test_a_limit_on_the_tokens_of_a_rule_is_reported(attributes: str) -> None:
    grammar = f'%llguidance {{"no_forcing": true}}\nstart: x "b"\nx{attributes}: /[max_tokens]*/\n'
    fragment = Lark(grammar, "grammar").fragment("answer")
    assert [notice.path for notice in fragment.notices] == ["grammar"]
    assert accepts(whole(fragment), "maxb" if "lazy" not in attributes else "b")
    assert not accepts(whole(fragment), "c")


def test_reading_a_grammar_takes_linear_time() -> None:
    start = process_time()
    for body in ("/" + "[" * 100_000 + "/", "/" + "[\\]" * 30_000 + "/", "x[" * 60_000, "\t" * 190_000):
        with suppress(ConstraintError):
            Lark(f"start: {body}", "grammar").fragment("answer")
    assert process_time() - start < 3
