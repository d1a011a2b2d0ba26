"""What is known of a field that requests may have: from this its wire model, its default and its docs are made.

A class of settings is a frozen dataclass whose fields are declared by `known`. None stands for a field of which the
request says nothing.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

_Settings = TypeVar("_Settings")


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """One field, as every API has it."""

    description: str
    default: object = None
    """Where neither the request nor the model says anything."""
    of_model: str | None = None
    """The key of generation_config.json under which the model says what it is by default."""
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By pydantic's names: ge, gt, le, lt, min_length, max_length."""
    off: Sequence[object] = ()
    """Values, besides null, false and what is empty, that ask for nothing."""
    requires: Sequence[str] = ()
    """Fields that must ask for something as well."""
    excludes: Sequence[str] = ()
    """Fields that it cannot go together with; their defaults of the model do not count beside it either."""
    examples: Sequence[object] = ()
    is_required: bool = False

    def asks(self, value: object) -> bool:
        """Whether a value of the field asks for anything."""
        return asks_for_anything(value, self.off)


def asks_for_anything(value: object, off: Sequence[object]) -> bool:
    """Whether it is none of the values that ask for nothing anywhere, nor one of those that do so here."""
    if value is None or value is False or value in ("", [], (), {}):
        return False
    return value not in off


def known(description: str, **facts: Any) -> Any:
    """A field of a settings class. Takes what FieldFacts has; limits may be given by their names."""
    names = {field.name for field in dataclasses.fields(FieldFacts)}
    limits = {name: value for name, value in facts.items() if name not in names}
    own = {name: value for name, value in facts.items() if name in names}
    metadata = {"facts": FieldFacts(description, limits=limits, **own)}
    if own.get("is_required"):
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=None, metadata=metadata)


def facts_of(settings: type) -> Mapping[str, FieldFacts]:
    """What is known of each field of a settings class, by name."""
    return _facts_of(settings)


@cache
def _facts_of(settings: Any) -> Mapping[str, FieldFacts]:
    return {field.name: field.metadata["facts"] for field in dataclasses.fields(settings)}


def asked(settings: Any) -> Iterator[str]:
    """The fields that ask for anything."""
    for name, facts in facts_of(type(settings)).items():
        if facts.asks(getattr(settings, name)):
            yield name


def filled(settings: _Settings, of_model: Mapping[str, object]) -> _Settings:
    """The settings where the request leaves nothing open: what it says, then the model, then the API.

    The model's default counts for nothing where the request asks for something that excludes the field.
    """
    facts = facts_of(type(settings))
    excluded = {other for name in asked(settings) for other in facts[name].excludes}
    values = {}
    for name, one in facts.items():
        value = getattr(settings, name)
        if value is None and name not in excluded:
            value = of_model.get(name)
        values[name] = one.default if value is None else value
    return type(settings)(**values)
