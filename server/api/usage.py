"""GET /v1/usage: what a key has used, by day and model."""

from datetime import date
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import Field

from server.api.dialect import Dialect
from server.api.openai.objects import ResponseModel
from server.api.openai.pages import Query, query_of
from server.api.openapi import documented_errors
from server.api.services import ServicesDep
from server.errors import InvalidRequestError
from server.http.middleware import record_of
from server.tenants.accounts import today


class UsageQuery(Query):
    """Query of GET /v1/usage."""

    start_date: date | None = Field(None, description="The first day, as YYYY-MM-DD; by default today.")
    end_date: date | None = Field(None, description="The last day; by default today.")


class UsageOfDay(ResponseModel):
    """Usage of one model on one day, in UTC."""

    object: Literal["usage"] = Field("usage", description="Always this.")
    date: str = Field(description="As YYYY-MM-DD.")
    model: str = Field(description="The model.")
    num_model_requests: int = Field(description="Requests that have ended and were computed at least in part.")
    input_tokens: int = Field(description="Tokens of their prompts.")
    input_cached_tokens: int = Field(description="Prompt tokens that were in the prefix cache.")
    output_tokens: int = Field(description="Tokens of their answers.")


class UsageList(ResponseModel):
    """Response schema for GET /v1/usage."""

    object: Literal["list"] = Field("list", description="Always this.")
    data: list[UsageOfDay] = Field(description="By day, then by model; days without usage are omitted.")


router = APIRouter(tags=["Usage"])


@router.get("/v1/usage", response_model=UsageList, responses=documented_errors(400, 401, 500))
async def usage(request: Request, services: ServicesDep) -> UsageList:
    """What the key has used, by day and model, in requests that have ended, failed ones included."""
    asked = query_of(UsageQuery, request)
    first, last = (today() if day is None else day.isoformat() for day in (asked.start_date, asked.end_date))
    if first > last:
        message = f"Invalid 'start_date': {first} is after the last day, {last}."
        raise InvalidRequestError(message, param="start_date", code="invalid_value")
    client = record_of(request).client
    await services.accounts.usage.written()
    found = await services.storage.on_usage(lambda table: table.of_client(client, first, last))
    return UsageList(
        data=[
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
    )


DIALECT = Dialect(router)
