"""Regular expressions mean what they mean in ECMAScript, and a choice is one of its strings."""

import json
import re
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.generation.constraints.check import grammar_of
from server.generation.constraints.fragment import ConstraintError
from server.generation.constraints.json_schema import JsonSchema
from server.generation.constraints.texts import OneOfStrings, Regex
from tests.server.constraints.matching import accepts, walk

PATTERNS = [
    "abc",
    "a|b",
    "^a|b$",
    "(^$)|(^abc$)",
    "^(?:a|bc)+$",
    "[a-z]+@[\\w.-]+",
    "\\d{3}-\\d{4}",
    "a{2,}b{0,2}c{3}",
    "(?<year>\\d{4})(?P<rest>x)?",
    "a/b\\/c",
    "[a&&b~~-]+",
    "[\\]\\-x^]+",
    "[^a-c\\n]{1,3}",
    ".+?",
    "[\\s\\S]{1,2}",
    "\\S\\s?\\W",
    "{a}",
    "a{,3}",
    "\\u00e9\\x41\\t",
    "\\$\\^\\.\\*",
    "(a(b(c)?)?)?",
    "",
    "<\\|end\\|>",
    '"\\\\',
]
TEXTS = [
    "",
    "a",
    "b",
    "ab",
    "abc",
    "bc",
    "aab",
    "aaccc",
    "a@b.c",
    "123-4567",
    "2024",
    "2024x",
    "a/b/c",
    "&",
    "~-",
    "]-x^",
]
TEXTS += ["\n", "d", "é", "éA\t", "$^.*", "{a}", "a{,3}", "a\r", " ", "x !", "<|end|>", '"\\', "😀"]
REFUSED = {
    "(?=a)": "lookahead",
    "(?!a)": "lookahead",
    "(?<=a)b": "lookbehind",
    "(?<!a)b": "lookbehind",
    "(a)\\1": "backreference",
    "(?<n>a)\\k<n>": "backreference",
    "\\bword": "word boundary",
    "(?i)a": "flags",
    "(?>a)": "unsupported kind",
    "a^b": "anchor",
    "a$b": "anchor",
    "(a$|b)c": "anchor",
    "(^a)+": "anchor",
    "*a": "missing expression",
    "a**": "repeats a repetition",
    "a++": "repeats a repetition",
    "a{3,2}": "start must be <= the end",
    "[z-a]": "start must be <= the end",
    "(a": "unclosed group",
    "a)": "unopened group",
    "[a": "without a ']'",
    "[]": "empty character class",
    "a\\": "unsupported escape",
    "\\Qa": "unsupported escape",
    "\\ud800": "does not exist",
    "\\p{^L}": "unknown character class",
    "(x{1000}){1000}": "10000",
    "|".join(f"(.*{letter}){{9}}[a-z]{{900}}" for letter in "abcdefghijklmnop"): "10000",
    "a{6000}|b{6000}": "10000",
    "\ud800": "surrogate",
}


def as_python(pattern: str) -> str:
    """The same expression as Python writes it: it has other names for groups, and '.' for two more ends of lines."""
    named = pattern.replace("(?<", "(?P<")
    named = named.replace("[a&&b~~-]", "[ab&~-]")
    return named.replace("a{,3}", "a[{],3[}]").replace(".+?", "[^\\n\\r\\u2028\\u2029]+?")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regular_expression_fits_as_a_whole(pattern: str) -> None:
    grammar = grammar_of(Regex(pattern, "regex"), "regex")
    expected = re.compile(as_python(pattern), re.ASCII)
    for text in TEXTS:
        assert accepts(grammar, text) == (expected.fullmatch(text) is not None), text
    for seed in range(4):
        text = walk(grammar, seed, patience=5)
        assert text is None or expected.fullmatch(text) or not text.isascii(), text


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_of_a_schema_fits_anywhere(pattern: str) -> None:
    grammar = grammar_of(JsonSchema({"type": "string", "pattern": pattern}, "schema"), "schema")
    expected = re.compile(as_python(pattern).replace("$", "\\Z").replace("\\\\Z", "\\$"), re.ASCII)
    for text in [*TEXTS, *(f"x{text}x" for text in TEXTS)]:
        quoted = json.dumps(text, ensure_ascii=False)
        assert accepts(grammar, quoted) == (expected.search(text) is not None), text


