"""GET /v1/usage."""

from fastapi import APIRouter, Request

from server.api.dialect import Dialect
from server.api.openai.pages import query_of
from server.api.openapi import documented_errors
from server.api.services import ServicesDep
from server.api.usage.objects import UsageList, UsageOfDay, UsageQuery
from server.errors import InvalidRequestError
from server.http.middleware import record_of
from server.storage.usage import UsageTable
from server.tenants.accounts import today

router = APIRouter(tags=["Usage"])


@router.get("/v1/usage", response_model=UsageList, responses=documented_errors(400, 401, 500))
async def usage(request: Request, services: ServicesDep) -> UsageList:
    """What the key has used, by day and model: of requests that have ended, also those that failed on the way."""
    asked = query_of(UsageQuery, request)
    first, last = (today() if day is None else day.isoformat() for day in (asked.start_date, asked.end_date))
    if first > last:
        message = f"Invalid 'start_date': {first} is after the last day, {last}."
        raise InvalidRequestError(message, param="start_date", code="invalid_value")
    client = record_of(request).client
    await services.accounts.usage.written()
    found = await services.storage.on(UsageTable, lambda table: table.of_client(client, first, last))
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
