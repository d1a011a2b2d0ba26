"""POST /v1/score and /score."""

from fastapi import APIRouter, Request, Response

from server.api.dialect import Dialect
from server.api.endpoint import respond_with_numbers
from server.api.openapi import GENERATION_ERRORS, documented_errors, takes
from server.api.pooling_api import PoolingApi
from server.api.scores.answer import created, score_answer
from server.api.scores.intent import score_intent
from server.api.scores.schema import ScoreList, ScoreRequest
from server.api.services import ServicesDep

SCORES = PoolingApi(ScoreRequest, score_intent, score_answer, created)
PATHS = ("/v1/score", "/score")

router = APIRouter(tags=["Scores"])


async def create_scores(request: Request, services: ServicesDep) -> Response:
    """How well each document answers its query."""
    return await respond_with_numbers(SCORES, request, services)


for path in PATHS:
    router.post(
        path,
        response_model=ScoreList,
        responses=documented_errors(*GENERATION_ERRORS),
        openapi_extra=takes(ScoreRequest),
    )(create_scores)


DIALECT = Dialect(router, requests=dict.fromkeys(PATHS, ScoreRequest))
