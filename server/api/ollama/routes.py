"""POST /api/chat, /api/generate, /api/embed and /api/embeddings, GET /, and the routes that change models."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from server.api.dialect import Dialect, GenerationApi
from server.api.endpoint import answer, model_request
from server.api.ollama.answer import OllamaAnswer, OllamaChatAnswer, OllamaGenerateAnswer, loaded_answer
from server.api.ollama.embeddings import (
    OllamaEmbedded,
    OllamaEmbedding,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    embed,
    embedded,
    embedding,
)
from server.api.ollama.errors import OllamaErrorBody, error_response, stream_error
from server.api.ollama.planning import LoadRequest, plan_ollama
from server.api.ollama.schema import OllamaChatRequest, OllamaGenerateRequest, chat_intent, generate_intent
from server.api.openapi import GENERATION_ERRORS, answers, documented_errors, takes
from server.api.services import Services, ServicesDep
from server.errors import NotImplementedHereError
from server.generation.notices import as_headers
from server.http.event_stream import NDJSON
from server.http.responses import json_response

CHAT = GenerationApi(OllamaChatRequest, chat_intent, OllamaAnswer, media_type=NDJSON)
GENERATE = GenerationApi(OllamaGenerateRequest, generate_intent, OllamaAnswer, media_type=NDJSON)
_ONE_MODEL = (
    "This server has one model, which `samewise serve MODEL` loads; it cannot add, change or remove models by its API. "
    "`samewise pull MODEL` downloads one."
)

router = APIRouter(tags=["Ollama"])


@router.get("/", response_class=PlainTextResponse, responses={200: {"description": "The text `Ollama is running`."}})
async def running() -> Response:
    """The text by which Ollama's clients find a server. Browsers are led to the page."""
    return PlainTextResponse("Ollama is running")


@router.post(
    "/api/chat",
    responses=answers(
        OllamaChatAnswer, *GENERATION_ERRORS, events=OllamaChatAnswer, stream=NDJSON, error_body=OllamaErrorBody
    ),
    openapi_extra=takes(OllamaChatRequest),
)
async def chat(request: Request, services: ServicesDep) -> Response:
    """Answer a conversation, as Ollama does."""
    return await _respond(CHAT, request, services)


@router.post(
    "/api/generate",
    responses=answers(
        OllamaGenerateAnswer, *GENERATION_ERRORS, events=OllamaGenerateAnswer, stream=NDJSON, error_body=OllamaErrorBody
    ),
    openapi_extra=takes(OllamaGenerateRequest),
)
async def generate(request: Request, services: ServicesDep) -> Response:
    """Answer a message, continue a text or fill a gap, as Ollama does."""
    return await _respond(GENERATE, request, services)


async def _respond(api: GenerationApi, request: Request, services: Services) -> Response:
    async with model_request(request, services) as asked:
        planned = await asked.run(plan_ollama, api)
        if isinstance(planned, LoadRequest):
            loaded = loaded_answer(planned.model, is_chat=api is CHAT, warnings=planned.notices)
            return json_response(loaded, as_headers(planned.notices))
        return await answer(api, planned, asked)


@router.post(
    "/api/embed",
    responses=answers(OllamaEmbedded, *GENERATION_ERRORS, error_body=OllamaErrorBody),
    openapi_extra=takes(OllamaEmbedRequest),
)
async def create_embeddings(request: Request, services: ServicesDep) -> Response:
    """Embed texts: a vector of length 1 for each."""
    return await embed(OllamaEmbedRequest, embedded, request, services)


@router.post(
    "/api/embeddings",
    responses=answers(OllamaEmbedding, *GENERATION_ERRORS, error_body=OllamaErrorBody),
    openapi_extra=takes(OllamaEmbeddingsRequest),
)
async def create_embedding(request: Request, services: ServicesDep) -> Response:
    """Embed one text: the older form of `/api/embed`."""
    return await embed(OllamaEmbeddingsRequest, embedding, request, services)


async def change_models() -> Response:
    """Refused: the server has one model, which is chosen at its start."""
    raise NotImplementedHereError(_ONE_MODEL, code="not_implemented")


CHANGES = {
    "/api/pull": "POST",
    "/api/create": "POST",
    "/api/copy": "POST",
    "/api/push": "POST",
    "/api/delete": "DELETE",
    "/api/blobs/{digest}": "POST",
}
"""Routes that change models, and their methods."""
for path, method in CHANGES.items():
    router.add_api_route(
        path, change_models, methods=[method], responses=documented_errors(401, 501, body=OllamaErrorBody)
    )


DIALECT = Dialect(
    router,
    errors=error_response,
    stream_error=stream_error,
    requests={
        "/api/chat": OllamaChatRequest,
        "/api/generate": OllamaGenerateRequest,
        "/api/embed": OllamaEmbedRequest,
        "/api/embeddings": OllamaEmbeddingsRequest,
    },
    below=("/api",),
)
