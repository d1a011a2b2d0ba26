"""The base of all request models: unknown fields and unsupported values are refused by name, and nothing is coerced.

A lenient server (`--lenient`) ignores unknown fields and reports them, if the answer can report anything.

The JSON schema of a field says how it is treated, and /v1/capabilities is made from it:
- `x-support`: "honoured" (the default), "no_effect" (accepted, cannot change the output), "hint" (ignored if it does
  not apply, and reported with the reason `x-hint`), or "refused" (only values that ask for nothing are accepted);
- `x-requires`, `x-excludes`: fields that it needs, and fields that it excludes (named on one of the two), checked here;
- `x-off`: values that ask for nothing, as null, false and empty ones do; with `x-on`, false asks for something;
- `x-same-as`: the field for which this one is another server's name;
- `x-default`: the API's default, if it does not use the model's;
- `x-setting`: the setting that is the highest value of a number.
"""

import difflib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidatorFunctionWrapHandler

from server.errors import shorten
from server.generation.notices import MAX_NOTICES, Notice
from server.generation.settings import is_active_value

_Value = TypeVar("_Value")
LENIENT = {"lenient": True}
"""Context of a validation that accepts unknown fields; `RequestModel.ignored` reports them."""
NOT_LENIENT = {"lenient": False}
"""Context of a validation that refuses unknown fields, and says that a lenient server would ignore them."""
_LENIENT_ADVICE = " A server started with --lenient ignores such fields, and reports them."


def problem(code: str, message: str, field: str = "") -> PydanticCustomError:
    """An error with a code and a message of our own.

    `field` is the path of the wrong field, relative to the model that raises this. `{path}` in the message becomes the
    whole path.
    """
    return PydanticCustomError(code, "{problem}", {"problem": message, "field": field})


class RequestModel(BaseModel):
    """Base of request models: unknown fields are refused with a suggestion, null is absent, types are not coerced."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": False},
    )
    takes_unknown: ClassVar[bool] = False
    """Whether unknown fields are always ignored and reported, never refused."""

    @model_validator(mode="before")
    @classmethod
    def _know_every_field(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, dict):
            return value
        if None in value.values():
            value = {key: its_value for key, its_value in value.items() if its_value is not None}
        if not cls.takes_unknown and info.context is not LENIENT:
            known = names_of(cls)
            unknown = next((key for key in value if key not in known), None)
            if unknown is not None:
                advice = _LENIENT_ADVICE if info.context is NOT_LENIENT else ""
                message = f"Unknown parameter: '{{path}}'.{_did_you_mean(unknown, known)}{advice}"
                raise problem("unknown_parameter", message, shorten(unknown))
        return value

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        relations = relations_of(type(self))
        asking = [name for name in self._given if self.asks(name)]
        for name in asking:
            for other in relations[name].requires:
                if other not in asking:
                    message = f"The '{name}' parameter is only allowed when '{other}' is enabled."
                    raise problem("invalid_value", message, name)
        for name in asking:
            for other in relations[name].excludes:
                if other in asking:
                    raise not_together(name, other)
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        given = self.model_fields_set
        for name, others in other_names_of(type(self)).items():
            if given.isdisjoint(others):
                continue
            own_name, value = self.named_value(name)
            for other in others:
                if getattr(self, other) not in (None, value):
                    raise not_together(other, own_name)
        return self

    @property
    def _given(self) -> Sequence[str]:
        """The names of the fields that the client has set, in the order of the model."""
        relations = relations_of(type(self))
        return sorted(self.model_fields_set & relations.keys(), key=lambda name: relations[name].place)

    def asks(self, name: str) -> bool:
        """Whether a field has a value that asks for something."""
        value, relations = getattr(self, name), relations_of(type(self))[name]
        return value is False if relations.is_on else is_active_value(value, relations.off)

    def named_value(self, name: str) -> tuple[str, Any]:
        """The name under which the client sets a field, its own or another server's, and the value."""
        own = (name,) if name in relations_of(type(self)) else ()  # otherwise it would find an unknown field
        for one in (*own, *other_names_of(type(self)).get(name, ())):
            if (value := getattr(self, one)) is not None:
                return one, value
        return name, None

    def ignored(self, path: str = "") -> Iterator[Notice]:
        """Notices of ignored hints and unknown fields, at any depth. `path` is the path of this object."""
        for name in self._given:
            at, reason = _join(path, name), relations_of(type(self))[name].hint
            if reason and self.asks(name):
                yield Notice(at, reason)
            else:
                yield from _ignored_in(getattr(self, name), at)
        for name in islice(self.model_extra or {}, MAX_NOTICES):
            near = "" if self.takes_unknown else _did_you_mean(name, names_of(type(self)))
            yield Notice(shorten(_join(path, name), 200), f"Unknown field; ignored.{near}")


class EchoedModel(RequestModel):
    """An object that clients echo as they got it from this server or another: unknown fields are ignored."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})
    takes_unknown = True


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _ignored_in(value: object, path: str) -> Iterator[Notice]:
    if isinstance(value, RequestModel):
        yield from value.ignored(path)
    elif isinstance(value, list) and not (value and isinstance(value[0], int)):  # token ids are many
        for index, item in enumerate(value):
            if isinstance(item, RequestModel):
                yield from item.ignored(f"{path}[{index}]")


@dataclass(frozen=True, slots=True)
class Relations:
    """How a field relates to others, and which of its values ask for nothing."""

    requires: Sequence[str]
    excludes: Sequence[str]
    off: Sequence[object]
    hint: str
    """Why the field is ignored, if it is a hint."""
    is_on: bool
    """Whether the field is on by default, so that false asks for something."""
    same_as: str
    """The field for which this one is another name; empty: none."""
    place: int
    """The field's place in its model."""


