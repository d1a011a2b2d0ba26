"""Every regular expression of the server takes linear time on the worst text that a client can send.

Python's expressions backtrack and hold the interpreter's lock. So each is listed here, with texts that make it try
hard, or with the reason why no text of a client or a model reaches it. Patterns of pydantic's fields are Rust's, which
are linear.
"""

import ast
import importlib
import re
import time
from pathlib import Path

import pytest

import server

ROOT = Path(server.__file__).parent
FUNCTIONS = {"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
LONG = 20_000
"""Characters. At this length, a quadratic expression takes seconds, and a linear one about a millisecond."""
MOST_S = 0.15

Hard = tuple[str, str, str]
"""A beginning, a text that is repeated, and an end."""
OPERATOR = "The operator's settings, keys and arguments."
OWN = "Texts that the server itself wrote."
OTHERS = "Answers of servers that the user of the command chose."
QUOTED = "Made of quoted words, without repetition."

LISTED: dict[str, str | list[Hard]] = {
    "api/answer_object._REFERENCE": OWN,
    "api/body_worker.COSTLY": [
        ("", 'tools":', ""), ('tools":[', " ", "x"), ("", '"format" ', ""), ('"format":', " ", ""),
    ],
    "api/fields/images._DATA_URL": [("data:", "a", ""), ("data:", ";", "")],
    "api/fields/images._HTTP": [("", "http", "")],
    "api/fields/images._HTTPS": [("", "https", "")],
    "api/fields/images._BREAKS": [("", "\r\n", "")],
    "api/image_files._FILE_ID": [('"file_id"', " ", ""), ("", '"file_id" :', ""), ('"file_id":"file-', "a", "")],
    "api/messages/tools._OF_ANTHROPIC": [("", "_20", ""), ("", "_2025112", "!"), ("", "a", "_20")],
    "api/ollama/schema._DURATION": [("", "1", ""), ("", "1.", ""), ("", "1m", "x"), ("", ".1", "")],
    "api/ollama/schema._PART": "Durations by _DURATION, of at most LONGEST_DURATION characters.",
    "api/responses/schema.STREAM_ID": [("", "a", "!")],
    "cli/serve.re": OWN,
    "client/metrics.re": OTHERS,
    "client/openai_answers.re": OPERATOR,
    "generation/constraints/check._PLACE": [("at ", "1", ""), ("at 1(", "1", "")],
    "generation/constraints/check._REGEX_ERROR": [
        ("regex parse error:", "\nerror", ""), ("regex parse error:", "\n", "error: x"),
    ],
    "generation/constraints/check._MULTIPLE": [("", '"multipleOf": 1', ""), ('"multipleOf": ', "1", "")],
    "generation/constraints/lark._TOKEN": [
        ('"', '\\"', ""), ("/", "\\/", ""), ("", "<a", ""), ("", "{1", ""), ("{", " ", ""),
        ("", "~ ", ""), ("~1", " ", ""),
        ("", "->", ""), ("", "a-", ""), ("", "{", ""), ("", '"\\\n', ""), ("", "~1 ..", ""), ("->", " ", ""),
    ],
    "generation/constraints/lark._HEADER": [("", " ", ""), ("", "a", ""), ("a[", "a", ""), ("", "a\n", "")],
    "generation/constraints/lark._NUMBER": [("", "1", ""), ("", "1,", "")],
    "generation/constraints/lark._ANY_CHARACTER": [("", "[", ""), ("", "\\", ""), ("", "[\\]", "")],
    "generation/constraints/lark._GBNF_ESCAPE": [("", "\\", ""), ("", "\\x", "")],
    "generation/constraints/texts._UNIT": [
        ("", "[", ""), ("[", "\\u0041", ""), ("[", "\\]", ""), ("", "{1", ""), ("", "(?<a", ""),
        ("", "\\p{a", ""), ("{", "1", ""),
    ],
    "generation/constraints/texts._MEMBER": [("", "a-", ""), ("", "\\", ""), ("", "\\p{a", "")],
    "generation/constraints/texts._RUST_UNIT": [("", "[", ""), ("", "[\\", ""), ("", "{1", ""), ("", "\\x{a", "")],
    "generation/notices._UNSAFE": [("", " ", "")],
    "generation/notices._INDEX": [("", "[1", ""), ("[", "1", "")],
    "generation/parsing/arguments._REFERENCE": [("#/$defs/", "a", "/")],
    "generation/parsing/arguments._REFERENCE_ELSEWHERE": [("", "'$ref': ", ""), ("", "'$ref': '#/$defs/", "")],
    "generation/parsing/call_grammar.re": QUOTED,
    "generation/parsing/formats/deepseek._NAME": [("", "a", "<")],
    "generation/parsing/formats/gemma4._NAME": [("", "a", "<")],
    "generation/parsing/formats/gemma4._KEY": [("", "a", "<")],
    "generation/parsing/formats/gemma4._WRITABLE": [("", "a", "<"), ("", "a ", ""), ("", " a", ":")],
    "generation/parsing/formats/glm._MORE": [("", " ", "")],
    "generation/parsing/formats/harmony._HEADER": [
        ("", " ", ""), ("<|channel|>", " to=a", ""), ("", "<|channel|> ", ""),
        ("", "<|channel|>a to=b <|constrain|> c ", ""),
    ],
    "generation/parsing/formats/harmony._TO": [("", "to=", ""), ("to=", "a", "")],
    "generation/parsing/formats/harmony._CHANNEL_NAME": [("<|channel|>", " ", ""), ("", "<|channel|>", "")],
    "generation/parsing/formats/harmony._BUILT_IN": [("python", "a", ""), ("", "python", "")],
    "generation/parsing/formats/kimi._ID": [("", "a", "<")],
    "generation/parsing/formats/kimi._NAME_IN_ID": [
        ("", ":1", "\n"), ("functions.", "functions.", ":"), (":", "1", "x\n"),
    ],
    "generation/parsing/json_text._PLAIN": [("", "a", '"')],
    "generation/parsing/json_text._ESCAPE": [("", "\\u", "")],
    "generation/parsing/json_text._BEGUN_ESCAPE": [("", "\\u", "")],
    "generation/parsing/json_text._SCALAR": [("", "1", "x"), ("1.", "1", "x"), ("1e", "1", "x")],
    "generation/parsing/json_text._IN_SCALAR": [("", "1", "!")],
    "generation/parsing/json_text._PYTHON_PLAIN": [("", "a", '"')],
    "generation/parsing/json_text._CODE": [("", "\\U", "")],
    "generation/parsing/json_text._BEGUN_PYTHON_ESCAPE": [("", "\\U", "")],
    "generation/parsing/json_text._PYTHON_NAMED": [("", "\\", "")],
    "generation/parsing/json_text._SURROGATE": [("", "a", "")],
    "generation/parsing/reader.re": QUOTED,
    "generation/parsing/reader._KEY": [("", "a", "=")],
    "generation/parsing/reader._VALUE": [("", "a", '"')],
    "generation/parsing/reader.NAME": [("", "a", "<")],
    "generation/parsing/reader.IN_TAG": [("", "a", "<")],
    "generation/planning/decoding_rules._TOKEN_ID": [("", "1", "")],
    "generation/remote_images._URL": [
        ("https://", "a", ""), ("https://a", ":443", ""), ("https://a/", "?#", ""), ("https://", "a.", ""),
    ],
    "http/json_body._ESCAPED_SURROGATE": [("", "\\u", ""), ("", "\\ud", "")],
    "http/middleware._ID_PATTERN": [("", "a", "!")],
    "http/origins._LOCALHOST": [("http://localhost:", "1", "x"), ("", "http://", "")],
    "http/origins._HOST": [("", "a", "["), ("[", "a", ""), ("", ":1", ""), ("", "[a]", "")],
    "page/answer._SPELLED_BYTES": [("bytes:", "\\x00", "!")],
    "page/chat.re": "One class of characters: nothing to try again.",
    "page/compare/beams._WORD": [("", " ", ""), ("", " a", "")],
    "page/inside/tokens._MARK": [("<|", "|", ""), ("", "<|", ""), ("", "<|a", ""), ("<｜", "a", "")],
    "page/markdown._LINE_END": [("", "\r", ""), ("", "a", ""), ("", "\r\n", "")],
    "page/nicegui_hardening._ID": [("", "a", "")],
    "page/nicegui_hardening.re": "A word or 36 characters; up to 9 digits.",
    "page/nicegui_hardening._SPOKEN": [("4", "1", "")],
    "page/nicegui_hardening._ACKNOWLEDGED": [("", "1", "")],
    "ray/routing_fields._PATHS": [("", "/v1/files", ""), ("/v1/responses/", "/v1/responses/", "")],
    "ray/routing_fields._RESPONSES": [("", "/v1/responses", "")],
    "setting_errors._SERVICE_LINK": OPERATOR,
    "setting_types._TCP": OPERATOR,
    "setting_types._IPC": OPERATOR,
    "setting_types._HOST_NAME": OPERATOR,
    "setting_types._ORIGIN": OPERATOR,
    "setting_types._PREFIX": OPERATOR,
    "setting_types.re": OPERATOR,
    "storage/cuts._FILE": [("", ";base64,", ""), (";base64,", "A", "!"), ("", ";base64,A", "")],
    "tenants/keys._IS_YAML": OPERATOR,
    "text/chat_template.re": "The model's template, which is bounded, and a word of the server.",
    "text/template_sandbox._DIGITS": [("", "1", "")],
    "text/template_sandbox._VARIABLE_WIDTH": [("{", "a", ""), ("", "{}", "")],
    "text/image_marks._MARK": [("", "a", "")],
    "text/image_marks.re": QUOTED,
}  # fmt: skip
"""Expressions by their module and name, or `re` for expressions without a name, which need a reason."""


def found_in(path: Path) -> dict[str, set[str]]:
    """The regular expressions of a module, and the methods with which it uses them."""
    text = path.read_text()
    if "\nimport re\n" not in text:
        return {}
    tree = ast.parse(text)
    module = path.relative_to(ROOT).with_suffix("").as_posix()
    found: dict[str, set[str]] = {}
    named = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and _is_of_re(node.value, {"compile"})
        ):
            named.add(id(node.value))
            name = node.targets[0].id
            found[f"{module}.{name}"] = _methods(tree, name)
        elif _is_of_re(node, FUNCTIONS) and id(node) not in named:
            found.setdefault(f"{module}.re", set())
    return found


