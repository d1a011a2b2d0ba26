"""Grammars in Lark as regular expressions: what they fit, by Python's own, and what is refused."""

import re

import pytest

from server.generation.constraints.errors import ConstraintError
from server.generation.constraints.lark_regex import regex_of_lark

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
        'start: "a".."z"', "start: /a/i", "start: WS\n%ignore WS", "start: X\n%import common.ESCAPED_STRING",
        "start", "start: * /a/", "start: /a/ + +", 'start: %json {"type": "object"}', "start: <|end|>",
        "start: " + "(" * 5000, "start: a0\n" + "\n".join(f"a{n}: a{n + 1} a{n + 1}" for n in range(40)) + "\na40: /x/",
    ],
)  # fmt: skip
def test_what_is_refused(grammar: str):
    with pytest.raises(ConstraintError) as refusal:
        regex_of_lark(grammar, "tools[0].definition")
    assert refusal.value.path == "tools[0].definition"
