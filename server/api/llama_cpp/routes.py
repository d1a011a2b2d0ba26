"""POST /completion, /infill and /apply-template, GET /props and /slots."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from pydantic import Field

from model_runner.runner_interface import RunnerInfo
from server import __version__
from server.api.answer_object import AnswerObject, TemplateDate, Warnings, doc
from server.api.body_worker import BodyContext
from server.api.dialect import Dialect, GenerationApi
from server.api.endpoint import respond, tokens_of_body
from server.api.fields.messages import Message, for_template
from server.api.fields.rules import RequestModel, related
from server.api.fields.tools import ToolFields
from server.api.llama_cpp.answer import LlamaAnswer, LlamaChunk, LlamaCompletion
from server.api.llama_cpp.errors import LlamaErrorBody, error_response, stream_error
from server.api.llama_cpp.intent import completion_intent, generation_settings, infill_intent, llama_options
from server.api.llama_cpp.schema import InfillRequest, LlamaCompletionRequest, LlamaFields
from server.api.openai.pages import Query, query_of
from server.api.openapi import GENERATION_ERRORS, answers, takes
from server.api.services import OF_MODEL, ModelDep, ServicesDep
from server.errors import InvalidRequestError, UnavailableError
from server.generation.notices import as_headers, to_report
from server.generation.request import Conversation
from server.http.middleware import record_of
from server.http.responses import json_response
from server.models.residence import Standing
from server.telemetry.recent_requests import Traced, timeline_of
from server.telemetry.timeline import RequestTimeline

COMPLETION = GenerationApi(LlamaCompletionRequest, completion_intent, LlamaAnswer, llama_options)
INFILL = GenerationApi(InfillRequest, infill_intent, LlamaAnswer, llama_options)
_Chosen = Mapping[str, Any]
"""The answer with `response_fields`: some properties of a LlamaCompletion."""
_FORMS = (LlamaCompletion, Sequence[LlamaCompletion], _Chosen, Sequence[_Chosen])
_GENERATED = answers(_FORMS, *GENERATION_ERRORS, events=LlamaChunk, end="", error_body=LlamaErrorBody)

router = APIRouter(tags=["llama.cpp"])


@router.post("/completion", responses=_GENERATED, openapi_extra=takes(LlamaCompletionRequest))
async def completion(request: Request, services: ServicesDep) -> Response:
    """Continue one or several prompts, as llama.cpp does."""
    return await respond(COMPLETION, request, services)


@router.post("/infill", responses=_GENERATED, openapi_extra=takes(InfillRequest))
async def infill(request: Request, services: ServicesDep) -> Response:
    """Fill the gap between two texts, with a model that was trained to fill in the middle."""
    return await respond(INFILL, request, services)


class ApplyTemplateRequest(ToolFields, RequestModel):
    """Request schema for POST /apply-template: the part of a chat completion that becomes its prompt."""

    model: str | None = Field(None, description="Name of the served model; optional.")
    messages: list[Message] = Field(min_length=1, fail_fast=True, description="The conversation, oldest first.")
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn; on by default.")
    continue_final_message: bool | None = Field(
        None, description="Leave the last message open.", json_schema_extra=related(excludes=["add_generation_prompt"])
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")


class AppliedTemplate(AnswerObject):
    """Response schema for POST /apply-template."""

    prompt: Annotated[
        str,
        doc("The messages as text, special tokens included, except those with which POST /completion begins a text."),
    ]
    template_date: TemplateDate = UNSET
    warnings: Warnings = UNSET


@router.post(
    "/apply-template",
    responses=answers(AppliedTemplate, 400, 401, 404, 413, 415, 429, 500, 503, error_body=LlamaErrorBody),
    openapi_extra=takes(ApplyTemplateRequest),
)
async def applied_template(request: Request, services: ServicesDep) -> Response:
    """Convert messages to a prompt with the model's chat template."""
    return json_response(*await tokens_of_body(request, services, apply_template))


def apply_template(context: BodyContext, body: bytes) -> tuple[bytes, Mapping[str, str]]:
    """The content and the headers of an AppliedTemplate. Raises ApiError."""
    asked = context.validated(ApplyTemplateRequest, body)
    if asked.model is not None:
        context.model.check_name(asked.model)
    messages, images = for_template(asked.messages)
    if images:
        message = f"Invalid '{images[0].path}': the text of a prompt does not show images."
        raise InvalidRequestError(message, param=images[0].path, code="unsupported_value")
    conversation = Conversation(
        messages=messages,
        tools=asked.shown_tools,
        may_call=asked.tool_use is not None,
        variables=asked.chat_template_kwargs or {},
        open_turn=asked.add_generation_prompt is not False and not asked.continue_final_message,
        continue_last=bool(asked.continue_final_message),
    )
    text, date, ignored = context.planner().rendered(conversation)
    notices = to_report([*asked.ignored(), *ignored], strict=context.settings.strict)
    answer = AppliedTemplate(prompt=text, template_date=date or UNSET, warnings=notices or UNSET)
    return msgspec.json.encode(answer), as_headers(notices)


class LlamaModalities(AnswerObject):
    """Kinds of input other than text."""

    vision: bool = False
    audio: bool = False


class DefaultSettings(AnswerObject):
    """Default settings of requests."""

    params: Annotated[Mapping[str, Any], doc("The settings, as in `generation_settings` of a completion.")]
    n_ctx: Annotated[int, doc("Prompt and output together, in tokens.")]


