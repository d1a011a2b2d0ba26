"""The fields of a chat request, as described by /v1/capabilities. No I/O."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Support = Literal["honoured", "hint", "no_effect", "refused"]


class Schema(msgspec.Struct, frozen=True, rename="camel"):
    """The keywords of a JSON schema that the form shows."""

    type: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: float | None = None
    exclusive_maximum: float | None = None
    enum: tuple[str | int | float | bool | None, ...] = ()
    items: Any = None
    any_of: tuple["Schema", ...] = ()

    @property
    def alternatives(self) -> list["Schema"]:
        """The possible schemas, without null."""
        return [one for one in self.any_of or (self,) if one.type != "null"]


class FieldDescription(msgspec.Struct, frozen=True):
    """The server's description of a request field."""

    support: Support = "refused"
    description: str | None = None
    default: Any = None
    values: Schema = Schema()
    excludes: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether the server supports this field."""
        return self.support in ("honoured", "hint")


Fields = Mapping[str, FieldDescription]
"""Descriptions by field name; empty for a server without /v1/capabilities."""


class ImageLimits(msgspec.Struct, frozen=True):
    """Images that a request may have."""

    formats: tuple[str, ...]
    max_images: int
    max_bytes: int


class Capabilities(msgspec.Struct, frozen=True):
    """The answer of /v1/capabilities."""

    endpoints: dict[str, dict[str, FieldDescription]]
    """Request fields by path of the endpoint."""
    logprobs: str = ""
    """Whether log-probabilities are `raw` or `processed`."""
    images: ImageLimits | None = None
    """None if the model takes no images."""


Kind = Literal["boolean", "choice", "integer", "number", "text", "texts", "json"]

PAGE_FIELDS = frozenset(
    {
        *("messages", "model", "stream", "stream_options", "n", "best_of"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "return_token_sources"),
        *("add_generation_prompt", "continue_final_message", "use_beam_search", "beam_search"),
        *("length_penalty", "early_stopping", "functions", "function_call", "user", "safety_identifier"),
    }
)
"""Fields that are not in the form, because the page sets them itself or shows them in other views."""
_NO_BOUND = 2**31 - 1
"""A limit of the integer type, not of the field: not shown."""
_MOST_EXACT = 2**53
_FIRST = ("temperature", "top_p", "top_k", "min_p", "max_completion_tokens", "max_tokens", "seed", "stop")


@dataclass(frozen=True, slots=True)
class Field:
    """A request field as the form shows it."""

    name: str
    kind: Kind
    description: str = ""
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[Any, ...] = ()
    excludes: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    is_hint: bool = False
    """Whether the field is ignored, with a warning, where it does not apply."""

    @property
    def range(self) -> str:
        """The bounds in words; empty without any."""
        low = "" if (self.minimum or 0) <= -_NO_BOUND else _number(self.minimum)
        high = "" if (self.maximum or 0) >= _NO_BOUND else _number(self.maximum)
        if low and high:
            return f"{low} to {high}"
        return f"at least {low}" if low else f"at most {high}" if high else ""

    def has_in_range(self, value: float) -> bool:
        above = self.minimum is None or value >= self.minimum
        return above and (self.maximum is None or value <= self.maximum)

    def shows(self, value: Any) -> bool:
        """Whether a control of this kind can show the value. Browsers round integers above 2**53."""
        match self.kind:
            case "boolean":
                return isinstance(value, bool)
            case "choice":
                return value in self.choices
            case "integer" | "number":
                return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST_EXACT
            case "text":
                return isinstance(value, str)
            case "texts":
                return isinstance(value, list) and all(isinstance(line, str) for line in value)
            case _:
                return True

    def parse(self, text: str) -> Any:
        """Read what the user typed. Raises ValueError with a message for the user."""
        if self.kind == "texts":
            return [line for line in text.splitlines() if line]
        if self.kind != "json":
            return text
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(f"This is not valid JSON: {error}") from None

    def format(self, value: Any) -> str:
        """The text that `parse` reads as this value."""
        if self.kind == "texts" and isinstance(value, list):
            return "\n".join(str(line) for line in value)
        return msgspec.json.format(msgspec.json.encode(value)).decode() if self.kind == "json" else str(value)


def has_fields(descriptions: Fields, names: Iterable[str]) -> bool:
    """Whether the server supports all of these fields; without descriptions, whether OpenAI's API does."""
    if not descriptions:
        return _OPENAI_NAMES.issuperset(names)
    return all(name in descriptions and descriptions[name].is_known for name in names)


