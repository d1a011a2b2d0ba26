"""Typed responses: msgspec Structs, from which the OpenAPI document and the API reference take their schemas.

    class StepList(AnswerObject):
        '''Response schema for GET /v1/steps.'''

        object: Literal["list"] = "list"
        data: Annotated[Sequence[StepObject], doc("Oldest first.")]
        next_page: Annotated[str | None, doc("Null on the last page.")]
        warnings: Warnings = UNSET

    @router.get("/v1/steps", responses=answers(StepList, 400, 401))
    async def steps(...) -> Response:
        return json_response(StepList(data=..., next_page=None))

Every property is written, `None` as null and defaults too, unless its value is `UNSET`. Arguments are keywords; the
JSON has the order of the class. If a property or an event has several forms, each form is a class with
`tag_field="type", tag="ping"`, and the annotation is their union, `Ping | Pong`.
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
    """Base of all objects in responses. A class's name is its name in the OpenAPI document, and must be unique."""


def doc(text: str) -> msgspec.Meta:
    """The description of a property, for `Annotated`."""
    return msgspec.Meta(description=text)


WARNINGS = (
    "Extension: fields of the request that were ignored or changed, at most 32. The header `x-samewise-ignored` lists "
    "their paths."
)
Warnings = Annotated[Sequence[Notice] | msgspec.UnsetType, doc(WARNINGS)]
"""Type of the property `warnings`: declare `warnings: Warnings = UNSET`, and pass `notices or UNSET`."""

TemplateDate = Annotated[
    str | msgspec.UnsetType,
    doc(
        "Extension: the date that the chat template has shown as today's, if it has. Send it as "
        "`chat_template_kwargs.template_date` to get the same prompt on another day."
    ),
]
"""Type of the property `template_date`: declare it with the default UNSET."""


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of an AnswerObject, a union of tagged ones, or a list; it refers to `components`."""
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REFERENCES)
    return schema


def components(document: object) -> dict[str, Any]:
    """The schemas by name of all AnswerObjects that a JSON document refers to, directly or not."""
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
