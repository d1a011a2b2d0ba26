"""GET /v1/capabilities: the abilities of the server and its model, and the treatment of each request field."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from model_runner.images.decoding import FORMATS, MAX_ASPECT
from server.api.answer_object import AnswerObject, doc
from server.api.chat.schema import ChatCompletionRequest
from server.api.completions.schema import DEFAULT_MAX_TOKENS, CompletionRequest
from server.api.dialect import Dialect
from server.api.fields.rules import RequestModel, relations_of
from server.api.model_services import ModelServices
from server.api.openapi import answers
from server.api.services import ModelDep
from server.config import Settings
from server.generation.abilities import Classification, Embedding, Scoring
from server.generation.parsing.call_grammar import MAX_REQUIRED_CALLS
from server.generation.parsing.choose import REASONING_TAGS, TOOL_FORMATS
from server.generation.planning.limits import implicit_max_tokens
from server.generation.settings import DecodingSettings, facts_of
from server.http.responses import json_response

_API_DEFAULTS: Mapping[str, object] = {
    **{name: facts.default for name, facts in facts_of(DecodingSettings).items()},
    "n": 1,
    "stream": False,
    "priority": 0,
}

router = APIRouter()


class FieldCapability(AnswerObject):
    """One field of a request."""

    support: Annotated[
        Literal["honoured", "hint", "no_effect", "refused"],
        doc(
            "`hint`: ignored if it does not apply, and reported. `no_effect`: validated, cannot change the output. "
            "`refused`: only values that ask for nothing are accepted."
        ),
    ]
    required: Annotated[bool, doc("Whether a request must have the field.")]
    default: Annotated[Any, doc("The field's default with this model.")]
    values: Annotated[Mapping[str, Any], doc("JSON schema of the accepted values; null is the same as no field.")]
    description: Annotated[str | None, doc("The field's description.")]
    requires: Annotated[Sequence[str], doc("Fields that must also be on.")]
    excludes: Annotated[Sequence[str], doc("Fields that the field cannot be combined with.")]


class SpeculationCapability(AnswerObject):
    """Speculation methods of the server."""

    methods: Annotated[Sequence[str], doc("Values of `speculation.method`.")]
    default: Annotated[str, doc("The method of requests that name none, or `off`.")]
    max_num_tokens: Annotated[int, doc("The most draft tokens per choice and step; requests cannot exceed it.")]


class EmbeddingCapability(AnswerObject):
    """How the model embeds texts."""

    trained: Annotated[bool, doc("Whether the model was trained for embeddings.")]
    pooling: Annotated[str, doc("How the hidden states of tokens make the vector, such as `last`, `mean` or `cls`.")]
    normalized: Annotated[bool, doc("Whether vectors have length 1.")]
    size: Annotated[int, doc("Numbers in a vector.")]
    dimensions: Annotated[
        Sequence[int] | None, doc("Values of `dimensions`; empty: any up to the size; null: only the size.")
    ]
    prompts: Annotated[Sequence[str], doc("Values of `prompt_name`.")]
    default_prompt: Annotated[str | None, doc("The default of `prompt_name`; null: none.")]
    similarity: Annotated[
        str | None, doc("The function that the model's files name to compare vectors, such as `cosine`; null: none.")
    ]


class ScoringCapability(AnswerObject):
    """How the model scores texts."""

    by: Annotated[Literal["classes", "logits"], doc("A classification head, or the tokens for yes and no.")]
    probability: Annotated[bool, doc("Whether scores are from 0 to 1.")]


class ClassificationCapability(AnswerObject):
    """How the model classifies texts."""

    labels: Annotated[Sequence[str], doc("Names of the classes.")]
    exclusive: Annotated[bool, doc("Whether a text has one class, so that probabilities add up to 1.")]


class ImageCapability(AnswerObject):
    """Images in prompts."""

    formats: Annotated[Sequence[str], doc("File formats that are read.")]
    max_images: Annotated[int, doc("The most images of one request.")]
    max_bytes: Annotated[int, doc("The largest file in bytes.")]
    max_pixels: Annotated[int, doc("The most pixels of an image, its width times its height.")]
    max_aspect: Annotated[int, doc("The longer side at most divided by the shorter one.")]
    low_detail: Annotated[bool, doc("Whether `detail` `low` shows an image in fewer tokens.")]
    url_hosts: Annotated[Sequence[str], doc("Hosts of https URLs that images are fetched from.")]


class Capabilities(AnswerObject):
    """Response schema for GET /v1/capabilities."""

    model: Annotated[str, doc("The model's name in requests.")]
    max_model_len: Annotated[int, doc("Prompt and output together, in tokens.")]
    max_choices: Annotated[int, doc("The most choices of one request, over all of its prompts.")]
    vocab_size: Annotated[int, doc("Number of the model's token ids.")]
    device: Annotated[str, doc("Where the model runs.")]
    dtype: Annotated[str, doc("Type of the weights in matrix products.")]
    rows: Annotated[str, doc("Type that the inputs of matrix products are rounded to.")]
    generates: Annotated[bool, doc("Whether the model generates text.")]
    embedding: Annotated[EmbeddingCapability | None, doc("How the model embeds texts; null: it does not.")]
    scoring: Annotated[ScoringCapability | None, doc("How the model scores texts; null: it does not.")]
    classification: Annotated[
        ClassificationCapability | None, doc("How the model classifies texts; null: it does not.")
    ]
    chat: Annotated[bool, doc("Whether the model has a chat template.")]
    images: Annotated[ImageCapability | None, doc("Images in conversations; null: the model takes none.")]
    chat_template_variables: Annotated[Sequence[str], doc("Keys of `chat_template_kwargs`.")]
    tool_format: Annotated[str, doc("The model's format of tool calls.")]
    max_required_calls: Annotated[int, doc("The most calls in one answer with `tool_choice` `required`.")]
    tool_formats: Annotated[Sequence[str], doc("Values of the setting `tool_parser`.")]
    reasoning: Annotated[str | None, doc("The tags of the model's reasoning; null: it has none.")]
    reasoning_tags: Annotated[Sequence[str], doc("Values of the setting `reasoning_parser`, with `none`.")]
    logprobs: Annotated[Literal["raw", "processed"], doc("The setting `logprobs`.")]
    policy: Annotated[str, doc("The setting `policy`; only with `priority` does the field `priority` have an effect.")]
    speculation: SpeculationCapability
    aux_model: Annotated[str | None, doc("The amateur model of `contrastive`; null: this server has none.")]
    dola_layers: Annotated[int, doc("`dola.layers` may name layers below this; 0: the model does not support `dola`.")]
    endpoints: Annotated[
        Mapping[str, Mapping[str, FieldCapability]], doc("All request fields, by path and field name.")
    ]


@router.get("/v1/capabilities", responses=answers(Capabilities, 401, 404, 503))
async def capabilities(request: Request, served: ModelDep) -> Response:
    """The abilities of the server with a model, and each field's range, default and exclusions. 503 before the first
    load of the model.
    """
    info = served.described()
    template = served.tokenizer.chat_template
    method = served.planner().speculation.default_method
    max_tokens = served.model.defaults.max_tokens
    most = implicit_max_tokens(info.max_model_len) if max_tokens is None else max_tokens
    defaults = {
        **served.model.defaults.values,
        **({} if max_tokens is None else {"max_tokens": max_tokens}),
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), most),
        "speculation": method if method == "off" else {"method": method},
    }
    answer = Capabilities(
        model=served.model.name,
        max_model_len=info.max_model_len,
        max_choices=info.max_num_seqs + served.settings.max_waiting,
        vocab_size=info.vocab_size,
        device=info.device,
        dtype=info.dtype,
        rows=info.activation_type,
        generates=served.model.abilities.generates,
        embedding=_embedding(served.model.abilities.embedding, info.hidden_size),
        scoring=_scoring(served.model.abilities.scoring),
        classification=_classification(served.model.abilities.classification),
        chat=template is not None,
        images=_images(served),
        chat_template_variables=[] if template is None else sorted(template.variables | template.with_tools.variables),
        tool_format=served.model.formats.tool_format,
        max_required_calls=MAX_REQUIRED_CALLS,
        tool_formats=sorted(TOOL_FORMATS),
        reasoning=served.model.formats.reasoning,
        reasoning_tags=sorted(REASONING_TAGS),
        logprobs=served.settings.logprobs,
        policy=served.settings.policy,
        speculation=SpeculationCapability(
            methods=list(info.speculation_methods),
            default=method,
            max_num_tokens=served.settings.num_draft_tokens,
        ),
        aux_model=served.model.aux_model,
        dola_layers=info.num_early_exits,
        endpoints={
            path: _mark_refused(describe_fields(body, defaults, served.settings), served.planner().unsupported)
            for path, body in bodies_of(request.app.state.dialects).items()
        },
    )
    return json_response(answer)


def _images(served: ModelServices) -> ImageCapability | None:
    settings, layout = served.settings, served.model.images
    if served.tokenizer.chat_template is None or layout is None or not served.planner().takes_images:
        return None
    return ImageCapability(
        formats=list(FORMATS),
        max_images=settings.max_images,
        max_bytes=int(settings.max_image_mib * (1 << 20)),
        max_pixels=int(settings.max_image_megapixels * 1_000_000),
        max_aspect=MAX_ASPECT,
        low_detail=layout.has_low,
        url_hosts=settings.image_hosts,
    )


def _embedding(form: Embedding | None, size: int) -> EmbeddingCapability | None:
    if form is None:
        return None
    return EmbeddingCapability(
        trained=form.is_trained,
        pooling=form.pooling or form.by,
        normalized=form.normalizes,
        size=size,
        dimensions=list(form.dimensions) if form.shortens else None,
        prompts=sorted(form.prompts),
        default_prompt=form.default_prompt,
        similarity=form.similarity,
    )


def _scoring(form: Scoring | None) -> ScoringCapability | None:
    return None if form is None else ScoringCapability(by=form.by, probability=form.is_probability)


def _classification(form: Classification | None) -> ClassificationCapability | None:
    if form is None:
        return None
    return ClassificationCapability(labels=list(form.labels), exclusive=form.are_exclusive)


def bodies_of(dialects: Sequence[Dialect]) -> Mapping[str, type[RequestModel]]:
    """Request schemas by path."""
    return {path: body for dialect in dialects for path, body in dialect.requests.items()}


def describe_fields(
    request: type[RequestModel], defaults: Mapping[str, object], settings: Settings
) -> dict[str, FieldCapability]:
    """Each field of a request model, from its JSON schema; `defaults` are the served model's and the server's."""
    schema = request.model_json_schema()
    definitions = schema.get("$defs", {})
    required = schema.get("required", [])
    relations = relations_of(request)
    return {
        name: _describe(
            _bounded(resolve(field, definitions), settings),
            name in required,
            field["x-default"] if "x-default" in field else _default(request, name, defaults),
            [*relations[name].excludes, *(other for other, one in relations.items() if name in one.excludes)],
        )
        for name, field in schema["properties"].items()
    }


def _bounded(schema: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """The schema of a field, with the highest value that a setting allows."""
    own = {key: value for key, value in schema.items() if key != "x-setting"}
    if "x-setting" in schema:
        own["maximum"] = getattr(settings, schema["x-setting"])
    if "anyOf" in schema:
        own["anyOf"] = [_bounded(one, settings) for one in schema["anyOf"]]
    return own


def _mark_refused(fields: dict[str, FieldCapability], unsupported: Collection[str]) -> dict[str, FieldCapability]:
    """The fields, marked as refused if the server lacks something that they need."""
    return {
        name: msgspec.structs.replace(field, support="refused") if name in unsupported else field
        for name, field in fields.items()
    }


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
    if name == "max_tokens" and request is ChatCompletionRequest:
        return defaults.get("max_completion_tokens")
    default = _API_DEFAULTS.get(name)
    return int(default) if isinstance(default, float) and default.is_integer() else default  # as clients write them


def resolve(node: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema with all references resolved."""
    if isinstance(node, dict):
        if "$ref" in node:
            own = {key: value for key, value in node.items() if key != "$ref"}
            return resolve({**definitions[node["$ref"].rpartition("/")[2]], **own}, definitions)
        return {key: resolve(value, definitions) for key, value in node.items()}
    if isinstance(node, list):
        return [resolve(item, definitions) for item in node]
    return node


DIALECT = Dialect(router)