def known_names(descriptions: Fields) -> frozenset[str]:
    """The fields that the server supports, as far as it describes them."""
    return frozenset(name for name, one in descriptions.items() if one.is_known)


def fields_of(descriptions: Fields, also: Collection[str] = ()) -> dict[str, Field]:
    """The form's fields, the most common first; without descriptions, OpenAI's.

    `also` names hidden fields that the form must show nevertheless.
    """
    hidden = PAGE_FIELDS.difference(also)
    known = {name: one for name, one in descriptions.items() if one.is_known}
    found = {name: _field_of(name, one) for name, one in known.items() if name not in hidden} or OPENAI
    order = {name: at for at, name in enumerate(_FIRST)}
    return dict(sorted(found.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def conflicts(name: str, fields: Mapping[str, Field], chosen: Iterable[str]) -> list[str]:
    """The chosen fields that exclude this one."""
    excluded = fields[name].excludes if name in fields else ()
    return [other for other in chosen if other != name and other in excluded]


def _field_of(name: str, description: FieldDescription) -> Field:
    alternatives = description.values.alternatives
    one = alternatives[0] if len(alternatives) == 1 else Schema()
    return Field(
        name,
        _kind_of(one),
        description=description.description or "",
        default=description.default,
        minimum=one.exclusive_minimum if one.minimum is None else one.minimum,
        maximum=one.exclusive_maximum if one.maximum is None else one.maximum,
        choices=one.enum,
        excludes=description.excludes,
        requires=description.requires,
        is_hint=description.support == "hint",
    )


def _kind_of(schema: Schema) -> Kind:
    if schema.enum:
        return "choice"
    if schema.type == "array":
        return "texts" if schema.items == {"type": "string"} else "json"
    kinds: Mapping[Any, Kind] = {"boolean": "boolean", "integer": "integer", "number": "number", "string": "text"}
    return kinds.get(schema.type, "json")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


OPENAI: Mapping[str, Field] = {
    field.name: field
    for field in (
        Field("temperature", "number", "0 picks the most probable token.", 1, 0, 2),
        Field("top_p", "number", "Samples from the most probable tokens whose probabilities add up to this.", 1, 0, 1),
        Field("max_completion_tokens", "integer", "Maximum number of tokens in the answer.", minimum=1),
        Field("max_tokens", "integer", "Older name of max_completion_tokens.", minimum=1),
        Field("seed", "integer", "The same seed gives the same answer, if the server supports it."),
        Field("stop", "texts", "Stop sequences, one per line. The answer ends before the first one that appears."),
        Field("presence_penalty", "number", "Penalises tokens that have already appeared.", 0, -2, 2),
        Field("frequency_penalty", "number", "Penalises tokens by how often they have appeared.", 0, -2, 2),
        Field("reasoning_effort", "choice", "How much to reason first.", choices=("minimal", "low", "medium", "high")),
        Field("response_format", "json", 'For example {"type": "json_object"}.'),
        Field("tools", "json", "Tools that the model may call."),
        Field("tool_choice", "json", 'For example "auto".'),
    )
}
"""The form's fields for a server without /v1/capabilities."""
_OPENAI_NAMES = frozenset({*OPENAI, "n", "logprobs", "top_logprobs"})
