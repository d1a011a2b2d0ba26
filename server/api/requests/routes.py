"""GET /v1/requests/{id}."""

from fastapi import APIRouter, Request

from server.api.dialect import Dialect
from server.api.openapi import documented_errors
from server.api.requests.objects import RequestObject
from server.api.requests.telling import object_of
from server.api.services import ServicesDep
from server.errors import NotFoundError, shorten
from server.http.middleware import record_of

router = APIRouter(tags=["Usage"])


@router.get("/v1/requests/{request_id}", response_model=RequestObject, responses=documented_errors(401, 404, 500))
async def explain(request_id: str, request: Request, services: ServicesDep) -> RequestObject:
    """What became of a request of this key, by its `x-request-id` or its answer's id: if it runs, or is of the last."""
    found = await services.timelines.find(record_of(request).client, request_id)
    if found is None:
        message = f"No such request, or it was too long ago: {shorten(request_id, 128)}"
        raise NotFoundError(message, param="id", code="not_found")
    return object_of(found)


DIALECT = Dialect(router)
