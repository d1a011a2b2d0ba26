"""GET /v1/requests and /v1/requests/{id}."""

from fastapi import APIRouter, Request

from server.api.dialect import Dialect
from server.api.openai.pages import ListQuery, query_of, select
from server.api.openapi import documented_errors
from server.api.requests.objects import RequestList, RequestObject
from server.api.requests.telling import object_of
from server.api.services import ServicesDep
from server.errors import NotFoundError, shorten
from server.http.middleware import record_of
from server.telemetry.recent_requests import timeline_of

router = APIRouter(tags=["Usage"])


@router.get("/v1/requests", response_model=RequestList, responses=documented_errors(400, 401, 500))
async def last(request: Request, services: ServicesDep) -> RequestList:
    """The last requests of this key, a page at a time: what runs, and the last that have ended; no lines of batches."""
    asked = query_of(ListQuery, request)
    of_client = services.timelines.of_client(record_of(request).client)
    chosen, has_more = select(of_client, asked, lambda one: (one.request_id, one.answer_id))
    told = [object_of(timeline_of(one)) for one in chosen]
    return RequestList(
        data=told,
        first_id=told[0].id if told else None,
        last_id=told[-1].id if told else None,
        has_more=has_more,
    )


@router.get("/v1/requests/{request_id}", response_model=RequestObject, responses=documented_errors(401, 404, 500))
async def explain(request_id: str, request: Request, services: ServicesDep) -> RequestObject:
    """What became of a request of this key, by its `x-request-id` or its answer's id: if it runs, or is of the last."""
    found = await services.timelines.find(record_of(request).client, request_id)
    if found is None:
        message = f"No such request, or it was too long ago: {shorten(request_id, 128)}"
        raise NotFoundError(message, param="id", code="not_found")
    return object_of(found)


DIALECT = Dialect(router)