class LlamaProps(AnswerObject):
    """Response schema for GET /props."""

    default_generation_settings: DefaultSettings
    total_slots: Annotated[int, doc("The most completions that are computed at a time.")]
    model_alias: Annotated[str, doc("The model's name.")]
    model_path: Annotated[str, doc("Same as `model_alias`, because the server does not reveal paths.")]
    modalities: LlamaModalities
    endpoint_slots: Annotated[bool, doc("Whether there is GET /slots.")] = True
    endpoint_props: Annotated[bool, doc("Whether properties can be changed.")] = False
    endpoint_metrics: Annotated[bool, doc("Whether there is GET /metrics.")] = True
    chat_template: Annotated[str, doc("The Jinja source; empty if the model has none.")]
    chat_template_tool_use: Annotated[
        str | UnsetType, doc("The Jinja source for requests with tools; absent if `chat_template` takes them.")
    ] = UNSET
    bos_token: Annotated[str, doc("The token that begins a text; empty if there is none.")]
    eos_token: Annotated[str, doc("The token that ends a text; empty if there is none.")]
    build_info: Annotated[str, doc("The server's name and version.")]
    is_sleeping: Annotated[bool, doc("Whether the model is unloaded, and the next request loads it.")]


@router.get("/props", responses=answers(LlamaProps, 401, 404, 500, 503, error_body=LlamaErrorBody))
async def props(served: ModelDep) -> Response:
    """Properties of the server and a model, for llama.cpp's clients. 503 before the first load of the model."""
    info, tokenizer, name = served.described(), served.tokenizer, served.model.name
    special, template = tokenizer.special_tokens, tokenizer.chat_template
    answer = LlamaProps(
        default_generation_settings=DefaultSettings(
            params=generation_settings(LlamaFields()), n_ctx=info.max_model_len
        ),
        total_slots=info.max_num_seqs,
        model_alias=name,
        model_path=name,
        modalities=LlamaModalities(vision=served.planner().takes_images),
        chat_template="" if template is None else template.source,
        chat_template_tool_use=UNSET if template is None else template.sources.tool_use or UNSET,
        bos_token=special.get("bos_token", ""),
        eos_token=special.get("eos_token", ""),
        build_info=f"samewise-{__version__}",
        is_sleeping=served.residence.status.standing is Standing.UNLOADED,
    )
    return json_response(answer)


class SlotsQuery(Query):
    """Query of GET /slots."""

    fail_on_no_slot: Literal["0", "1", "true", "false"] = Field("0", description="Answer 503 when no slot is free.")

    @property
    def fails(self) -> bool:
        """Whether a server without a free slot answers with an error."""
        return self.fail_on_no_slot in ("1", "true")


class NextToken(AnswerObject):
    """Progress of a slot's request, over all of its completions."""

    has_next_token: Annotated[bool, doc("Whether the request is still generating.")]
    n_remain: Annotated[int, doc("The most tokens that may still be generated; -1 if nothing runs.")]
    n_decoded: Annotated[int, doc("Output tokens so far.")]


class LlamaSlot(AnswerObject):
    """A slot for a running completion."""

    id: Annotated[int, doc("Index of the slot; a completion may move to another one.")]
    id_task: Annotated[Literal[-1], doc("Always -1; `request_id` identifies the request.")] = -1
    request_id: Annotated[str | None, doc("Extension: the request's `x-request-id`, for GET /v1/requests.")]
    n_ctx: Annotated[int, doc("Prompt and output together, in tokens.")]
    speculative: Annotated[bool, doc("Whether the server speculates by default.")]
    is_processing: Annotated[bool, doc("Whether a completion of this key runs in it.")]
    next_token: NextToken


_IDLE = NextToken(has_next_token=False, n_remain=-1, n_decoded=0)


@router.get("/slots", responses=answers(Sequence[LlamaSlot], 400, 401, 404, 503, error_body=LlamaErrorBody))
async def slots(request: Request, served: ModelDep) -> Response:
    """Running completions of the key, as llama.cpp's slots; completions of other keys are not shown. A model that is
    not loaded has empty slots; 503 before its first load.
    """
    asked, info = query_of(SlotsQuery, request, but=OF_MODEL), served.described()
    stats = served.engine.stats
    if asked.fails and stats.num_running - stats.num_background_running >= info.max_num_seqs:
        raise UnavailableError(f"No slot is available: {info.max_num_seqs} completions are being computed.")
    running = served.timelines.of_client(record_of(request).client)
    return json_response(_slots(running, info, is_speculative=served.planner().speculation.default_method != "off"))


def _slots(followed: Sequence[Traced], info: RunnerInfo, *, is_speculative: bool) -> Sequence[LlamaSlot]:
    """A slot for each completion that may run at a time. The first ones have the running completions."""
    running = list(_running(followed))[: info.max_num_seqs]
    idle: Sequence[None] = [None] * (info.max_num_seqs - len(running))
    return [
        LlamaSlot(
            id=number,
            request_id=None if timeline is None else timeline.request_id,
            n_ctx=info.max_model_len,
            speculative=is_speculative,
            is_processing=timeline is not None,
            next_token=_IDLE if timeline is None else _next_token(timeline),
        )
        for number, timeline in enumerate([*running, *idle])
    ]


def _running(followed: Sequence[Traced]) -> Iterator[RequestTimeline]:
    """The timeline of each choice that has not ended."""
    for one in followed:
        timeline = timeline_of(one)
        if not timeline.has_ended:
            yield from (timeline for choice in timeline.choices if choice.finish_reason is None)


def _next_token(timeline: RequestTimeline) -> NextToken:
    decoded = timeline.output_tokens
    of_all = timeline.max_tokens * timeline.num_choices
    return NextToken(has_next_token=True, n_remain=max(0, of_all - decoded), n_decoded=decoded)


DIALECT = Dialect(
    router,
    errors=error_response,
    stream_error=stream_error,
    requests={
        "/completion": LlamaCompletionRequest,
        "/infill": InfillRequest,
        "/apply-template": ApplyTemplateRequest,
    },
)
