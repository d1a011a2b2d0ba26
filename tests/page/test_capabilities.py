"""The form of settings: what a server says of its fields, and values from wherever."""

import msgspec
import pytest

from server.api.capabilities import describe_fields
from server.api.chat.schema import ChatCompletionRequest
from server.config import Settings
from server.page.capabilities import PAGE_FIELDS, Field, FieldDescription, Kind, conflicts, fields_of

_BODY = describe_fields(ChatCompletionRequest, {}, Settings())
DESCRIBED = msgspec.convert(msgspec.to_builtins(_BODY), dict[str, FieldDescription])
FIELDS = fields_of(DESCRIBED)


def test_every_field_that_does_something_is_in_the_form_or_of_the_page():
    known = {name for name, one in DESCRIBED.items() if one.support in ("honoured", "hint")}
    assert known == FIELDS.keys() | (PAGE_FIELDS & known)
    assert len(FIELDS) > 50


@pytest.mark.parametrize(
    ("name", "kind", "bounds"),
    [
        ("temperature", "number", "0 to 2"),
        ("max_tokens", "integer", "at least 1"),
        ("seed", "integer", ""),
        ("ignore_eos", "boolean", ""),
        ("mirostat", "choice", ""),
        ("response_format", "json", ""),
    ],
)
def test_kinds_and_ranges(name: str, kind: Kind, bounds: str):
    assert (FIELDS[name].kind, FIELDS[name].range) == (kind, bounds)


def test_what_excludes_another_is_excluded_by_it():
    assert conflicts("temperature", FIELDS, ["temperature", "penalty_alpha", "seed"]) == ["penalty_alpha"]
    assert conflicts("penalty_alpha", FIELDS, ["temperature", "seed"]) == ["temperature"]


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("boolean", True, True),
        ("boolean", "yes", False),
        ("choice", 2, True),
        ("choice", {"a": []}, False),
        ("integer", 2**53, True),
        ("integer", 2**53 + 2, False),
        ("number", True, False),
        ("text", 5, False),
        ("texts", ["a", "b"], True),
        ("texts", "a", False),
        ("json", [{}], True),
    ],
)
def test_a_value_of_another_type_is_shown_as_it_is(kind: Kind, value: object, shown: bool):
    field = Field("field", kind, choices=(0, 2))
    assert field.shows(value) == shown
    assert Field("field", "json").parse(Field("field", "json").format(value)) == value


def test_what_is_no_json_is_said():
    with pytest.raises(ValueError, match="This is not valid JSON"):
        FIELDS["response_format"].parse("{")
