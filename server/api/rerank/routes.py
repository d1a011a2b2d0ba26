"""POST /v1/rerank, and the same at /v2/rerank, where clients of Cohere look for it."""

from fastapi import APIRouter, Request, Response

from server.api.dialect import Dialect
from server.api.endpoint import respond_with_numbers
from server.api.openapi import GENERATION_ERRORS, documented_errors, takes
from server.api.pooling_api import PoolingApi
from server.api.rerank.answer import rerank_answer
from server.api.rerank.intent import rerank_intent, rerank_options
from server.api.rerank.schema import RankedText, Reranked, RerankRequest
from server.api.services import ServicesDep

RERANK = PoolingApi(RerankRequest, rerank_intent, rerank_answer, rerank_options)
PATHS = ("/v1/rerank", "/v2/rerank")

router = APIRouter(tags=["Scores"])


async def rerank(request: Request, services: ServicesDep) -> Response:
    """Documents by how well they answer a query, the best first."""
    return await respond_with_numbers(RERANK, request, services)


for path in PATHS:
    router.post(
        path,
        response_model=Reranked | list[RankedText],
        responses=documented_errors(*GENERATION_ERRORS),
        openapi_extra=takes(RerankRequest),
    )(rerank)


DIALECT = Dialect(router, requests=dict.fromkeys(PATHS, RerankRequest))
