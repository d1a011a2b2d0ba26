"""JSON and Python's literals, read as they come."""

import ast
import json
import random

import pytest

from server.generation.parsing.json_text import PYTHON, whole_value

STRINGS = ["", "it's", 'a "b"', "\\d+\\", "line\nbreak\ttab", "käse ☕ 🌸", "\x00\x1f\x7f", "\u2028", "C:\\users\\new"]


def value(rng: random.Random, depth: int = 0):
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind < 2:
        return rng.choice(STRINGS)
    if kind < 6:
        return rng.choice([True, False, None, 0, -17, 10**30, 2.5, -1e-7, 1e300])
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(STRINGS): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def test_what_python_writes_means_the_same_as_json():
    rng = random.Random(1)
    for _ in range(500):
        written = value(rng)
        text = repr(written)
        assert json.loads(whole_value(text, PYTHON)) == written
        assert json.loads(whole_value(json.dumps(written))) == written


@pytest.mark.parametrize(
    "text",
    [r"'\x41\u00e9\U0001F338'", r"'\n\t\\\'\"'", '"a\\\nb"', r"'\ud83c\udf38'", "'\\a\\v\\0'", "[ 1 , {} ]"],
)
def test_escapes_are_pythons(text):
    want = ast.literal_eval(text)
    if isinstance(want, str):
        want = want.encode("utf-16", "surrogatepass").decode("utf-16")
    assert json.loads(whole_value(text, PYTHON)) == want


@pytest.mark.parametrize("text", ["", "[", "'a", "{'a'}", "f(1)", "(1, 2)", "1 2", "[1,]", "Infinity", "[" * 100_000])
def test_what_is_not_a_value_is_none(text):
    assert whole_value(text) is None
    assert whole_value(text, PYTHON) is None
