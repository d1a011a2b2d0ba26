"""GET /v1/usage: the usage of a key by day and model."""

from collections.abc import Sequence
from datetime import date
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from server.api.answer_object import AnswerObject, doc
from server.api.dialect import Dialect
from server.api.openai.pages import Query, query_of
from server.api.openapi import answers
from server.api.services import ServicesDep
from server.errors import InvalidRequestError
from server.http.middleware import record_of
from server.http.responses import json_response
from server.storage.usage import UsageTable
from server.tenants.accounts import today


class UsageQuery(Query):
    """Query of GET /v1/usage."""

    start_date: date | None = Field(None, description="The first day, as YYYY-MM-DD; by default today.")
    end_date: date | None = Field(None, description="The last day; by default today.")


class UsageOfDay(AnswerObject):
    """Usage of one model on one day, in UTC."""

    object: Literal["usage"] = "usage"
    date: Annotated[str, doc("As YYYY-MM-DD.")]
    model: Annotated[str, doc("The model.")]
    num_model_requests: Annotated[int, doc("Requests that have ended and were computed at least in part.")]
    input_tokens: Annotated[int, doc("Tokens of their prompts.")]
    input_cached_tokens: Annotated[int, doc("Prompt tokens that were in the prefix cache.")]
    output_tokens: Annotated[int, doc("Tokens of their answers.")]


class UsageList(AnswerObject):
    """Response schema for GET /v1/usage."""

    object: Literal["list"] = "list"
    data: Annotated[Sequence[UsageOfDay], doc("By day, then by model; days without usage are omitted.")]


router = APIRouter(tags=["Usage"])


@router.get("/v1/usage", responses=answers(UsageList, 400, 401, 500))
async def usage(request: Request, services: ServicesDep) -> Response:
    """The key's usage by day and model, in requests that have ended. Failed requests are included."""
    asked = query_of(UsageQuery, request)
    first, last = (today() if day is None else day.isoformat() for day in (asked.start_date, asked.end_date))
    if first > last:
        message = f"Invalid 'start_date': {first} is after the last day, {last}."
        raise InvalidRequestError(message, param="start_date", code="invalid_value")
    client = record_of(request).client
    await services.accounts.usage.written()
    found = await services.storage.on(UsageTable, lambda table: table.of_client(client, first, last))
    days = [
        UsageOfDay(
            date=key.day,
            model=key.model,
            num_model_requests=used.requests,
            input_tokens=used.prompt_tokens,
            input_cached_tokens=used.cached_tokens,
            output_tokens=used.completion_tokens,
        )
        for key, used in found
    ]
    return json_response(UsageList(data=days))


DIALECT = Dialect(router)
