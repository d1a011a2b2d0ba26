"""Typed answers say in the OpenAPI document what their JSON has."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import UNSET, UnsetType

from server.api.answer_object import AnswerObject, Warnings, components, doc, schema_of
from server.api.dialects import DIALECTS
from server.generation.notices import Notice


class Whole(AnswerObject, tag_field="type", tag="whole"):
    """One form."""

    size: int


class Piece(AnswerObject, tag_field="type", tag="piece"):
    """Another."""

    next: Annotated[int | None, doc("Null at the end.")]


class Sample(AnswerObject):
    """The first line.

    The second.
    """

    object: Literal["sample"] = "sample"
    nothing: None = None
    count: Annotated[int | UnsetType, doc("Where it applies.")] = UNSET
    parts: Annotated[Sequence[Whole | Piece], doc("In either form.")]
    warnings: Warnings = UNSET


def test_json():
    """Constants and nulls are written, in the order of the class; what is not set is left out."""
    assert msgspec.json.encode(Sample(parts=[Piece(next=None)])) == (
        b'{"object":"sample","nothing":null,"parts":[{"type":"piece","next":null}]}'
    )
    assert msgspec.to_builtins(Sample(parts=[], count=0, warnings=[Notice("a", "b")])) == {
        "object": "sample", "nothing": None, "count": 0, "parts": [], "warnings": [{"path": "a", "reason": "b"}],
    }  # fmt: skip


def test_schema():
    reference = schema_of(Sample)
    assert reference == {"$ref": "#/components/schemas/Sample"}
    schemas = components({"paths": [reference, {"$ref": "#/components/schemas/SomebodyElse"}]})
    assert set(schemas) == {"Sample", "Whole", "Piece", "Notice"}
    assert schemas["Sample"]["description"] == "The first line.\n\nThe second."
    assert schemas["Sample"]["required"] == ["object", "nothing", "parts"]
    assert schemas["Piece"]["properties"]["next"]["description"] == "Null at the end."
    assert schemas["Piece"]["properties"]["type"] == {"enum": ["piece"]}


@pytest.mark.parametrize("other", [{"other": 1}, {"object": "else"}, {"count": None}])
def test_tests_can_hold_answers_to_them(other: dict[str, object]):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"object": "sample", "nothing": None, "parts": [], **other}, Sample)


def test_names_are_unique():
    assert DIALECTS
    names = Counter(kind.__name__ for kind in _kinds(AnswerObject))
    assert [name for name, count in names.items() if count > 1] == []


def _kinds(kind: type[AnswerObject]) -> Sequence[type[AnswerObject]]:
    return [one for sub in kind.__subclasses__() for one in (sub, *_kinds(sub))]
