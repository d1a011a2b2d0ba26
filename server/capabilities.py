"""GET /v1/capabilities: every field of the API, as this server treats it for the loaded model."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from server.openai.completions import DEFAULT_MAX_TOKENS
from server.openai.protocol.chat import ChatCompletionRequest
from server.openai.protocol.completions import CompletionRequest
from server.openai.protocol.rules import RequestModel, exclusions
from server.openai.protocol.samplers import DRY_SEQUENCE_BREAKERS
from server.openai.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from server.responses import documented_errors
from server.services import ServicesDep

ENDPOINTS: Mapping[str, type[RequestModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_API_DEFAULTS: Mapping[str, object] = {
    "temperature": 1,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "typical_p": 1,
    "penalty_alpha": 0,
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "top_n_sigma": 0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "mirostat": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": list(DRY_SEQUENCE_BREAKERS),
    "sampler_order": "samewise",
    "n": 1,
    "stream": False,
    "skip_special_tokens": True,
    "min_tokens": 0,
    "priority": 0,
}

router = APIRouter()


class FieldCapability(BaseModel):
    """One field of a request."""

    support: Literal["honoured", "no_effect", "refused"] = Field(
        description="`no_effect`: validated, cannot change the output. `refused`: only values that ask for nothing."
    )
    required: bool
    default: Any = Field(description="With the loaded model.")
    values: dict[str, Any] = Field(description="JSON schema of the accepted values, which include null for absent.")
    description: str | None
    requires: list[str] = Field(description="Fields that must be on as well.")
    excludes: list[str] = Field(description="Fields that it cannot go together with.")


class SpeculationCapability(BaseModel):
    """How tokens can be guessed ahead."""

    methods: list[str] = Field(description="What `speculation.method` may name.")
    default: str = Field(description="The method of requests that do not say, or `off`.")
    max_num_tokens: int = Field(description="Draft tokens of one choice in a step at most, whatever a request names.")


class Capabilities(BaseModel):
    """What this server can do with the loaded model."""

    model: str
    max_model_len: int
    max_choices: int = Field(description="Choices that one request may ask for, over all of its prompts.")
    vocab_size: int
    device: str
    dtype: str
    chat: bool = Field(description="Whether the model has a chat template.")
    chat_template_variables: list[str] = Field(description="What `chat_template_kwargs` may set.")
    logprobs: Literal["raw", "processed"]
    policy: str
    speculation: SpeculationCapability
    aux_model: str | None = Field(description="The amateur of `contrastive`; null: this server has none.")
    dola_layers: int = Field(description="`dola.layers` may name layers below this number; 0: the model has no `dola`.")
    endpoints: dict[str, dict[str, FieldCapability]]


@router.get("/v1/capabilities", responses=documented_errors(401, 503))
async def capabilities(services: ServicesDep) -> Capabilities:
    """Every field with its range, default and exclusions."""
    info = services.info()
    template = services.tokenizer.chat_template
    method = services.planner().speculation.of_silence
    defaults: dict[str, object] = {
        name: value for name, value in asdict(services.model.defaults).items() if value is not None
    }
    defaults["speculation"] = method if method == "off" else {"method": method}
    return Capabilities(
        model=services.model.name,
        max_model_len=info.max_model_len,
        max_choices=info.max_num_seqs + services.settings.max_waiting,
        vocab_size=info.vocab_size,
        device=info.device,
        dtype=info.dtype,
        chat=template is not None,
        chat_template_variables=sorted(template.variables) if template is not None else [],
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
            path: _without(describe_fields(request, defaults), services.planner().scoring.unsupported)
            for path, request in ENDPOINTS.items()
        },
    )


def describe_fields(request: type[RequestModel], defaults: Mapping[str, object]) -> dict[str, FieldCapability]:
    """Each field of a request model, from its JSON schema. `defaults` are the model's and the server's own."""
    schema = request.model_json_schema()
    definitions = schema.get("$defs", {})
    required = schema.get("required", [])
    excluded = exclusions(request)
    return {
        name: _describe(
            _resolve(field, definitions),
            name in required,
            _default(request, name, defaults),
            [*excluded.get(name, ()), *(other for other, names in excluded.items() if name in names)],
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
    return _API_DEFAULTS.get(name)


def _resolve(node: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema with its references written out."""
    if isinstance(node, dict):
        if "$ref" in node:
            return _resolve(definitions[node["$ref"].rpartition("/")[2]], definitions)
        return {key: _resolve(value, definitions) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolve(item, definitions) for item in node]
    return node
