"""GET /v1/capabilities: every field of the API, as this server treats it for the loaded model."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from server.api.chat.schema import ChatCompletionRequest
from server.api.completions.schema import DEFAULT_MAX_TOKENS, CompletionRequest
from server.api.dialect import Dialect
from server.api.fields.rules import RequestModel, relations_of
from server.api.openapi import documented_errors
from server.api.services import ServicesDep
from server.generation.abilities import Embedding, Scoring
from server.generation.parsing.call_grammar import MAX_REQUIRED_CALLS
from server.generation.parsing.choose import REASONING_TAGS, TOOL_FORMATS
from server.generation.planning.limits import unasked_max_tokens
from server.generation.settings import DecodingSettings, facts_of

_API_DEFAULTS: Mapping[str, object] = {
    **{name: facts.default for name, facts in facts_of(DecodingSettings).items()},
    "n": 1,
    "stream": False,
    "priority": 0,
}

router = APIRouter()


class FieldCapability(BaseModel):
    """One field of a request."""

    support: Literal["honoured", "hint", "no_effect", "refused"] = Field(
        description="`hint`: left out where it means nothing here, and reported. `no_effect`: validated, cannot change "
        "the output. `refused`: only values that ask for nothing."
    )
    required: bool = Field(description="Whether a request must have it.")
    default: Any = Field(description="With the loaded model.")
    values: dict[str, Any] = Field(description="JSON schema of the accepted values, which include null for absent.")
    description: str | None = Field(description="What it does.")
    requires: list[str] = Field(description="Fields that must be on as well.")
    excludes: list[str] = Field(description="Fields that it cannot go together with.")


class SpeculationCapability(BaseModel):
    """How tokens can be guessed ahead."""

    methods: list[str] = Field(description="What `speculation.method` may name.")
    default: str = Field(description="The method of requests that do not say, or `off`.")
    max_num_tokens: int = Field(description="Draft tokens of one choice in a step at most, whatever a request names.")


class EmbeddingCapability(BaseModel):
    """What /v1/embeddings answers with."""

    trained: bool = Field(description="Whether the model was trained for that.")
    pooling: Literal["last", "mean"] = Field(description="Of which tokens' states a vector is made.")
    normalized: bool = Field(description="Whether its length is 1.")
    size: int = Field(description="Numbers in a vector.")
    dimensions: list[int] | None = Field(description="What `dimensions` may be, any if empty; null: only the size.")
    prompts: list[str] = Field(description="What `prompt_name` may be.")
    default_prompt: str | None = Field(description="What it is where nothing is said; null: none.")


class ScoringCapability(BaseModel):
    """What /v1/score and /v1/rerank answer with."""

    by: Literal["classes", "logits"] = Field(description="A classification head, or the tokens for yes and no.")
    probability: bool = Field(description="Whether scores are from 0 to 1.")


class Capabilities(BaseModel):
    """What this server can do with the loaded model."""

    model: str = Field(description="Its name in requests.")
    max_model_len: int = Field(description="Prompt and output together, in tokens.")
    max_choices: int = Field(description="Choices that one request may ask for, over all of its prompts.")
    vocab_size: int = Field(description="Token ids that the model has.")
    device: str = Field(description="Where the model runs.")
    dtype: str = Field(description="Type of the weights in products.")
    rows: str = Field(description="Type that the inputs of products are rounded to.")
    generates: bool = Field(description="Whether the model writes text.")
    embedding: EmbeddingCapability | None = Field(description="How it makes vectors of texts; null: it does not.")
    scoring: ScoringCapability | None = Field(description="How it scores pairs of texts; null: it does not.")
    chat: bool = Field(description="Whether the model has a chat template.")
    chat_template_variables: list[str] = Field(description="What `chat_template_kwargs` may set.")
    tool_format: str = Field(description="How the model writes calls of tools.")
    max_required_calls: int = Field(description="Calls in one answer with `tool_choice` `required`.")
    tool_formats: list[str] = Field(description="What the setting `tool_parser` may be.")
    reasoning: str | None = Field(description="The tags of the model's reasoning; null: it has none.")
    reasoning_tags: list[str] = Field(description="What the setting `reasoning_parser` may be, beside `none`.")
    logprobs: Literal["raw", "processed"] = Field(description="The setting of this name.")
    policy: str = Field(description="The setting of this name: `priority` makes the field of that name count.")
    speculation: SpeculationCapability
    aux_model: str | None = Field(description="The amateur of `contrastive`; null: this server has none.")
    dola_layers: int = Field(description="`dola.layers` may name layers below this number; 0: the model has no `dola`.")
    endpoints: dict[str, dict[str, FieldCapability]] = Field(description="By path and name, every field of a request.")


@router.get("/v1/capabilities", responses=documented_errors(401, 503))
async def capabilities(request: Request, services: ServicesDep) -> Capabilities:
    """Every field with its range, default and exclusions."""
    info = services.info()
    template = services.tokenizer.chat_template
    method = services.planner().speculation.of_silence
    of_model = services.model.defaults
    defaults = {**of_model.values, **({} if of_model.max_tokens is None else {"max_tokens": of_model.max_tokens})}
    defaults["unasked_max_tokens"] = unasked_max_tokens(info.max_model_len)
    defaults["speculation"] = method if method == "off" else {"method": method}
    return Capabilities(
        model=services.model.name,
        max_model_len=info.max_model_len,
        max_choices=info.max_num_seqs + services.settings.max_waiting,
        vocab_size=info.vocab_size,
        device=info.device,
        dtype=info.dtype,
        rows=info.rows,
        generates=services.model.abilities.generates,
        embedding=_embedding(services.model.abilities.embedding, info.hidden_size),
        scoring=_scoring(services.model.abilities.scoring),
        chat=template is not None,
        chat_template_variables=sorted(template.variables) if template is not None else [],
        tool_format=services.model.formats.tool_format,
        max_required_calls=MAX_REQUIRED_CALLS,
        tool_formats=sorted(TOOL_FORMATS),
        reasoning=services.model.formats.reasoning,
        reasoning_tags=sorted(REASONING_TAGS),
        logprobs=services.settings.logprobs,
        policy=services.settings.policy,
        speculation=SpeculationCapability(
            methods=list(info.speculation_methods),
            default=method,
            max_num_tokens=services.settings.num_draft_tokens,
        ),
        aux_model=services.model.aux_model,
        dola_layers=info.num_early_exits,
        endpoints={
            path: _without(describe_fields(body, defaults), services.planner().unsupported)
            for path, body in bodies_of(request.app.state.dialects).items()
        },
    )


def _embedding(form: Embedding | None, size: int) -> EmbeddingCapability | None:
    if form is None:
        return None
    return EmbeddingCapability(
        trained=form.is_trained,
        pooling=form.by,
        normalized=form.normalizes,
        size=size,
        dimensions=list(form.dimensions) if form.shortens else None,
        prompts=sorted(form.prompts),
        default_prompt=form.default_prompt,
    )


def _scoring(form: Scoring | None) -> ScoringCapability | None:
    return None if form is None else ScoringCapability(by=form.by, probability=form.is_probability)


def bodies_of(dialects: Sequence[Dialect]) -> Mapping[str, type[RequestModel]]:
    """What clients send, by path."""
    return {path: body for dialect in dialects for path, body in dialect.requests.items()}


def describe_fields(request: type[RequestModel], defaults: Mapping[str, object]) -> dict[str, FieldCapability]:
    """Each field of a request model, from its JSON schema. `defaults` are the model's and the server's own."""
    schema = request.model_json_schema()
    definitions = schema.get("$defs", {})
    required = schema.get("required", [])
    relations = relations_of(request)
    return {
        name: _describe(
            resolve(field, definitions),
            name in required,
            field["x-default"] if "x-default" in field else _default(request, name, defaults),
            [*relations[name].excludes, *(other for other, one in relations.items() if name in one.excludes)],
        )
        for name, field in schema["properties"].items()
    }


def _without(fields: dict[str, FieldCapability], unsupported: Collection[str]) -> dict[str, FieldCapability]:
    """The fields as a server treats them that has not what these need."""
    refused: dict[str, Any] = {"support": "refused"}
    return {name: field.model_copy(update=refused) if name in unsupported else field for name, field in fields.items()}


def _describe(field: dict[str, Any], required: bool, default: object, excludes: list[str]) -> FieldCapability:
    others = ("title", "description", "default", "examples")
    values = {key: value for key, value in field.items() if key not in others and not key.startswith("x-")}
    return FieldCapability(
        support=field.get("x-support", "honoured"),
        required=required,
        default=default,
        values=values,
        description=field.get("description"),
        requires=field.get("x-requires", []),
        excludes=excludes,
    )


def _default(request: type[RequestModel], name: str, defaults: Mapping[str, object]) -> object:
    if name in defaults:
        return defaults[name]
    if name == "max_tokens" and request is CompletionRequest:
        return DEFAULT_MAX_TOKENS
    of_chat = name == "max_tokens" and request is ChatCompletionRequest
    if of_chat or name in ("max_completion_tokens", "max_output_tokens"):
        return defaults.get("max_tokens", defaults.get("unasked_max_tokens"))
    default = _API_DEFAULTS.get(name)
    # Whole numbers as clients write them.
    return int(default) if isinstance(default, float) and default.is_integer() else default


def resolve(node: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema with its references written out."""
    if isinstance(node, dict):
        if "$ref" in node:
            own = {key: value for key, value in node.items() if key != "$ref"}
            return resolve({**definitions[node["$ref"].rpartition("/")[2]], **own}, definitions)
        return {key: resolve(value, definitions) for key, value in node.items()}
    if isinstance(node, list):
        return [resolve(item, definitions) for item in node]
    return node


DIALECT = Dialect(router)
