"""Free text with parts that have a form."""

from typing import Any

import pytest

from server.generation.constraints.check import grammar_of
from server.generation.constraints.fragment import ConstraintError
from server.generation.constraints.structural_tag import StructuralTag
from tests.server.constraints.matching import accepts

_A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
_JSON_A = {"type": "json_schema", "json_schema": _A}
_LEGACY = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=f>", "schema": _A, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "string"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


def tag(begin: str = "<a>", content: Any = _JSON_A, end: str = "</a>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(**more: Any) -> dict[str, Any]:
    return {
        "type": "triggered_tags",
        "triggers": ["<a", "<b"],
        "tags": [tag(), tag("<b>", {"type": "any_text"}, "|")],
        **more,
    }


def of(value: dict[str, Any]) -> str:
    if "structures" not in value:
        value = {"type": "structural_tag", "format": value}
    return grammar_of(StructuralTag(value, "response_format"), "response_format")


@pytest.mark.parametrize(
    ("value", "fitting", "unfitting"),
    [
        (
            _LEGACY,
            ["", "free <function text", '<function=f>{"a":1}</function>', 'x<function=g>"</function>"</function>y\n',
             '<function=f>{"a": 1}</function><function=g>"x"</function><fun'],
            ["<function=", "<function=h>", '<function=f>{"a":"x"}</function>', '<function=f>{"a":1}</function']),
        ({"type": "const_string", "value": "hello"}, ["hello"], ["hell", "hello!"]),
        (_JSON_A, ['{"a":1}'], ["{}"]),
        ({"type": "regex", "pattern": "[0-9]+"}, ["12"], ["a", ""]),
        ({"type": "grammar", "grammar": 'root ::= "x"+'}, ["xx"], ["", "y"]),
        ({"type": "any_text"}, ["", "any\nthing"], []),
        (tag(), ['<a>{"a":1}</a>'], ["", '<a>{"a":1}', "<a></a>"]),
        (tag(content={"type": "any_text"}), ["<a></a>", "<a>x<b\n</a>"], ["<a>x", "<a></a></a>"]),
        (tag(content={"type": "regex", "pattern": "[a-z<>/]+"}), ["<a>x</a>", "<a></a></a>"], ["<a></a>", "<a>1</a>"]),
        (
            {"type": "or", "elements": [tag(), {"type": "const_string", "value": "no"}]},
            ['<a>{"a":1}</a>', "no"], ["", "non"]),
        (
            {"type": "sequence", "elements": [
                {"type": "const_string", "value": "<think>"}, {"type": "any_text"},
                {"type": "const_string", "value": "</think>"}, triggered()]},
            ["<think></think>", '<think>a<a\n</think>x<a>{"a":1}</a>'], ["", "<think>", "<think></think><a>1"]),
        (triggered(), ["", "x", '<a>{"a":1}</a>', "1<b>2|3<b>|"], ["<a", "<b>", "<ab", "<a>{}</a>"]),
        (triggered(at_least_one=True), ['x<a>{"a":1}</a>y'], ["", "x"]),
        (triggered(stop_after_first=True), ["x", "<b>2|"], ["<b>2|3"]),
        (triggered(stop_after_first=True, at_least_one=True), ["<b>2|"], ["<b>2|3", "x"]),
        (
            {"type": "tags_with_separator", "tags": [tag(), tag("<c>", {"type": "const_string", "value": "c"}, "")],
             "separator": ", "},
            ["", "<c>c", '<c>c, <a>{"a":1}</a>, <c>c'], ["<c>c, ", "<c>c<c>c", "x"]),
        (
            {"type": "tags_with_separator", "tags": [tag("<c>", {"type": "const_string", "value": "c"}, "")],
             "separator": "", "at_least_one": True, "stop_after_first": True},
            ["<c>c"], ["", "<c>c<c>c"]),
    ],
)  # fmt: skip
def test_structural_tags(value: dict[str, Any], fitting: list[str], unfitting: list[str]) -> None:
    grammar = of(value)
    for text in fitting:
        assert accepts(grammar, text), text
    for text in unfitting:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"structures": [], "triggers": ["<"]}, "structures"),
        ({"structures": [{"begin": "<f>", "end": ""}], "triggers": ["<"]}, "structures[0].schema"),
        (
            {"structures": [{"begin": "<f>", "schema": {"not": {}}, "end": ""}], "triggers": ["<"]},
            "structures[0].schema.not",
        ),
        ({"structures": [{"begin": "f>", "schema": {}, "end": ""}], "triggers": ["<"]}, "structures[0].begin"),
        ({"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": [""]}, "triggers[0]"),
        ({"structures": [{"begin": "<f>", "schema": {}, "end": ""}]}, "triggers"),
        ({}, "format"),
        ({"format": []}, "format"),
        ({"format": {"type": "qwen_xml_parameter"}}, "format.type"),
        ({"format": {"type": "const_string"}}, "format.value"),
        ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, "format.style"),
        ({"format": {"type": "any_text", "excludes": ["x"]}}, "format.excludes"),
        ({"format": tag(content={"type": "regex", "pattern": "(?=a)"})}, "format.content.pattern"),
        ({"format": tag(content={"type": "any_text"}, end="")}, "format.end"),
        ({"format": tag(content=triggered())}, "format.content"),
        ({"format": tag(content={"type": "or", "elements": [{"type": "any_text"}]})}, "format.content.elements[0]"),
        ({"format": {"type": "sequence", "elements": [triggered(), tag()]}}, "format.elements[0]"),
        ({"format": {"type": "sequence", "elements": [tag(), tag(begin=3)]}}, "format.elements[1].begin"),  # type: ignore[arg-type]
        ({"format": triggered(triggers=["x"])}, "format.tags[0].begin"),
        ({"format": triggered(at_least_one="yes")}, "format.at_least_one"),
        ({"format": triggered(tags=[tag()] * 501)}, "format.tags"),
        (3, ""),
    ],
)
def test_refusals_name_the_path(value: Any, path: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        grammar_of(StructuralTag(value, "field"), "field")
    assert caught.value.path == ("field." + path if path else "field")
