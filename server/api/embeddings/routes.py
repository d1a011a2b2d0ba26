"""POST /v1/embeddings."""

from fastapi import APIRouter, Request, Response

from server.api.dialect import Dialect
from server.api.embeddings.answer import embedding_answer, is_base64
from server.api.embeddings.intent import embedding_intent
from server.api.embeddings.schema import EmbeddingList, EmbeddingRequest
from server.api.endpoint import respond_with_numbers
from server.api.openapi import GENERATION_ERRORS, documented_errors, takes
from server.api.pooling_api import PoolingApi
from server.api.services import ServicesDep

EMBEDDINGS = PoolingApi(EmbeddingRequest, embedding_intent, embedding_answer, is_base64)

router = APIRouter()


@router.post(
    "/v1/embeddings",
    response_model=EmbeddingList,
    responses=documented_errors(*GENERATION_ERRORS),
    openapi_extra=takes(EmbeddingRequest),
    tags=["OpenAI"],
)
async def create_embeddings(request: Request, services: ServicesDep) -> Response:
    """A vector of each text."""
    return await respond_with_numbers(EMBEDDINGS, request, services)


DIALECT = Dialect(router, requests={"/v1/embeddings": EmbeddingRequest})