def _is_of_re(node: ast.AST, functions: set[str]) -> bool:
    """Whether this calls one of these functions of `re`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in functions):
        return False
    return isinstance(node.func.value, ast.Name) and node.func.value.id == "re"


def _methods(tree: ast.AST, name: str) -> set[str]:
    """The methods of an expression that are called. Those that are passed on are matched by the parsers' reader."""
    calls = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    }
    return (calls & FUNCTIONS) or {"match"}


FOUND = {name: methods for path in sorted(ROOT.rglob("*.py")) for name, methods in found_in(path).items()}


def test_every_expression_is_listed() -> None:
    assert FOUND.keys() == LISTED.keys(), "list it with texts that make it try hard, or say why no client reaches it"
    text = "".join(path.read_text() for path in ROOT.rglob("*.py"))
    assert "regex_engine" not in text, "pydantic's other engine backtracks"
    assert "import re as" not in text
    assert "from re import" not in text
    assert text.count("import re\n") == text.count("\nimport re\n"), "inside of a function, it would not be found"


@pytest.mark.parametrize("name", [name for name in FOUND if isinstance(LISTED.get(name), list)])
def test_hard_texts_take_linear_time(name: str) -> None:
    module, _, variable = name.rpartition(".")
    expression = getattr(importlib.import_module(f"server.{module.replace('/', '.')}"), variable)
    hard = LISTED[name]
    assert isinstance(hard, list)
    for begin, unit, end in hard:
        for length in (30, LONG // 10, LONG):  # a text that takes for ever fails before it is long
            text = begin + unit * (length // len(unit)) + end
            took = min(_seconds(expression, FOUND[name], text) for _ in range(2))
            assert took < MOST_S, (begin, unit, end, length)


def _seconds(expression: re.Pattern[str], methods: set[str], text: str) -> float:
    subject = text.encode() if isinstance(expression.pattern, bytes) else text
    started = time.thread_time()
    for method in methods:
        if method in ("match", "fullmatch", "search"):
            getattr(expression, method)(subject)
        else:
            list(expression.finditer(subject))  # what the others do, too
    return time.thread_time() - started
