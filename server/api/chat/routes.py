"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from server.api.chat.answer import ChatAnswer
from server.api.chat.intent import chat_intent, chat_options
from server.api.chat.schema import ChatCompletionRequest
from server.api.dialect import Dialect
from server.api.endpoint import respond
from server.api.generation_api import GenerationApi
from server.api.openai.objects import ChatCompletion, ChatCompletionChunk
from server.api.openapi import GENERATION_ERRORS, documented_errors, streamed, takes
from server.api.services import ServicesDep

CHAT = GenerationApi(ChatCompletionRequest, chat_intent, ChatAnswer, chat_options)

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={200: streamed(ChatCompletionChunk), **documented_errors(*GENERATION_ERRORS)},
    openapi_extra=takes(ChatCompletionRequest),
    tags=["OpenAI"],
)
async def create_chat_completion(request: Request, services: ServicesDep) -> Response:
    """Answer a conversation."""
    return await respond(CHAT, request, services)


DIALECT = Dialect(
    router,
    requests={"/v1/chat/completions": ChatCompletionRequest},
    events={"/v1/chat/completions": ChatCompletionChunk},
)
