"""The base of all request models: nothing unknown, nothing coerced, and what is not supported refused by name.

How a field is treated stands in its JSON schema under `x-support`, from which /v1/capabilities is made: "honoured"
(where nothing stands), "no_effect" (accepted, cannot change the output), "hint" (left out where it means nothing here,
and reported with the reason `x-hint`), "refused" (only values that ask for nothing are accepted). `x-requires` and
`x-excludes` name fields that it needs or that it cannot go together with, which is checked here; the latter stands on
one of the two. `x-off` lists values, besides null, false and what is empty, that ask for nothing. `x-default` is the
default of an API that does not take the model's.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidatorFunctionWrapHandler

from server.errors import shorten
from server.generation.field_table import asks_for_anything
from server.generation.notices import Notice

_Value = TypeVar("_Value")


def problem(code: str, message: str, field: str = "") -> PydanticCustomError:
    """An error with a code and a message of our own.

    `field` is the path of the culprit below the place where this is raised; `{path}` in the message becomes the whole
    path.
    """
    return PydanticCustomError(code, "{problem}", {"problem": message, "field": field})


class RequestModel(BaseModel):
    """Unknown fields are refused with a hint, null counts as absent, and types are taken as they are."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _know_every_field(cls, value: object) -> object:
        if isinstance(value, dict) and cls.model_config["extra"] == "forbid":
            known = names_of(cls)
            unknown = next((key for key in value if key not in known), None)
            if unknown is not None:
                raise _unknown_parameter(unknown, list(known))
        return value

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        relations = relations_of(type(self))
        asking = [name for name in relations if name in self.model_fields_set and self.asks(name)]
        for name in asking:
            for other in relations[name].requires:
                if other not in asking:
                    message = f"The '{name}' parameter is only allowed when '{other}' is enabled."
                    raise problem("invalid_value", message, name)
        for name in asking:
            for other in relations[name].excludes:
                if other in asking:
                    message = f"Setting '{name}' and '{other}' at the same time is not supported."
                    raise problem("invalid_parameter_combination", message, name)
        return self

    def asks(self, name: str) -> bool:
        """Whether a field has a value that asks for anything."""
        return asks_for_anything(getattr(self, name), relations_of(type(self))[name].off)

    def left_out(self, path: str = "") -> Iterator[Notice]:
        """What of the model is a hint that is not followed, at any depth. `path` is where the model stands."""
        for name, relations in relations_of(type(self)).items():  # in their order, which a set of names does not have
            if name not in self.model_fields_set:
                continue
            at = _join(path, name)
            if relations.hint and self.asks(name):
                yield Notice(at, relations.hint)
            else:
                yield from _left_out_of(getattr(self, name), at)
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                yield Notice(shorten(_join(path, name), 200), "Unknown; left out.")


class EchoedModel(RequestModel):
    """What clients send back as they got it, from this server or another: what is unknown in it is left out."""

    model_config = ConfigDict(extra="allow")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _left_out_of(value: object, path: str) -> Iterator[Notice]:
    if isinstance(value, RequestModel):
        yield from value.left_out(path)
    elif isinstance(value, list) and not (value and isinstance(value[0], int)):  # tokens are many
        for index, item in enumerate(value):
            if isinstance(item, RequestModel):
                yield from item.left_out(f"{path}[{index}]")


@dataclass(frozen=True, slots=True)
class Relations:
    """What the schema of a field says of other fields, and of the values that ask for nothing."""

    requires: Sequence[str]
    excludes: Sequence[str]
    off: Sequence[object]
    hint: str
    """Why it is left out, where it is a hint."""


@cache
def names_of(model: type[RequestModel]) -> Sequence[str]:
    """Its fields as clients call them."""
    return tuple(field.alias or name for name, field in model.model_fields.items())


