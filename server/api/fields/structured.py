"""Structured output: the fields that ask for it, and the constraints that they ask for."""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from server.api.fields.rules import SUPPORTED_ONLY, RequestModel, hint, problem, refused, related, tag_by_type
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
"""Characters of an expression or a grammar; its cost is bounded elsewhere."""
FORMS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "grammar", "ebnf"),
)
"""Fields of which a request can have one."""
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
    """The one format that asks for nothing."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonObjectBySchema(JsonObjectFormat):
    """Any JSON object, or one by a schema, as llama.cpp and others have it."""

    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="A JSON schema; what of it cannot be enforced is reported."
    )


class NamedSchema(RequestModel):
    """A schema of OpenAI's response_format."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$", description="Your own name for it.")
    description: Annotated[str, Field(max_length=4096)] | None = hint(
        "What it is for, for the model.",
        "The model is not told of it.",
    )
    schema_: Schema | None = Field(None, alias="schema", description="A JSON schema; any JSON object without one.")
    strict: bool | None = Field(
        None, description="Refuse a schema that cannot be enforced as a whole; else what cannot be is reported."
    )


class JsonSchemaFormat(RequestModel):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuralTagFormat(RequestModel):
    """Free text in which some parts are held to a form."""

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = Field(None, description="The newer form.")
    structures: list[dict[str, Any]] | None = Field(None, description="The older form, with `triggers`.")
    triggers: list[str] | None = Field(None, description="Texts at which a structure begins.")


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectBySchema, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")]
    | Annotated[StructuralTagFormat, Tag("<structural_tag>")],
    Discriminator(tag_by_type("text")),
]


class StructuredOutputs(RequestModel):
    """vLLM's names: one of the kinds, and how JSON is written."""

    json_: SchemaOrText | None = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: str | None = Field(None, max_length=MAX_TEXT, description="An expression that all of the text fits.")
    choice: list[str] | None = Field(None, description="The strings of which the text is one.")
    grammar: str | None = Field(None, max_length=MAX_TEXT, description="A grammar in Lark or GBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    structural_tag: SchemaOrText | None = Field(None, description="As in response_format, or its text.")
    whitespace_pattern: str | None = Field(
        None, max_length=1024, description="What may stand between the tokens of JSON."
    )
    disable_any_whitespace: bool | None = Field(None, description="Nothing may.")
    disable_additional_properties: Annotated[Literal[False] | None, SUPPORTED_ONLY] = refused(
        "Say additionalProperties: false in the schema."
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


def _form(name: str, description: str, **limits: Any) -> Any:
    """The default of one of FORMS."""
    excludes = ["ignore_eos", *FORMS[FORMS.index(name) + 1 :]]
    return Field(None, description=description, json_schema_extra=related(excludes=excludes), **limits)


class StructuredFields(RequestModel):
    """Structured output by the names of OpenAI, vLLM, SGLang and llama.cpp, including old ones."""

    response_format: ResponseFormat | None = _form(
        "response_format", "Hold the answer to a form; any text by default.", examples=[{"type": "json_object"}]
    )
    structured_outputs: StructuredOutputs | None = _form("structured_outputs", "Hold the answer to a form.")
    guided_json: SchemaOrText | None = _form("guided_json", "Older name of structured_outputs.json.")
    guided_regex: str | None = _form("guided_regex", "Older name of structured_outputs.regex.", max_length=MAX_TEXT)
    guided_choice: list[str] | None = _form("guided_choice", "Older name of structured_outputs.choice.")
    guided_grammar: str | None = _form(
        "guided_grammar", "Older name of structured_outputs.grammar.", max_length=MAX_TEXT
    )
    json_schema: SchemaOrText | None = _form(
        "json_schema", "Name of structured_outputs.json in llama.cpp, and in SGLang as text."
    )
    regex: str | None = _form("regex", "SGLang's name of structured_outputs.regex.", max_length=MAX_TEXT)
    grammar: Annotated[str | None, AfterValidator(lambda text: text or None)] = _form(
        "grammar", "llama.cpp's name of structured_outputs.grammar; an empty one asks for nothing.", max_length=MAX_TEXT
    )
    ebnf: str | None = _form("ebnf", "SGLang's name of structured_outputs.grammar, in GBNF.", max_length=MAX_TEXT)

    @property
    def constrained_by(self) -> str | None:
        """The field that asks for a form."""
        return next((name for name in FORMS if not isinstance(getattr(self, name), TextFormat | None)), None)

    @property
    def constraint(self) -> Constraint | None:
        """What they ask for. Raises ConstraintError."""
        name = self.constrained_by
        return None if name is None else _CONSTRAINTS[name](getattr(self, name), name)

    def asks(self, name: str) -> bool:
        """See RequestModel."""
        return super().asks(name) and not (name == "response_format" and isinstance(self.response_format, TextFormat))


def _of_format(asked: JsonObjectBySchema | JsonSchemaFormat | StructuralTagFormat, path: str) -> Constraint:
    match asked:
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
    """The first rule shows which of the two languages it is in."""
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
"""By field: makes the constraint from its value and its name. May raise ConstraintError."""
