"""POST /invocations and /ping: SageMaker's API."""

from collections.abc import Collection, Sequence

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Raw

from server.api.body_worker import BodyContext
from server.api.dialect import Dialect, GenerationApi, PlannedRequest, plan_body
from server.api.endpoint import answer, named_model, when_loaded
from server.api.openai.routes import CHAT, COMPLETIONS
from server.api.openapi import GENERATION_ERRORS, answers, documented_errors, takes
from server.api.pooling.routes import (
    CLASSES,
    EMBEDDINGS,
    RERANK,
    SCORES,
    PoolingApi,
    answer_with_numbers,
    plan_pooling_body,
)
from server.api.probes import Status, ready
from server.api.services import ServicesDep
from server.errors import InvalidRequestError
from server.generation.abilities import Abilities
from server.http.json_body import parse_json

_APIS: Sequence[tuple[str, GenerationApi | PoolingApi]] = (
    ("messages", CHAT),
    ("prompt", COMPLETIONS),
    ("input", EMBEDDINGS),
    ("query", RERANK),
    ("queries", SCORES),
    ("text_1", SCORES),
    ("data_1", SCORES),
)
"""The first of these fields that a body has selects its API."""

_NULLS = (None, Raw(b"null"))
_READY = answers(Status, 503)

router = APIRouter(tags=["SageMaker"])


@router.post(
    "/invocations",
    response_model=None,
    responses=documented_errors(*GENERATION_ERRORS),
    openapi_extra=takes(*dict.fromkeys(api.schema for _, api in _APIS), CLASSES.schema),
)
async def invoke(request: Request, services: ServicesDep) -> Response:
    """A chat completion, a completion, embeddings, classes, a ranking or scores, depending on the body's fields."""
    asked = await named_model(request, services)

    async def work() -> Response:
        api, planned = await asked.run(plan_any_body)
        if isinstance(api, PoolingApi):
            return await answer_with_numbers(planned, asked)
        return await answer(api, planned, asked)

    return await when_loaded(asked.served, request, services, asked.body, work)


@router.get("/ping", responses=_READY)
async def ping(request: Request, services: ServicesDep) -> Response:
    """The same as GET /ready."""
    return await ready(request, services)


router.post("/ping", responses=_READY)(ping)


def plan_any_body(context: BodyContext, body: bytes) -> tuple[GenerationApi | PoolingApi, PlannedRequest]:
    """The API that a body's fields select, and the planned request. Raises ApiError and HeavyError."""
    api = _api_of(_fields_of(body), context.model.abilities)
    if isinstance(api, PoolingApi):
        return api, plan_pooling_body(context, body, api)
    return api, plan_body(context, body, api)


def _fields_of(body: bytes) -> Collection[str]:
    """Names of a body's fields that are not null. Raises InvalidRequestError if it is not JSON."""
    fields: object
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except (ValueError, RecursionError):
        fields = parse_json(body)
    return [name for name, value in fields.items() if value not in _NULLS] if isinstance(fields, dict) else ()


def _api_of(fields: Collection[str], abilities: Abilities) -> GenerationApi | PoolingApi:
    """The API for these fields. A model that does not generate embeds messages, and one with classes classifies inputs.

    Raises InvalidRequestError.
    """
    api = next((api for name, api in _APIS if name in fields), None)
    if api is None:
        names = ", ".join(f"'{name}'" for name, _ in _APIS)
        message = f"The body must be a JSON object with one of the fields {names}, which select the API."
        raise InvalidRequestError(message, code="missing_required_parameter")
    if api is EMBEDDINGS and abilities.classification is not None:
        return CLASSES
    return EMBEDDINGS if api is CHAT and not abilities.generates else api


DIALECT = Dialect(router)
