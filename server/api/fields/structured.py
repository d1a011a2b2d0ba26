"""Structured output: request fields, and their conversion to constraints."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from server.api.fields.rules import RequestModel, hint, not_together, problem, related, tag_by_type
from server.generation.constraints.fragment import Constraint, ConstraintError, under
from server.generation.constraints.json_schema import (
    BOUNDED,
    JsonObject,
    JsonSchema,
    JsonStyle,
    read_whitespace,
)
from server.generation.constraints.lark import Gbnf, Lark
from server.generation.constraints.structural_tag import StructuralTag
from server.generation.constraints.texts import OneOfStrings, Regex
from server.generation.notices import Notice

MAX_TEXT = 1 << 20
"""The longest regular expression or grammar, in characters. Its cost is bounded elsewhere."""
CONSTRAINT_FIELDS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "grammar", "ebnf"),
)
"""Fields for structured output. A request can have one of them."""
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OF_JSON = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
_ONLY_JSON = "It applies to JSON, which this constraint does not contain."

Schema = Annotated[
    Annotated[dict[str, Any], Tag("<object>")] | Annotated[bool, Tag("<boolean>")],
    Discriminator(lambda value: "<boolean>" if isinstance(value, bool) else "<object>"),
]
SchemaOrText = Annotated[
    Annotated[dict[str, Any], Tag("<object>")] | Annotated[str, Tag("<string>")],
    Discriminator(lambda value: "<string>" if isinstance(value, str) else "<object>"),
]


class TextFormat(RequestModel):
    """Any text: the default."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonObjectBySchema(RequestModel):
    """Any JSON object, or JSON by a schema as in llama.cpp, or as in Text Generation Inference (TGI)."""

    type: Literal["json_object", "json"] = Field(description="`json` is TGI's name.")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="A JSON schema. Keywords that cannot be enforced are ignored and reported."
    )
    value: SchemaOrText | None = Field(None, description="TGI's name for `schema`, as an object or as text.")

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.schema_ is not None and self.value not in (None, self.schema_):
            raise not_together("value", "schema")
        return self


class RegexFormat(RequestModel):
    """Text that matches a regular expression, as in Text Generation Inference (TGI)."""

    type: Literal["regex"]
    value: str = Field(max_length=MAX_TEXT, description="A regular expression that the whole text matches.")


STRICT = "Refuse a schema that cannot be enforced completely. If off, keywords that cannot be enforced are reported."


class NamedSchema(RequestModel):
    """A named JSON schema of OpenAI's response_format."""

    name: str = Field(
        min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$", description="Your own name for the schema."
    )
    description: Annotated[str, Field(max_length=4096)] | None = hint(
        "The purpose of the schema, for the model.",
        "The description is not shown to the model.",
    )
    schema_: Schema | None = Field(None, alias="schema", description="A JSON schema; if omitted, any JSON object.")
    strict: bool | None = Field(None, description=STRICT)


class JsonSchemaFormat(RequestModel):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuralTagFormat(RequestModel):
    """Free text in which some parts are constrained."""

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = Field(None, description="The newer format.")
    structures: list[dict[str, Any]] | None = Field(None, description="The older format, with `triggers`.")
    triggers: list[str] | None = Field(None, description="Texts that begin a structure.")


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectBySchema, Tag("<json_object>")]
    | Annotated[JsonObjectBySchema, Tag("<json>")]
    | Annotated[RegexFormat, Tag("<regex>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")]
    | Annotated[StructuralTagFormat, Tag("<structural_tag>")],
    Discriminator(tag_by_type("text")),
]


