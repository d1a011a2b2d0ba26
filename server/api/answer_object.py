"""Typed answers: Structs that msgspec encodes, and that give the OpenAPI document and docs/api.md their schemas.

    class StepList(AnswerObject):
        '''Answer of GET /v1/steps.'''

        object: Literal["list"] = "list"
        data: Annotated[Sequence[StepObject], doc("Oldest first.")]
        next_page: Annotated[str | None, doc("Null on the last page.")]
        warnings: Warnings = UNSET

    @router.get("/v1/steps", responses=answers(StepList, 400, 401))
    async def steps(...) -> Response:
        return json_response(StepList(data=..., next_page=None))

A property is always written, `None` as null and a default as well, except where its value is `UNSET`: that alone leaves
it out of the JSON. Arguments are keywords; the JSON has the order of the class. Where a property or an event has
several forms, each is a class with `tag_field="type", tag="ping"`, and the annotation is their union, `Ping | Pong`.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, dataclass_transform

import msgspec

from server.generation.notices import Notice

_REFERENCES = "#/components/schemas/{name}"
_REFERENCE = re.compile(rb'"#/components/schemas/([^"]+)"')


class _KeywordsOnly(msgspec.StructMeta):
    """`kw_only`, which a Struct does not inherit, so that a required property may follow an optional one."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> "_KeywordsOnly":
        return super().__new__(mcs, name, bases, namespace, **{"kw_only": True, **options})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(msgspec.field,))
class AnswerObject(msgspec.Struct, metaclass=_KeywordsOnly, frozen=True, forbid_unknown_fields=True):
    """Base of all objects in answers. Its name is its name in the OpenAPI document, and must be unique."""


def doc(text: str) -> msgspec.Meta:
    """The description of a property, for `Annotated`."""
    return msgspec.Meta(description=text)


WARNINGS = (
    "Extension: what of the request was left out or changed, at most 32 fields; their paths are in the header "
    "`x-samewise-ignored` as well."
)
Warnings = Annotated[Sequence[Notice] | msgspec.UnsetType, doc(WARNINGS)]
"""Of an answer whose request had notices: `warnings: Warnings = UNSET`, which is given `notices or UNSET`."""


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of an AnswerObject, of a union of tagged ones, or of a list; it refers to `components`."""
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REFERENCES)
    return schema


def components(document: object) -> dict[str, Any]:
    """The schemas, by their names, of all AnswerObjects that a JSON document refers to, and of what they consist of."""
    known = {kind.__name__: kind for kind in _kinds(AnswerObject)}
    names = [name.decode() for name in dict.fromkeys(_REFERENCE.findall(msgspec.json.encode(document)))]
    kinds = [known[name] for name in names if name in known]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REFERENCES)
    for schema in schemas.values():
        schema["description"] = inspect.cleandoc(schema.get("description", ""))
        properties = schema.get("properties", {})
        schema["required"] = [name for name in properties if _is_written(name, schema)]
    return schemas


def _is_written(name: str, schema: dict[str, Any]) -> bool:
    return name in schema["required"] or "default" in schema["properties"][name]


def _kinds(kind: type[AnswerObject]) -> Iterator[type[AnswerObject]]:
    for one in kind.__subclasses__():
        yield one
        yield from _kinds(one)