@cache
def relations_of(model: type[RequestModel]) -> Mapping[str, Relations]:
    """Those of all fields of a model; other fields that the model does not have are left out."""
    fields = model.model_fields

    def read(extra: object) -> Relations:
        said = extra if isinstance(extra, dict) else {}
        requires, excludes = (
            [other for other in said.get(key, ()) if other in fields] for key in ("x-requires", "x-excludes")
        )
        return Relations(requires, excludes, said.get("x-off", ()), said.get("x-hint", ""))

    return {name: read(field.json_schema_extra) for name, field in fields.items()}


def _unknown_parameter(name: str, known: list[str]) -> PydanticCustomError:
    name = shorten(name)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return problem("unknown_parameter", "Unknown parameter: '{path}'." + hint, name)


def _only(code: str) -> WrapValidator:
    """Whatever the annotated type does not accept is refused with this code."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError(code, code) from None

    return WrapValidator(validate)


SUPPORTED_ONLY = _only("unsupported_parameter")
"""Wraps a type that has only the values of a field that ask for nothing."""
SUPPORTED_VALUES_ONLY = _only("unsupported_value")
"""Wraps a type that has only those of a field's values that this server can honour."""

Refused = Annotated[None, SUPPORTED_ONLY]
"""A field of the API that this server does not support in any way."""


def related(*, requires: Sequence[str] = (), excludes: Sequence[str] = (), off: Sequence[object] = ()) -> Any:
    """The `json_schema_extra` of a field: fields that it needs or that exclude it, and values that ask for nothing.

    Fields that a request model does not have may be named.
    """
    named = {"x-requires": requires, "x-excludes": excludes, "x-off": off}
    return {name: list(values) for name, values in named.items() if values}


def refused(description: str) -> Any:
    """The default of a field whose type lists only values that ask for nothing."""
    return Field(None, description=description, json_schema_extra={"x-support": "refused"})


def no_effect(description: str, **limits: Any) -> Any:
    """The default of a field that is validated and cannot change the output."""
    return Field(None, description=description, json_schema_extra={"x-support": "no_effect"}, **limits)


def hint(description: str, reason: str, *, off: Sequence[object] = ()) -> Any:
    """The default of a field that is left out, and reported with this reason if it asks for anything."""
    extra = {"x-support": "hint", "x-hint": reason, **related(off=off)}
    return Field(None, description=description, json_schema_extra=extra)


def at_most(limit: int) -> WrapValidator:
    """Counts an object's properties before looking at any of them."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        if isinstance(value, dict) and len(value) > limit:
            expected = f"Expected an object with at most {limit} properties, but got {len(value)} properties instead."
            raise problem("object_above_max_properties", f"Invalid '{{path}}': too many properties. {expected}")
        return handler(value)

    return WrapValidator(validate)


def _at_most_bytes(limit: int) -> AfterValidator:
    """Measures the JSON of a value."""

    def validate(value: _Value) -> _Value:
        num_bytes = len(json.dumps(value))
        if num_bytes > limit:
            raise problem("invalid_value", f"Invalid '{{path}}': it has {num_bytes} bytes, and may have {limit}.")
        return value

    return AfterValidator(validate)


_MAX_OPAQUE = 64 << 10
Opaque = Annotated[dict[str, Any], _at_most_bytes(_MAX_OPAQUE)]
"""An object in which nothing is looked at."""
OpaqueList = Annotated[list[dict[str, Any]], _at_most_bytes(_MAX_OPAQUE)]
"""A list of such objects."""


def shape(value: object) -> str | None:
    """Tag of a union of string and array, for pydantic's Discriminator."""
    return "<string>" if isinstance(value, str) else "<array>" if isinstance(value, list) else None


def tag_by_type(otherwise: str) -> Callable[[object], str]:
    """Tags of a union of objects that differ in their `type`, for pydantic's Discriminator.

    What is no object gets the tag of the type `otherwise`, and is refused as that.
    """

    def tag(value: object) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", otherwise)
        return f"<{kind}>"

    return tag
