"""POST /v1/score."""

from fastapi import APIRouter, Request, Response

from server.api.dialect import Dialect
from server.api.endpoint import respond_with_numbers
from server.api.openapi import GENERATION_ERRORS, documented_errors, takes
from server.api.pooling_api import PoolingApi
from server.api.scores.answer import score_answer, score_options
from server.api.scores.intent import score_intent
from server.api.scores.schema import ScoreList, ScoreRequest
from server.api.services import ServicesDep

SCORES = PoolingApi(ScoreRequest, score_intent, score_answer, score_options)

router = APIRouter(tags=["Scores"])


@router.post(
    "/v1/score",
    response_model=ScoreList,
    responses=documented_errors(*GENERATION_ERRORS),
    openapi_extra=takes(ScoreRequest),
)
async def create_scores(request: Request, services: ServicesDep) -> Response:
    """How well each document answers its query."""
    return await respond_with_numbers(SCORES, request, services)


DIALECT = Dialect(router, requests={"/v1/score": ScoreRequest})
