"""POST /v1/embeddings, /embed, /v1/score, /v1/rerank and /v1/classify, and their shared handler."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from server.api.body_worker import BodyContext
from server.api.dialect import Dialect, PlannedRequest
from server.api.endpoint import ModelRequest, model_request, start_run
from server.api.fields.rules import RequestModel
from server.api.openapi import GENERATION_ERRORS, answers, takes
from server.api.pooling.answer import (
    Classified,
    EmbeddingList,
    Finished,
    RankedText,
    Reranked,
    ScoreList,
    classify_answer,
    embedding_answer,
    rerank_answer,
    score_answer,
    tei_embed_answer,
)
from server.api.pooling.intent import classify_intent, embedding_intent, rerank_intent, score_intent, tei_embed_intent
from server.api.pooling.schema import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TeiEmbedRequest,
)
from server.api.services import Services, ServicesDep
from server.generation.notices import as_headers
from server.generation.pooling import PoolingRequest
from server.generation.result import collect
from server.http.middleware import record_of
from server.http.responses import json_response, unless_gone


@dataclass(frozen=True, slots=True)
class PoolingApi:
    """An API whose answers are numbers. All parts can be imported by name, so it can be sent to a worker process."""

    schema: type[RequestModel]
    intent: Callable[[Any], PoolingRequest]
    """Converts a valid body."""
    answer: Callable[[Any], Finished]
    """Returns a picklable function that writes the answer to a body from its finished run."""


EMBEDDINGS = PoolingApi(EmbeddingRequest, embedding_intent, embedding_answer)
TEI_EMBEDDINGS = PoolingApi(TeiEmbedRequest, tei_embed_intent, tei_embed_answer)
SCORES = PoolingApi(ScoreRequest, score_intent, score_answer)
RERANK = PoolingApi(RerankRequest, rerank_intent, rerank_answer)
CLASSES = PoolingApi(ClassifyRequest, classify_intent, classify_answer)
_RERANK_PATHS = ("/v1/rerank", "/v2/rerank")
"""Cohere's clients use the second path."""

router = APIRouter()


@router.post(
    "/v1/embeddings",
    responses=answers(EmbeddingList, *GENERATION_ERRORS),
    openapi_extra=takes(EmbeddingRequest),
    tags=["OpenAI"],
)
async def create_embeddings(request: Request, services: ServicesDep) -> Response:
    """Embed texts: a vector for each."""
    return await _respond(EMBEDDINGS, request, services)


@router.post(
    "/embed",
    responses=answers(Sequence[Sequence[float]], *GENERATION_ERRORS),
    openapi_extra=takes(TeiEmbedRequest),
    tags=["Scores"],
)
async def create_tei_embeddings(request: Request, services: ServicesDep) -> Response:
    """Embed texts, as Text Embeddings Inference (TEI) does: an array of vectors."""
    return await _respond(TEI_EMBEDDINGS, request, services)


@router.post(
    "/v1/score",
    responses=answers(ScoreList, *GENERATION_ERRORS),
    openapi_extra=takes(ScoreRequest),
    tags=["Scores"],
)
async def create_scores(request: Request, services: ServicesDep) -> Response:
    """Score how well each document answers its query."""
    return await _respond(SCORES, request, services)


@router.post(
    "/v1/classify",
    responses=answers(Classified, *GENERATION_ERRORS),
    openapi_extra=takes(ClassifyRequest),
    tags=["Scores"],
)
async def create_classes(request: Request, services: ServicesDep) -> Response:
    """Classify texts: the probabilities of the model's classes for each."""
    return await _respond(CLASSES, request, services)


async def rerank(request: Request, services: ServicesDep) -> Response:
    """Rank documents by how well they answer a query, the best first."""
    return await _respond(RERANK, request, services)


for path in _RERANK_PATHS:
    router.post(
        path,
        responses=answers((Reranked, Sequence[RankedText]), *GENERATION_ERRORS),
        openapi_extra=takes(RerankRequest),
        tags=["Scores"],
    )(rerank)


async def _respond(api: PoolingApi, request: Request, services: Services) -> Response:
    async with model_request(request, services) as asked:
        return await answer_with_numbers(await asked.run(plan_pooling_body, api), asked)


def plan_pooling_body(context: BodyContext, body: bytes, api: PoolingApi) -> PlannedRequest:
    """Validate a body and plan its request. Raises ApiError and HeavyError."""
    asked = context.validated(api.schema, body)
    request = api.intent(asked)
    context.weigh(request.asks.num_bytes)
    return PlannedRequest(context.pooling().plan(request), api.answer(asked))


async def answer_with_numbers(planned: PlannedRequest, asked: ModelRequest) -> Response:
    """Run a planned request, and answer when all of its numbers are computed.

    Raises ApiError and ClientDisconnect.
    """
    run = await start_run(planned.plan, record_of(asked.http), asked.services, asked.served)
    try:
        await unless_gone(asked.http, collect(run))
    finally:
        run.close()
    content = await asyncio.to_thread(planned.options, run, asked.served.model)
    return json_response(content, as_headers(run.plan.notices))


DIALECT = Dialect(
    router,
    requests={
        "/v1/embeddings": EmbeddingRequest,
        "/embed": TeiEmbedRequest,
        "/v1/score": ScoreRequest,
        "/v1/classify": ClassifyRequest,
        **dict.fromkeys(_RERANK_PATHS, RerankRequest),
    },
)
