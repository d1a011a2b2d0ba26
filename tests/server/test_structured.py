"""Answers held to a form: what the engine is asked for, and what is refused or reported."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from llguidance import LLMatcher
from openai import BadRequestError, OpenAI

from tests.server.constraints.matching import accepts
from tests.server.fake_engine import FakeEngine, scripted
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, error_of, events_of, refused, requested
from tests.server.tiny_model import TEMPLATE, write_folder

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}
PARTLY = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"a": {"type": "integer", "not": {"const": 1}}, "b": {"contains": {"const": 1}}},
}
"""A schema that can only be enforced in part."""


def schema_format(schema: object, **fields: object) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


FORMS = {
    "format json_object": ({"response_format": {"type": "json_object"}}, ['{"b": [1, "x"]}', "{}"], ["[]", "1", ""]),
    "json_schema": (schema_format(SCHEMA), ['{"a": 1}', '{"a":-7}', '{\n  "a": 1\n}'], ['{"a": "x"}', "{}"]),
    "json_schema, strict": (schema_format(SCHEMA, strict=True), ['{"a": 1}'], ['{"a": 1, "b": 2}']),
    "json_schema without one": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "answer"}}}, ['{"b": 1}'], ["[]"]
    ),
    "format structural_tag": (
        {"response_format": {"type": "structural_tag", **TAG}}, ['so <f>{"a": 1}</f> it is', "nothing"], ["<f>{}</f>"]
    ),
    "json": ({"structured_outputs": {"json": SCHEMA}}, ['{"a": 1}'], ["{}"]),
    "json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ['{"a": 1}'], ["{}"]),
    "regex": ({"structured_outputs": {"regex": "[ab]+c"}}, ["abc"], ["c", "abcd", "xabc"]),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, ["yes", "no"], ["y", "yesno"]),
    "grammar": ({"structured_outputs": {"grammar": 'start: "a"+ "b"'}}, ["aab"], ["b"]),
    "json_object": ({"structured_outputs": {"json_object": True}}, ['{"b": 1}'], ["[1]"]),
    "structural_tag": (
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **TAG})}},
        ['<f>{"a":1}</f>'], ["<f>{}</f>"],
    ),
    "no whitespace": (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, ['{"a":1}'], ['{"a": 1}']
    ),
    "own whitespace": (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "~?"}}, ['{"a":~1}'], ['{"a": 1}']
    ),
    "older whitespace": (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "~?"}, ['{"a":~1}'], ['{"a": 1}']
    ),
    "whitespace of JSON in a grammar": (
        {"structured_outputs": {"grammar": f"start: %json {json.dumps(SCHEMA)}", "disable_any_whitespace": True}},
        ['{"a":1}'], ['{"a": 1}'],
    ),
    "whitespace of JSON in a tag": (
        {"structured_outputs": {"structural_tag": TAG, "disable_any_whitespace": True}},
        ['<f>{"a":1}</f>'], ['<f>{"a": 1}</f>'],
    ),
    "opened": (
        {"guided_json": {"properties": {"a": {"type": "integer"}}}, "allow_additional_properties": True},
        ['{"b": 1}'], ['{"a": "x"}'],
    ),
    "opened, as vLLM says it": (
        {"structured_outputs": {"json": {"properties": {}}, "disable_additional_properties": False}},
        ['{"b": 1}'], ["{"],
    ),
    "said twice": (
        {"guided_grammar": 'start: "a"', "grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "a"'}},
        ["a"], ["b"],
    ),
    "said twice, once as text": (
        {**schema_format(SCHEMA), "guided_json": json.dumps(SCHEMA), "json_schema": SCHEMA}, ['{"a": 1}'], ["{}"]
    ),
    "guided_json": ({"guided_json": SCHEMA}, ['{"a": 1}'], ["{}"]),
    "guided_regex": ({"guided_regex": "a{2}"}, ["aa"], ["a", "aaa"]),
    "guided_choice": ({"guided_choice": ["x"]}, ["x"], ["xx"]),
    "an empty form": ({"guided_regex": ""}, [""], ["x"]),
    "guided_grammar": ({"guided_grammar": 'root ::= "a" [bc]'}, ["ab", "ac"], ["a"]),
}  # fmt: skip
CASES = [(path, *case) for path in (CHAT, COMPLETIONS) for case in FORMS.values()]


@pytest.mark.parametrize(("path", "fields", "right", "wrong"), CASES)
async def test_each_field_reaches_the_engine(
    path: str, fields: dict[str, Any], right: list[str], wrong: list[str], client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    request = await requested(client, engine, path, (chat if path == CHAT else completion)(**fields))
    grammar = request.sampling.grammar
    assert grammar is not None
    assert all(accepts(grammar, text) for text in right)
    assert not any(accepts(grammar, text) for text in wrong)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"response_format": {"type": "text"}, "ignore_eos": True},
    ],
)
async def test_nothing_that_asks_for_a_form(
    fields: dict[str, Any], client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    assert (await requested(client, engine, CHAT, chat(**fields))).sampling.grammar is None
    assert (await requested(client, engine, COMPLETIONS, completion(**fields))).sampling.grammar is None


async def test_beside_other_fields(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = {"n": 2, "min_tokens": 3, "logit_bias": {"97": -5}, "bad_words": ["b"], "temperature": 0.5}
    request = await requested(client, engine, CHAT, chat(**schema_format(SCHEMA), **fields))
    assert request.sampling.grammar is not None
    assert (request.sampling.min_tokens, len(request.choices), request.sampling.logit_bias) == (3, 2, ((97, -5.0),))
    assert request.sampling.bad_words


FORMAT = "response_format"
DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}
DOUBLING = {f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(40)}
STRICT_SCHEMA = f"{FORMAT}.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({FORMAT: {"type": "yaml"}}, f"{FORMAT}.type", "invalid_value"),
        ({FORMAT: {}}, f"{FORMAT}.type", "missing_required_parameter"),
        ({FORMAT: {"type": 3}}, f"{FORMAT}.type", "invalid_type"),
        ({FORMAT: "json"}, FORMAT, "invalid_type"),
        ({FORMAT: {"type": "text", "schema": SCHEMA}}, f"{FORMAT}.schema", "unknown_parameter"),
        ({FORMAT: {"type": "json_schema"}}, f"{FORMAT}.json_schema", "missing_required_parameter"),
        (
            {FORMAT: {"type": "json_schema", "json_schema": {"schema": {}}}},
            f"{FORMAT}.json_schema.name", "missing_required_parameter",
        ),
        (schema_format({}, name="a b"), f"{FORMAT}.json_schema.name", "invalid_value"),
        (schema_format("{}"), STRICT_SCHEMA, "invalid_type"),
        (schema_format(PARTLY, strict=True), f"{STRICT_SCHEMA}.properties.a.not", "invalid_value"),
        (schema_format({"$ref": "#/$defs/none"}, strict=True), f"{STRICT_SCHEMA}.$ref", "invalid_value"),
        (schema_format({"$ref": "#"}, strict=True), STRICT_SCHEMA, "invalid_value"),
        (
            schema_format({"type": "integer", "multipleOf": 999_983}, strict=True),
            f"{STRICT_SCHEMA}.multipleOf", "invalid_value",
        ),
        ({FORMAT: {"type": "structural_tag"}}, f"{FORMAT}.format", "invalid_value"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
        ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice[1]", "invalid_type"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "invalid_value"),
        ({"structured_outputs": {"grammar": "start: none"}}, "structured_outputs.grammar", "invalid_value"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
        (
            {"structured_outputs": {"json": {"items": {"contains": {}}}}},
            "structured_outputs.json.items.contains", "invalid_value",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": "("}},
            "structured_outputs.whitespace_pattern", "invalid_value",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
            "structured_outputs.whitespace_pattern", "invalid_parameter_combination",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}, "guided_whitespace_pattern": " "},
            "guided_whitespace_pattern", "invalid_parameter_combination",
        ),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "unknown_parameter"),
        ({"guided_json": [1]}, "guided_json", "invalid_type"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "invalid_value"),
        ({"guided_grammar": "x ::= y"}, "guided_grammar", "invalid_value"),
        # what does not go together
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json", "invalid_parameter_combination"),
        (
            {"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]},
            "structured_outputs", "invalid_parameter_combination",
        ),
        ({**schema_format(SCHEMA), "guided_regex": "a"}, FORMAT, "invalid_parameter_combination"),
        ({FORMAT: {"type": "json_object"}, "ignore_eos": True}, FORMAT, "invalid_parameter_combination"),
        ({"guided_regex": "a", "ignore_eos": True}, "guided_regex", "invalid_parameter_combination"),
    ],
)  # fmt: skip
async def test_what_is_refused_names_the_place(
    fields: dict[str, Any], param: str, code: str, client: httpx.AsyncClient, engine: FakeEngine, goes_on: None
) -> None:
    await refused(client, CHAT, chat(**fields), param, code)
    await refused(client, COMPLETIONS, completion(**fields), param, code)
    assert engine.requests == []


async def test_an_unknown_type_is_told_the_known_ones(client: httpx.AsyncClient) -> None:
    message = await refused(client, CHAT, chat(response_format={"type": "yaml"}), f"{FORMAT}.type", "invalid_value")
    known = "'text', 'json_object', 'json', 'regex', 'json_schema', 'structural_tag'"
    assert message == f"Invalid value: 'yaml'. Supported values are: {known}."
    message = await refused(client, CHAT, chat(response_format={"type": 3}), f"{FORMAT}.type", "invalid_type")
    assert message == "Invalid type for 'response_format.type': expected a string, but got an integer instead."


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/d0", "$defs": {**DOUBLING, "d40": {"type": "object"}}},
        {"enum": [f"{number}" for number in range(20_000)]},
        {"type": "object", "properties": {f"p{number}": {} for number in range(2_000)}},
        {"type": "string", "pattern": "((a{1000}){1000}){1000}"},
        {"type": "array", "minItems": 10**9},
        {"allOf": [{"anyOf": [{"required": [f"a{number}"]}, {"required": [f"b{number}"]}]} for number in range(20)]},
    ],
)
async def test_a_schema_that_would_take_too_much_is_refused(
    schema: dict[str, Any], client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    error = error_of(await client.post(CHAT, json=chat(**schema_format(schema, strict=True))))
    assert error["param"].startswith(STRICT_SCHEMA)
    assert engine.requests == []


async def test_a_schema_that_is_nested_too_deeply(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """In a body that is not: as text."""
    error = error_of(await client.post(CHAT, json=chat(guided_json=json.dumps(DEEP))))
    assert error["param"].startswith("guided_json")
    error = error_of(await client.post(CHAT, json=chat(guided_json="[" * 100_000)))
    assert error["param"] == "guided_json"
    assert engine.requests == []


async def test_what_a_schema_cannot_have_enforced_is_reported_unless_it_is_strict(
    client: httpx.AsyncClient, strict_client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    response = await client.post(CHAT, json=chat(**schema_format(PARTLY)))
    paths = [f"{STRICT_SCHEMA}.properties.a.not", f"{STRICT_SCHEMA}.properties.b.contains"]
    assert [warning["path"] for warning in response.json()["warnings"]] == paths
    assert response.headers["x-samewise-ignored"] == ", ".join(paths)
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    assert accepts(grammar, '{"a": 1}')  # which the schema does not allow
    assert not accepts(grammar, '{"a": "x"}')
    await refused(strict_client, CHAT, chat(**schema_format(PARTLY)), paths[0], "unsupported_parameter")
    assert (await strict_client.post(CHAT, json=chat(**schema_format(SCHEMA)))).status_code == 200


IGNORED: list[tuple[dict[str, Any], list[str]]] = [
    ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, ["guided_decoding_backend"]),
    ({"guided_regex": "a", "guided_decoding_backend": "auto"}, []),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, ["guided_whitespace_pattern"]),
    ({"guided_whitespace_pattern": " "}, ["guided_whitespace_pattern"]),
    (
        {"structured_outputs": {"grammar": 'root ::= "a"', "disable_any_whitespace": True}},
        ["structured_outputs.disable_any_whitespace"],
    ),
    (
        {"structured_outputs": {"choice": ["a"], "whitespace_pattern": " ", "disable_additional_properties": True}},
        ["structured_outputs.whitespace_pattern", "structured_outputs.disable_additional_properties"],
    ),
    ({"guided_json": {"properties": {"a": {"properties": {}}, "b": {"properties": {}}}}}, ["guided_json"]),
    ({"guided_json": {"properties": {"a": {"properties": {}}}}, "allow_additional_properties": False}, []),
    ({"structured_outputs": {"grammar": 'start: %json {"properties": {}}'}}, ["structured_outputs.grammar.%json"]),
    ({"structured_outputs": {"grammar": 'start[max_tokens=9]: "a"'}}, ["structured_outputs.grammar"]),
    ({**schema_format({"properties": {}}, strict=True)}, [STRICT_SCHEMA]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "paths"), IGNORED, ids=str)
async def test_what_does_not_apply_or_closes_objects_is_reported(
    fields: dict[str, Any], paths: list[str], client: httpx.AsyncClient
) -> None:
    for path, body in ((CHAT, chat(**fields)), (COMPLETIONS, completion(**fields))):
        answer = (await client.post(path, json=body)).json()
        assert [warning["path"] for warning in answer.get("warnings", [])] == paths


async def test_stop_strings_are_not_looked_for(
    client: httpx.AsyncClient, strict_client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.script = scripted([ord(one) for one in "abcab"])
    free = (await client.post(COMPLETIONS, json=completion(stop=["ca"]))).json()
    assert (free["choices"][0]["text"], "warnings" in free) == ("ab", False)
    body = completion(stop=["ca"], guided_regex="[abc]*")
    held = (await client.post(COMPLETIONS, json=body)).json()
    assert held["choices"][0]["text"] == "abcab"
    assert held["warnings"] == [{"path": "stop", "reason": "Ignored with structured output."}]
    chunks = events_of((await client.post(COMPLETIONS, json={**body, "stream": True})).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcab"
    await refused(strict_client, COMPLETIONS, body, "stop", "unsupported_parameter")


async def test_a_model_without_a_token_that_ends_outputs(make_app: Callable[..., FastAPI], tmp_path: Path) -> None:
    template = TEMPLATE.replace("<|end|>", "")  # a template that ends an answer with it makes it an EOS
    folder = write_folder(tmp_path / "endless", template=template, generation={"eos_token_id": []})
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Tiny"}')
    async with client_of(make_app(folder)) as client:
        await refused(client, CHAT, chat(guided_regex="a"), None, "unsupported_value")
        assert (await client.post(CHAT, json=chat())).status_code == 200


def test_what_the_official_client_makes_of_it(openai_client: OpenAI, engine: FakeEngine) -> None:
    engine.script = scripted([ord(one) for one in '{"a":7}'] + [256])
    answer = openai_client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=7, **schema_format(SCHEMA, strict=True)
    )
    assert json.loads(answer.choices[0].message.content or "") == {"a": 7}
    with pytest.raises(BadRequestError, match="Supported values are: 'text', 'json_object'"):
        openai_client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], response_format={"type": "yaml"}
        )
    assert LLMatcher.validate_grammar(str(engine.requests[-1].sampling.grammar), None) == ""