@cache
def names_of(model: type[RequestModel]) -> Collection[str]:
    """The names of a model's fields in JSON, in their order."""
    return dict.fromkeys(field.alias or name for name, field in model.model_fields.items())


@cache
def relations_of(model: type[RequestModel]) -> Mapping[str, Relations]:
    """The relations of each field of a model. Fields that the model does not have are ignored."""
    fields = model.model_fields

    def read(place: int, extra: object) -> Relations:
        extras = extra if isinstance(extra, dict) else {}
        requires, excludes = (
            [other for other in extras.get(key, ()) if other in fields] for key in ("x-requires", "x-excludes")
        )
        off, reason = extras.get("x-off", ()), extras.get("x-hint", "")
        return Relations(requires, excludes, off, reason, extras.get("x-on", False), extras.get("x-same-as", ""), place)

    return {name: read(place, field.json_schema_extra) for place, (name, field) in enumerate(fields.items())}


@cache
def other_names_of(model: type[RequestModel]) -> Mapping[str, Sequence[str]]:
    """Other servers' names for the fields of a model, by the field's own name."""
    others: dict[str, list[str]] = {}
    for name, relations in relations_of(model).items():
        if relations.same_as:
            others.setdefault(relations.same_as, []).append(name)
    return others


def _did_you_mean(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(shorten(name), known, n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def not_together(name: str, other: str) -> PydanticCustomError:
    """The error for two fields that exclude each other."""
    message = f"Setting '{name}' and '{other}' at the same time is not supported."
    return problem("invalid_parameter_combination", message, name)


def _only(code: str) -> WrapValidator:
    """Refuse with this code all values that the annotated type does not accept."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError(code, code) from None

    return WrapValidator(validate)


SUPPORTED_ONLY = _only("unsupported_parameter")
"""Annotates an unsupported field, whose type has only the values that ask for nothing."""
SUPPORTED_VALUES_ONLY = _only("unsupported_value")
"""Annotates a field whose type has only the values that this server supports."""

Refused = Annotated[None, SUPPORTED_ONLY]
"""Type of a field that this server does not support."""


def related(
    *, requires: Sequence[str] = (), excludes: Sequence[str] = (), off: Sequence[object] = (), on: bool = False
) -> Any:
    """The `json_schema_extra` of a field: fields that it requires or excludes, and values that ask for nothing.

    Fields that a request model lacks may be named. If a field is `on` by default, false asks for something.
    """
    named = {"x-requires": requires, "x-excludes": excludes, "x-off": off}
    return {**{name: list(values) for name, values in named.items() if values}, **({"x-on": True} if on else {})}


def same_as(name: str, description: str = "", **limits: Any) -> Any:
    """The default of a field that is another server's name for the field `name`."""
    described = f"{description} Same as `{name}`.".strip()
    return Field(None, description=described, json_schema_extra={"x-same-as": name}, **limits)


def refused(description: str) -> Any:
    """The default of a field whose type lists only values that ask for nothing."""
    return Field(None, description=description, json_schema_extra={"x-support": "refused"})


def no_effect(description: str, **limits: Any) -> Any:
    """The default of a field that is validated and cannot change the output."""
    return Field(None, description=description, json_schema_extra={"x-support": "no_effect"}, **limits)


def hint(description: str, reason: str, *, off: Sequence[object] = (), on: bool = False) -> Any:
    """The default of a field that is ignored, and reported with this reason if it asks for anything."""
    extra = {"x-support": "hint", "x-hint": reason, **related(off=off, on=on)}
    return Field(None, description=description, json_schema_extra=extra)


def at_most(limit: int) -> WrapValidator:
    """Limit the number of an object's properties, before any of them is validated."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        if isinstance(value, dict) and len(value) > limit:
            expected = f"Expected an object with at most {limit} properties, but got {len(value)} properties instead."
            raise problem("object_above_max_properties", f"Invalid '{{path}}': too many properties. {expected}")
        return handler(value)

    return WrapValidator(validate)


def _at_most_bytes(limit: int) -> AfterValidator:
    """Limit the size of a value as JSON."""

    def validate(value: _Value) -> _Value:
        num_bytes = len(json.dumps(value))
        if num_bytes > limit:
            raise problem(
                "invalid_value", f"Invalid '{{path}}': it has {num_bytes} bytes, but at most {limit} are allowed."
            )
        return value

    return AfterValidator(validate)


_MAX_OPAQUE = 64 << 10
Opaque = Annotated[dict[str, Any], _at_most_bytes(_MAX_OPAQUE)]
"""An object whose content is not validated."""
OpaqueList = Annotated[list[dict[str, Any]], _at_most_bytes(_MAX_OPAQUE)]
"""A list of objects whose content is not validated."""
Anything = Annotated[Any, _at_most_bytes(_MAX_OPAQUE)]
"""A value that is not validated."""


def shape(value: object) -> str | None:
    """Tag of a union of string and array, for pydantic's Discriminator."""
    return "<string>" if isinstance(value, str) else "<array>" if isinstance(value, list) else None


def tag_by_type(otherwise: str) -> Callable[[object], str]:
    """Tags of a union of objects that differ in their `type`, for pydantic's Discriminator.

    A value that is not an object gets the tag of the type `otherwise`, which refuses it.
    """

    def tag(value: object) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", otherwise)
        return f"<{kind}>"

    return tag