class StructuredOutputs(RequestModel):
    """Structured output under vLLM's names: one kind of constraint, and the whitespace of JSON."""

    json_: SchemaOrText | None = Field(None, alias="json", description="A JSON schema, as an object or as text.")
    regex: str | None = Field(
        None, max_length=MAX_TEXT, description="A regular expression that the whole text matches."
    )
    choice: list[str] | None = Field(None, description="Texts, one of which is the answer.")
    grammar: str | None = Field(None, max_length=MAX_TEXT, description="A grammar in Lark or GBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    structural_tag: SchemaOrText | None = Field(None, description="As in response_format, as an object or as text.")
    whitespace_pattern: str | None = Field(
        None, max_length=1024, description="Regular expression of the whitespace between JSON tokens."
    )
    disable_any_whitespace: bool | None = Field(None, description="Allow no whitespace between JSON tokens.")
    disable_additional_properties: bool | None = Field(
        None, description="The opposite of `allow_additional_properties`, for this constraint."
    )

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        asked = [name for name in _KINDS if getattr(self, _field_of(name)) not in (None, False)]
        if len(asked) != 1:
            found = " and ".join(f"'{name}'" for name in asked) or "none"
            message = f"Invalid '{{path}}': expected one of {', '.join(_KINDS)}, but got {found}."
            raise problem("invalid_value", message)
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            message = "Setting 'whitespace_pattern' and 'disable_any_whitespace' at the same time is not supported."
            raise problem("invalid_parameter_combination", message, "whitespace_pattern")
        return self

    @property
    def kind(self) -> str:
        """The kind of the constraint: one of _KINDS."""
        return next(name for name in _KINDS if getattr(self, _field_of(name)) not in (None, False))

    def style(self, of_request: JsonStyle) -> JsonStyle:
        """How JSON is to be written, given the request's own fields. Raises ConstraintError."""
        style = of_request
        if self.disable_any_whitespace:
            style = replace(style, whitespace=None)
        if self.whitespace_pattern is not None:
            path = "structured_outputs.whitespace_pattern"
            style = replace(style, whitespace=read_whitespace(self.whitespace_pattern, path))
        if self.disable_additional_properties is not None:
            style = replace(style, is_open=not self.disable_additional_properties)
        return style

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield from super().ignored(path)
        if not _wish(path, self).writes_json:
            asking = (name for name in _OF_JSON if getattr(self, name) not in (None, False))
            yield from (Notice(f"{path}.{name}", _ONLY_JSON) for name in asking)


class GuidedFields(RequestModel):
    """vLLM's older field for structured output that goes with any constraint."""

    guided_whitespace_pattern: str | None = Field(
        None, max_length=1024, description="Older name for structured_outputs.whitespace_pattern."
    )

    @property
    def json_style(self) -> JsonStyle:
        """How JSON is to be written. Raises ConstraintError."""
        if self.guided_whitespace_pattern is None:
            return BOUNDED
        return JsonStyle(read_whitespace(self.guided_whitespace_pattern, "guided_whitespace_pattern"))

    @property
    def writes_json(self) -> bool:
        """Whether a constraint may be of JSON, so that whitespace matters."""
        raise NotImplementedError

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield from super().ignored(path)
        if self.guided_whitespace_pattern is not None and not self.writes_json:
            yield Notice("guided_whitespace_pattern", _ONLY_JSON)


def _constraint_field(name: str, description: str, **limits: Any) -> Any:
    """The default of one of CONSTRAINT_FIELDS."""
    excludes = ["ignore_eos", *CONSTRAINT_FIELDS[CONSTRAINT_FIELDS.index(name) + 1 :]]
    return Field(None, description=description, json_schema_extra=related(excludes=excludes), **limits)


class StructuredFields(GuidedFields):
    """Structured output under the names of OpenAI, vLLM, SGLang and llama.cpp, including old ones."""

    response_format: ResponseFormat | None = _constraint_field(
        "response_format", "Constrain the answer; any text by default.", examples=[{"type": "json_object"}]
    )
    structured_outputs: StructuredOutputs | None = _constraint_field("structured_outputs", "Constrain the answer.")
    guided_json: SchemaOrText | None = _constraint_field("guided_json", "Older name for structured_outputs.json.")
    guided_regex: str | None = _constraint_field(
        "guided_regex", "Older name for structured_outputs.regex.", max_length=MAX_TEXT
    )
    guided_choice: list[str] | None = _constraint_field("guided_choice", "Older name for structured_outputs.choice.")
    guided_grammar: str | None = _constraint_field(
        "guided_grammar", "Older name for structured_outputs.grammar.", max_length=MAX_TEXT
    )
    json_schema: SchemaOrText | None = _constraint_field(
        "json_schema", "Name for structured_outputs.json in llama.cpp, and in SGLang as text."
    )
    regex: str | None = _constraint_field("regex", "SGLang's name for structured_outputs.regex.", max_length=MAX_TEXT)
    grammar: Annotated[str | None, AfterValidator(lambda text: text or None)] = _constraint_field(
        "grammar", "llama.cpp's name for structured_outputs.grammar; no constraint if empty.", max_length=MAX_TEXT
    )
    ebnf: str | None = _constraint_field(
        "ebnf", "SGLang's name for structured_outputs.grammar, in GBNF.", max_length=MAX_TEXT
    )

    allow_additional_properties: bool | None = Field(
        None,
        description="Whether objects may have properties that their schema does not name, in the answer and in calls, "
        "where it does not set `additionalProperties`. By default they may not, and that is reported.",
    )

    @property
    def constrained_by(self) -> str | None:
        """The field that constrains the answer; None: none."""
        return next(
            (name for name in CONSTRAINT_FIELDS if not isinstance(getattr(self, name), TextFormat | None)), None
        )

    @model_validator(mode="after")
    def _check_whitespace(self) -> Self:
        asked, own = self.structured_outputs, self.guided_whitespace_pattern
        if own is None or asked is None:
            return self
        if asked.disable_any_whitespace or asked.whitespace_pattern not in (None, own):
            raise not_together("guided_whitespace_pattern", "structured_outputs")
        return self

    @property
    def json_style(self) -> JsonStyle:
        return replace(super().json_style, is_open=self.allow_additional_properties)

    @property
    def constraint(self) -> Constraint | None:
        """The requested constraint; None: none. Raises ConstraintError."""
        name = self.constrained_by
        if name is None:
            return None
        asked = self.structured_outputs
        is_structured = name == "structured_outputs" and asked is not None
        style = asked.style(self.json_style) if asked is not None and is_structured else self.json_style
        return _wish(name, getattr(self, name)).constraint(style)

    def asks(self, name: str) -> bool:
        return super().asks(name) and not (
            name in CONSTRAINT_FIELDS and (isinstance(getattr(self, name), TextFormat) or self._repeats(name))
        )

    @property
    def writes_json(self) -> bool:
        name = self.constrained_by
        if name not in CONSTRAINT_FIELDS:
            return name is not None
        return _wish(name, getattr(self, name)).writes_json

    def _repeats(self, name: str) -> bool:
        """Whether an earlier field asks for the same constraint."""
        earlier = self.constrained_by
        if earlier in (None, name) or earlier not in CONSTRAINT_FIELDS:
            return False
        return _wish(earlier, getattr(self, earlier)).key == _wish(name, getattr(self, name)).key


@dataclass(frozen=True, slots=True)
class _Wish:
    """A constraint that a field asks for."""

    kind: str
    """One of _KINDS, or `gbnf`."""
    value: Any
    path: str
    is_strict: bool = True

    @property
    def key(self) -> object:
        """The same for wishes of the same constraint."""
        if self.kind in {"json", "structural_tag"} and isinstance(self.value, str):
            try:
                return self.kind, json.loads(self.value)
            except (ValueError, RecursionError):
                return self.kind, self.value
        return "grammar" if self.kind == "gbnf" else self.kind, self.value

    @property
    def writes_json(self) -> bool:
        """Whether the answer may contain JSON."""
        is_lark = self.kind == "grammar" and "%json" in self.value and "::=" not in self.value
        return is_lark or self.kind in {"json", "json_object", "structural_tag"}

    def constraint(self, style: JsonStyle) -> Constraint:
        """The constraint. Raises ConstraintError."""
        match self.kind:
            case "json":
                return JsonSchema(_read_json(self.value, self.path), self.path, style, self.is_strict)
            case "regex":
                return Regex(self.value, self.path)
            case "choice":
                return OneOfStrings(self.value, self.path)
            case "structural_tag":
                return StructuralTag(_read_json(self.value, self.path), self.path, style)
            case "json_object":
                return JsonObject(style)
        is_gbnf = self.kind == "gbnf" or "::=" in self.value
        return Gbnf(self.value, self.path) if is_gbnf else Lark(self.value, self.path, style)


def _wish(name: str, value: Any) -> _Wish:
    """The wish of one of CONSTRAINT_FIELDS."""
    match value:
        case JsonObjectBySchema(value=of_tgi) if of_tgi:
            return _Wish("json", of_tgi, f"{name}.value", False)
        case RegexFormat(value=regex):
            return _Wish("regex", regex, f"{name}.value")
        case JsonObjectBySchema(schema_=schema):
            return _Wish("json", schema, f"{name}.schema", False) if schema else _Wish("json_object", None, name)
        case JsonSchemaFormat(json_schema=named):
            is_any = named.schema_ is None
            kind, path = "json_object" if is_any else "json", f"{name}.json_schema.schema"
            return _Wish(kind, named.schema_, path, bool(named.strict))
        case StructuralTagFormat():
            return _Wish("structural_tag", value.model_dump(exclude_none=True), name)
        case StructuredOutputs(kind=kind):
            asked = None if kind == "json_object" else getattr(value, _field_of(kind))
            return _Wish(kind, asked, under(name, kind))
    return _Wish(_KIND_OF[name], value, name)


def constraint_of_schema(named: NamedSchema, path: str, style: JsonStyle) -> Constraint:
    """The constraint of a schema at this path."""
    return JsonObject(style) if named.schema_ is None else JsonSchema(named.schema_, path, style, bool(named.strict))


def _read_json(value: Mapping[str, Any] | str, path: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(path, f"The text is not JSON: {error}") from None


def _field_of(name: str) -> str:
    return "json_" if name == "json" else name


_KIND_OF: Mapping[str, str] = {
    **dict.fromkeys(("guided_json", "json_schema"), "json"),
    **dict.fromkeys(("guided_regex", "regex"), "regex"),
    "guided_choice": "choice",
    **dict.fromkeys(("guided_grammar", "grammar"), "grammar"),
    "ebnf": "gbnf",
}
"""The kind of constraint of each field that has only one kind."""