MEMBERS = [
    '"',
    "\\\\",
    "\\]",
    "\\^",
    "\\-",
    "/",
    ":",
    "*",
    "a",
    "\\n",
    "\\t",
    "\\b",
    "\\0",
    "\\x0b",
    "\\x7f",
    " -~",
    "\\0-\\x1f",
]
MEMBERS += ["\\d", "\\D", "\\w", "\\W", "\\s", "\\S", "!-[", "#-é"]
CLASSES = st.builds(
    "[{}{}]{}".format,
    st.sampled_from(["^", "^", ""]),
    st.lists(st.sampled_from(MEMBERS), min_size=1, max_size=4).map("".join),
    st.sampled_from(["", "?", "+", "{1,3}"]),
) | st.sampled_from(["\\S", "\\D+", "\\W", "[^]", "[\\s\\S]"])
ANY_TEXT = ["", *'a"\\\n\t\b\f\r /]^-:*é5_', *map("".join, product('a"\\\n', repeat=2))]


@settings(max_examples=25)
@example('[^"]{1,3}', False)
@example('[^\\\\/:*?"<>|]+', True)
@given(classes=st.lists(CLASSES, min_size=1, max_size=2).map("".join), is_name=st.booleans())
def test_the_value_that_is_written_matches(classes: str, is_name: bool) -> None:
    """A class that excludes quotes, backslashes or control characters excludes their escapes."""
    pattern = f"^{classes}$"
    expected = re.compile(classes.replace("[^]", "[\\s\\S]"), re.ASCII)
    schema = {"type": "string", "pattern": pattern}
    if is_name:
        schema = {"type": "object", "patternProperties": {pattern: True}, "additionalProperties": False}
    try:
        grammar = grammar_of(JsonSchema(schema, "schema"), "schema")
    except ConstraintError:
        assert not any(map(expected.fullmatch, ANY_TEXT))
        return
    for text in ANY_TEXT:
        written = json.dumps(text, ensure_ascii=False)
        assert accepts(grammar, f"{{{written}:0}}" if is_name else written) == bool(expected.fullmatch(text)), text


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_is_not_supported_is_named(pattern: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(REFUSED[pattern])) as caught:
        grammar_of(Regex(pattern, "regex"), "regex")
    assert caught.value.path == "regex"


def test_characters_beyond_16_bits_and_named_classes() -> None:
    grammar = grammar_of(Regex("\\u{1F600}|\\uD83D\\uDE01|\\p{Script=Greek}+", "regex"), "regex")
    assert all(accepts(grammar, text) for text in ("😀", "😁", "αβγ"))
    assert not any(accepts(grammar, text) for text in ("😂", "abc", ""))


@pytest.mark.parametrize(
    "strings", [["yes", "no"], ["a", "ab", "abc", "b"], ["", "x"], ["<|end|>", '"\\/\n', "é€😀", "/a/", "%json {}"]]
)
def test_a_choice_is_one_of_its_strings(strings: list[str]) -> None:
    grammar = grammar_of(OneOfStrings(strings, "choice"), "choice")
    for text in [*strings, *(text + "a" for text in strings), *(text[:-1] for text in strings), "other"]:
        assert accepts(grammar, text) == (text in strings)
    assert {walk(grammar, seed) for seed in range(40)} == set(strings)


def test_many_strings_can_be_chosen_from() -> None:
    grammar = grammar_of(OneOfStrings([f"value {number}" for number in range(10_000)], "choice"), "choice")
    assert accepts(grammar, "value 9999")
    assert not accepts(grammar, "value 10000")


@pytest.mark.parametrize(
    ("strings", "path"),
    [([], ""), ([str(number) for number in range(10_001)], ""), (["a", "b", "a"], "[2]"), (["\ud800"], "[0]")],
    ids=["none", "many", "twice", "surrogate"],
)
def test_a_choice_is_refused(strings: list[str], path: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        grammar_of(OneOfStrings(strings, "choice"), "choice")
    assert caught.value.path == "choice" + path
