"""POST /completion, /infill and /apply-template, GET /props and /slots."""

from fastapi import APIRouter, Request, Response

from server import __version__
from server.api.dialect import Dialect
from server.api.endpoint import from_body, respond
from server.api.generation_api import GenerationApi
from server.api.llama_cpp.answer import LlamaAnswer
from server.api.llama_cpp.errors import LlamaErrorBody, error_response, stream_error
from server.api.llama_cpp.fields import LlamaFields
from server.api.llama_cpp.intent import completion_intent, generation_settings, infill_intent, llama_options
from server.api.llama_cpp.objects import (
    AppliedTemplate,
    DefaultSettings,
    LlamaChunk,
    LlamaCompletion,
    LlamaModalities,
    LlamaProps,
    LlamaSlot,
)
from server.api.llama_cpp.schema import InfillRequest, LlamaCompletionRequest
from server.api.llama_cpp.slots import SlotsQuery, slots_of
from server.api.llama_cpp.template import ApplyTemplateRequest, apply_template
from server.api.openai.pages import query_of
from server.api.openapi import GENERATION_ERRORS, documented_errors, streamed, takes
from server.api.services import ServicesDep
from server.errors import UnavailableError
from server.http.middleware import record_of
from server.http.responses import json_response

COMPLETION = GenerationApi(LlamaCompletionRequest, completion_intent, LlamaAnswer, llama_options)
INFILL = GenerationApi(InfillRequest, infill_intent, LlamaAnswer, llama_options)

router = APIRouter(tags=["llama.cpp"])


@router.post(
    "/completion",
    response_model=LlamaCompletion,
    responses={200: streamed(LlamaChunk, end=""), **documented_errors(*GENERATION_ERRORS, body=LlamaErrorBody)},
    openapi_extra=takes(LlamaCompletionRequest),
)
async def completion(request: Request, services: ServicesDep) -> Response:
    """Continue one or several prompts, as llama.cpp does."""
    return await respond(COMPLETION, request, services)


@router.post(
    "/infill",
    response_model=LlamaCompletion,
    responses={200: streamed(LlamaChunk, end=""), **documented_errors(*GENERATION_ERRORS, body=LlamaErrorBody)},
    openapi_extra=takes(InfillRequest),
)
async def infill(request: Request, services: ServicesDep) -> Response:
    """Fill the gap between two texts, with a model that was trained for that."""
    return await respond(INFILL, request, services)


@router.post(
    "/apply-template",
    response_model=AppliedTemplate,
    responses=documented_errors(400, 401, 404, 413, 415, 429, 500, 503, body=LlamaErrorBody),
    openapi_extra=takes(ApplyTemplateRequest),
)
async def applied_template(request: Request, services: ServicesDep) -> Response:
    """The prompt that messages become by the model's chat template."""
    return json_response(*await from_body(request, services, apply_template))


@router.get("/props", response_model=LlamaProps, responses=documented_errors(401, 500, 503, body=LlamaErrorBody))
async def props(services: ServicesDep) -> LlamaProps:
    """What a client of llama.cpp asks about the server and its model."""
    info, tokenizer, name = services.info(), services.tokenizer, services.model.name
    special, template = tokenizer.special_tokens, tokenizer.chat_template
    return LlamaProps(
        default_generation_settings=DefaultSettings(
            params=dict(generation_settings(LlamaFields())), n_ctx=info.max_model_len
        ),
        total_slots=info.max_num_seqs,
        model_alias=name,
        model_path=name,
        modalities=LlamaModalities(),
        endpoint_slots=True,
        endpoint_props=False,
        endpoint_metrics=True,
        chat_template="" if template is None else template.source,
        bos_token=special.get("bos_token", ""),
        eos_token=special.get("eos_token", ""),
        build_info=f"samewise-{__version__}",
        is_sleeping=False,
    )


@router.get("/slots", response_model=list[LlamaSlot], responses=documented_errors(400, 401, 503, body=LlamaErrorBody))
async def slots(request: Request, services: ServicesDep) -> list[LlamaSlot]:
    """The completions of this key that run, as llama.cpp's slots; those of other keys are not told."""
    asked, info = query_of(SlotsQuery, request), services.info()
    stats = services.engine.stats
    if asked.fails and stats.num_running - stats.num_background_running >= info.max_num_seqs:
        raise UnavailableError(f"No slot is available: {info.max_num_seqs} completions are being computed.")
    running = services.timelines.of_client(record_of(request).client)
    return slots_of(running, info, is_speculative=services.planner().speculation.of_silence != "off")


DIALECT = Dialect(
    router,
    errors=error_response,
    stream_error=stream_error,
    requests={
        "/completion": LlamaCompletionRequest,
        "/infill": InfillRequest,
        "/apply-template": ApplyTemplateRequest,
    },
    events={"/completion": LlamaChunk, "/infill": LlamaChunk},
)
