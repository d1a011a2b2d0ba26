"""POST /v1/completions."""

from fastapi import APIRouter, Request, Response

from server.api.completions.answer import CompletionAnswer
from server.api.completions.intent import completion_intent, completion_options
from server.api.completions.schema import CompletionRequest
from server.api.dialect import Dialect
from server.api.endpoint import respond
from server.api.generation_api import GenerationApi
from server.api.openai.objects import Completion
from server.api.openapi import GENERATION_ERRORS, documented_errors, streamed, takes
from server.api.services import ServicesDep

COMPLETIONS = GenerationApi(CompletionRequest, completion_intent, CompletionAnswer, completion_options)

router = APIRouter()


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses={200: streamed(Completion), **documented_errors(*GENERATION_ERRORS)},
    openapi_extra=takes(CompletionRequest),
    tags=["OpenAI"],
)
async def create_completion(request: Request, services: ServicesDep) -> Response:
    """Continue one or several prompts."""
    return await respond(COMPLETIONS, request, services)


DIALECT = Dialect(router, requests={"/v1/completions": CompletionRequest})
