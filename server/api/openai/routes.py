"""POST /v1/chat/completions and POST /v1/completions."""

from fastapi import APIRouter, Request, Response

from server.api.chat.answer import ChatAnswer, ChatCompletion, ChatCompletionChunk, chat_options
from server.api.chat.schema import ChatCompletionRequest, chat_intent
from server.api.completions.answer import Completion, CompletionAnswer, completion_options
from server.api.completions.schema import CompletionRequest, completion_intent
from server.api.dialect import Dialect, GenerationApi
from server.api.endpoint import respond
from server.api.openapi import GENERATION_ERRORS, answers, takes
from server.api.services import ServicesDep

CHAT = GenerationApi(ChatCompletionRequest, chat_intent, ChatAnswer, chat_options)
COMPLETIONS = GenerationApi(CompletionRequest, completion_intent, CompletionAnswer, completion_options)

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    responses=answers(ChatCompletion, *GENERATION_ERRORS, events=ChatCompletionChunk),
    openapi_extra=takes(ChatCompletionRequest),
)
async def create_chat_completion(request: Request, services: ServicesDep) -> Response:
    """Answer a conversation."""
    return await respond(CHAT, request, services)


@router.post(
    "/v1/completions",
    responses=answers(Completion, *GENERATION_ERRORS, events=Completion),
    openapi_extra=takes(CompletionRequest),
)
async def create_completion(request: Request, services: ServicesDep) -> Response:
    """Continue one or several prompts."""
    return await respond(COMPLETIONS, request, services)


DIALECT = Dialect(
    router, requests={"/v1/chat/completions": ChatCompletionRequest, "/v1/completions": CompletionRequest}
)
