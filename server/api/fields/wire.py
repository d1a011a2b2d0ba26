"""Wire models made from the tables of settings, and back: one declaration serves the API, the planner and the docs."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, get_type_hints

from pydantic import Field, create_model

from server.api.fields.rules import RequestModel, other_names_of, related
from server.generation.settings import FieldFacts, facts_of

_Settings = TypeVar("_Settings")


class SettingsModel(RequestModel):
    """The wire model of a class of settings."""

    settings_class: ClassVar[type[Any]]

    def settings(self) -> Any:
        """What it says, without the wire."""
        return settings_of(self.settings_class, self)


def wire_model(
    settings: type,
    base: type[SettingsModel] = SettingsModel,
    types: Mapping[str, Any] | None = None,
) -> type[SettingsModel]:
    """A model with a field for each of the settings; `types` has those that JSON writes in its own way."""
    hints = get_type_hints(settings)
    own = types or {}
    fields: dict[str, Any] = {
        name: (own.get(name, hints[name]), _field(facts)) for name, facts in facts_of(settings).items()
    }
    model: type[SettingsModel] = create_model(
        settings.__name__, __base__=base, __module__=__name__, __doc__=settings.__doc__, **fields
    )
    model.settings_class = settings
    return model


def settings_of(settings: type[_Settings], body: RequestModel, **computed: object) -> _Settings:
    """The settings that a body has; those that its API lacks say nothing. `computed` have another form in this API."""
    given = body.model_fields_set
    others = other_names_of(type(body))
    values = {
        name: _plain(body.said(name)[1])
        for name in facts_of(settings)
        if name not in computed and (name in given or name in others)
    }
    return settings(**values, **computed)


def _field(facts: FieldFacts) -> Any:
    limits: dict[str, Any] = dict(facts.limits)
    return Field(
        ... if facts.is_required else None,
        description=facts.description,
        examples=list(facts.examples) or None,
        json_schema_extra=related(requires=facts.requires, excludes=facts.excludes, off=facts.off) or None,
        **limits,
    )


def _plain(value: object) -> object:
    if isinstance(value, SettingsModel):
        return value.settings()
    return tuple(value) if isinstance(value, list) else value
