"""Structured output: request fields, and their conversion to constraints."""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from server.api.fields.rules import (
    SUPPORTED_ONLY,
    RequestModel,
    hint,
    not_together,
    problem,
    refused,
    related,
    tag_by_type,
)
from server.generation.constraints.fragment import Constraint, ConstraintError, under
from server.generation.constraints.json_schema import (
    BOUNDED,
    COMPACT,
    JsonObject,
    JsonSchema,
    LooseJson,
    Whitespace,
    read_whitespace,
)
from server.generation.constraints.lark import Gbnf, Lark
from server.generation.constraints.structural_tag import StructuralTag
from server.generation.constraints.texts import OneOfStrings, Regex

MAX_TEXT = 1 << 20
"""The longest regular expression or grammar, in characters. Its cost is bounded elsewhere."""
CONSTRAINT_FIELDS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "grammar", "ebnf"),
)
"""Fields for structured output. A request can have one of them."""
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

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
    disable_additional_properties: Annotated[Literal[False] | None, SUPPORTED_ONLY] = refused(
        "Use `additionalProperties: false` in the schema instead."
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


def _constraint_field(name: str, description: str, **limits: Any) -> Any:
    """The default of one of CONSTRAINT_FIELDS."""
    excludes = ["ignore_eos", *CONSTRAINT_FIELDS[CONSTRAINT_FIELDS.index(name) + 1 :]]
    return Field(None, description=description, json_schema_extra=related(excludes=excludes), **limits)


class StructuredFields(RequestModel):
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

    @property
    def constrained_by(self) -> str | None:
        """The field that constrains the answer; None: none."""
        return next(
            (name for name in CONSTRAINT_FIELDS if not isinstance(getattr(self, name), TextFormat | None)), None
        )

    @property
    def constraint(self) -> Constraint | None:
        """The requested constraint; None: none. Raises ConstraintError."""
        name = self.constrained_by
        return None if name is None else _CONSTRAINTS[name](getattr(self, name), name)

    def asks(self, name: str) -> bool:

        return super().asks(name) and not (name == "response_format" and isinstance(self.response_format, TextFormat))


def _of_format(
    asked: JsonObjectBySchema | RegexFormat | JsonSchemaFormat | StructuralTagFormat, path: str
) -> Constraint:
    match asked:
        case JsonObjectBySchema(value=value) if value:
            return LooseJson.read(_read_json(value, f"{path}.value"), f"{path}.value")
        case RegexFormat(value=regex):
            return Regex(regex, f"{path}.value")
        case JsonObjectBySchema(schema_=schema):
            return LooseJson.read(schema, f"{path}.schema") if schema else JsonObject()
        case JsonSchemaFormat(json_schema=named):
            return constraint_of_schema(named, f"{path}.json_schema.schema")
        case StructuralTagFormat():
            return StructuralTag(asked.model_dump(exclude_none=True), path)


def constraint_of_schema(named: NamedSchema, path: str) -> Constraint:
    """The constraint of a schema at this path. Raises ConstraintError."""
    if named.schema_ is None:
        return JsonObject()
    return JsonSchema(named.schema_, path) if named.strict else LooseJson.read(named.schema_, path)


def _of_structured(asked: StructuredOutputs, path: str) -> Constraint:
    whitespace = _whitespace(asked, path)
    if asked.json_ is not None:
        return JsonSchema(_read_json(asked.json_, under(path, "json")), under(path, "json"), whitespace)
    if asked.regex is not None:
        return Regex(asked.regex, under(path, "regex"))
    if asked.choice is not None:
        return OneOfStrings(asked.choice, under(path, "choice"))
    if asked.grammar is not None:
        return _grammar(asked.grammar, under(path, "grammar"))
    if asked.structural_tag is not None:
        tag = under(path, "structural_tag")
        return StructuralTag(_read_json(asked.structural_tag, tag), tag)
    return JsonObject(whitespace)


def _whitespace(asked: StructuredOutputs, path: str) -> Whitespace:
    if asked.disable_any_whitespace:
        return COMPACT
    if asked.whitespace_pattern is None:
        return BOUNDED
    return read_whitespace(asked.whitespace_pattern, under(path, "whitespace_pattern"))


def _grammar(text: str, path: str) -> Constraint:
    """A GBNF grammar if its rules have `::=`, otherwise Lark."""
    return Gbnf(text, path) if "::=" in text else Lark(text, path)


def _schema(value: Mapping[str, Any] | str, path: str) -> Constraint:
    return JsonSchema(_read_json(value, path), path)


def _read_json(value: Mapping[str, Any] | str, path: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(path, f"The text is not JSON: {error}") from None


def _field_of(name: str) -> str:
    return "json_" if name == "json" else name


_CONSTRAINTS: Mapping[str, Callable[[Any, str], Constraint]] = {
    "response_format": _of_format,
    "structured_outputs": _of_structured,
    "guided_json": _schema,
    "guided_regex": Regex,
    "guided_choice": OneOfStrings,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": Regex,
    "grammar": _grammar,
    "ebnf": Gbnf,
}
"""Functions, by field, from the field's value and name to the constraint. They may raise ConstraintError."""
