"""Decoding settings as request fields, for every API that has them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args, get_type_hints

from pydantic import Discriminator, Field, Tag, create_model, model_validator

from server.api.fields.rules import (
    SUPPORTED_VALUES_ONLY,
    RequestModel,
    at_most,
    other_names_of,
    problem,
    related,
    shape,
)
from server.generation.settings import (
    MAX_LOGIT_BIAS,
    MAX_STOPS,
    BeamSearchSettings,
    ContrastiveSettings,
    DecodingSettings,
    DoLaSettings,
    FieldFacts,
    GuidanceSettings,
    SpeculationSettings,
    facts_of,
)

_Settings = TypeVar("_Settings")


class SettingsModel(RequestModel):
    """The request model of a class of settings."""

    settings_class: ClassVar[type[Any]]

    def settings(self) -> Any:
        """The settings in this object."""
        return settings_of(self.settings_class, self)


def wire_model(
    settings: type,
    base: type[SettingsModel] = SettingsModel,
    types: Mapping[str, Any] | None = None,
) -> type[SettingsModel]:
    """A request model with a field for each setting; `types` has the types of fields whose JSON differs."""
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
    """The settings in a body; settings that its API lacks are unset. `computed` has settings with another JSON form."""
    given = body.model_fields_set
    others = other_names_of(type(body))
    values = {
        name: _plain(body.named_value(name)[1])
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


MAX_STOP_LENGTH = 1024
MAX_BREAKERS = 16
MAX_BREAKER_LENGTH = 40
MAX_LAYERS = 256

TokenId = Annotated[int, Field(ge=0)]
NUM_ALTERNATIVES = Field(ge=0, le=2**31 - 1, json_schema_extra={"x-setting": "max_logprobs"})
NumAlternatives = Annotated[int, NUM_ALTERNATIVES]
"""How many of the most probable tokens are reported for each token. The planner compares it with the setting."""
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = Annotated[
    Annotated[StopString, Tag("<string>")]
    | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]
LogitBias = Annotated[
    dict[Annotated[str, Field(max_length=20)], Annotated[float, Field(ge=-100, le=100)]], at_most(MAX_LOGIT_BIAS)
]
EarlyStopping = Annotated[
    Annotated[bool, Tag("<boolean>")] | Annotated[Literal["never"], Tag("<string>")],
    Discriminator(lambda value: "<string>" if isinstance(value, str) else "<boolean>"),
]
OrderName = Literal["samewise", "llama.cpp"]
Step = Literal[
    "temperature", "top_n_sigma", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_k", "top_p", "min_p", "xtc"
]
SamplerOrder = Annotated[
    Annotated[OrderName, Tag("<string>")]
    | Annotated[list[Step], Field(min_length=1, max_length=len(get_args(Step)), fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]
Breaker = Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_LENGTH)]
Layers = Annotated[
    Annotated[Literal["low", "high"], Tag("<string>")]
    | Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LAYERS, fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]


class _BeamSearchChecks(SettingsModel):
    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        asked: BeamSearchSettings = self.settings()
        if asked.num_return is not None and asked.num_return > asked.width:
            message = f"Expected a value <= {asked.width}, the width, but got {asked.num_return} instead."
            raise problem(
                "integer_above_max_value", f"Invalid '{{path}}': integer above maximum value. {message}", "num_return"
            )
        groups = asked.groups or 1
        if asked.width % groups:
            message = f"Invalid '{{path}}': Expected a divisor of the width, {asked.width}, but got {groups} instead."
            raise problem("invalid_value", message, "groups")
        if bool(asked.diversity_penalty) != (groups > 1):
            message = "'groups' above 1 and a 'diversity_penalty' above 0 are only allowed together."
            raise problem("invalid_value", message, "diversity_penalty")
        return self


def _choice_shape(value: object) -> str | None:
    return "<string>" if isinstance(value, str) else "<object>" if isinstance(value, dict) else None


if TYPE_CHECKING:

    class _DecodingFields(SettingsModel):
        """The fields of DecodingSettings for the type checker; at run time, wire_model makes them."""

        stop: Any
        sampler_order: Any
        exponential_decay_length_penalty: Any
        top_k: int | None
        beam_search: Any
        guidance: Any
        speculation: Any

else:
    Speculation = Annotated[
        Annotated[Literal["off"], Tag("<string>")] | Annotated[wire_model(SpeculationSettings), Tag("<object>")],
        Discriminator(
            _choice_shape,
            custom_error_type="string_or_object_type",
            custom_error_message="Input should be 'off' or an object",
        ),
    ]
    _DecodingFields = wire_model(
        DecodingSettings,
        types={
            "stop": Stop | None,
            "logit_bias": LogitBias | None,
            "mirostat": Annotated[Literal[0, 2] | None, SUPPORTED_VALUES_ONLY],
            "dry_sequence_breakers": Annotated[list[Breaker], Field(max_length=MAX_BREAKERS, fail_fast=True)] | None,
            "exponential_decay_length_penalty": Annotated[list[float], Field(min_length=2, max_length=2)] | None,
            "sampler_order": SamplerOrder | None,
            "bad_words": Annotated[
                list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=128, fail_fast=True)
            ] | None,
            "allowed_token_ids": Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None,
            "stop_token_ids": Annotated[list[TokenId], Field(max_length=128, fail_fast=True)] | None,
            "beam_search": wire_model(BeamSearchSettings, _BeamSearchChecks, {"early_stopping": EarlyStopping | None})
            | None,
            "contrastive": wire_model(ContrastiveSettings) | None,
            "guidance": wire_model(GuidanceSettings) | None,
            "dola": wire_model(DoLaSettings, types={"layers": Layers}) | None,
            "speculation": Speculation | None,
        },
    )  # fmt: skip


class DecodingFields(_DecodingFields):
    """Fields that control sampling and stopping."""

    @model_validator(mode="after")
    def _check_length_penalty(self) -> Self:
        if self.exponential_decay_length_penalty is not None:
            start, factor = self.exponential_decay_length_penalty
            path = "exponential_decay_length_penalty"
            if start != int(start) or not 0 <= start < 2**31:
                message = "Invalid '{path}': Expected a whole number of tokens, at least 0."
                raise problem("invalid_value", message, f"{path}[0]")
            if not 0 < factor <= 100:
                raise problem("invalid_value", "Invalid '{path}': Expected a value > 0 and <= 100.", f"{path}[1]")
        return self

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        order = self.sampler_order
        if isinstance(order, list) and len(set(order)) < len(order):
            index = next(index for index, step in enumerate(order) if step in order[:index])
            message = f"Invalid '{{path}}': '{order[index]}' is named twice."
            raise problem("invalid_value", message, f"sampler_order[{index}]")
        return self

    @property
    def stop_strings(self) -> Sequence[str] | None:
        """The stop strings, whether sent as a string or as an array."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop
