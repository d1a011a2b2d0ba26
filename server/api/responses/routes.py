"""The paths of responses."""

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.dialect import Dialect
from server.api.openai.pages import query_of
from server.api.openapi import GENERATION_ERRORS, documented_errors, streamed, takes
from server.api.responses import create, retrieve, store
from server.api.responses.background import resume
from server.api.responses.create import event_stream
from server.api.responses.following import Following
from server.api.responses.objects import Compaction, Deleted, InputTokens, ItemList, ResponseEvent, ResponseObject
from server.api.responses.queries import ItemsQuery, RetrieveQuery
from server.api.responses.schema import CompactResponse, CountInputTokens, CreateResponse
from server.api.responses.session import Session
from server.api.responses.stream import stream_error
from server.api.services import ServicesDep
from server.errors import UpgradeError
from server.http.handshake import is_handshake
from server.http.middleware import record_of
from server.http.responses import json_response

_ALL = "/v1/responses"
_ONE = "/v1/responses/{response_id}"
_STORED_ERRORS = documented_errors(400, 401, 404, 500)

router = APIRouter(tags=["OpenAI"])


@router.post(
    _ALL,
    response_model=ResponseObject,
    responses={200: streamed(ResponseEvent), **documented_errors(*GENERATION_ERRORS)},
    openapi_extra=takes(CreateResponse),
)
async def create_response(request: Request, services: ServicesDep) -> Response:
    """Answer a text or the items of a conversation."""
    return await create.respond(request, services)


@router.get(_ALL, responses=documented_errors(401, 426, 503))
async def open_websocket(request: Request, services: ServicesDep) -> Response:
    """Open a websocket for responses, each asked for by an event `response.create` with the fields of POST."""
    if not is_handshake(request):
        raise UpgradeError(
            "GET /v1/responses opens a websocket, and this request is no handshake for one, or was not passed on as "
            "one. POST is answered over plain HTTP."
        )
    services.info()  # or there would be nothing to ask it
    return Session(request, services.websockets)


@router.post(
    f"{_ALL}/input_tokens",
    response_model=InputTokens,
    responses=documented_errors(*GENERATION_ERRORS),
    openapi_extra=takes(CountInputTokens),
)
async def count_input_tokens(request: Request, services: ServicesDep) -> Response:
    """The tokens that an input has, after the chat template."""
    return await create.count_input(request, services)


@router.post(
    f"{_ALL}/compact",
    response_model=Compaction,
    responses=documented_errors(*GENERATION_ERRORS),
    openapi_extra=takes(CompactResponse),
)
async def compact_response(request: Request, services: ServicesDep) -> Response:
    """Have the model summarize a conversation, as an item with which it goes on."""
    return await create.compact(request, services)


@router.get(_ONE, response_model=ResponseObject, responses=_STORED_ERRORS)
async def retrieve_response(response_id: str, request: Request, services: ServicesDep) -> Response:
    """A stored response as it is now; with `stream`, the events of it, from `starting_after` on."""
    client = record_of(request).client
    asked = query_of(RetrieveQuery, request)
    if not asked.stream:
        return json_response(msgspec.json.encode(await retrieve.retrieve(response_id, client, services)))
    followed = await retrieve.followed(response_id, client, services)
    start = 0 if asked.starting_after is None else asked.starting_after + 1
    return event_stream(Following(followed, start), services, {})


@router.delete(_ONE, response_model=Deleted, responses=_STORED_ERRORS)
async def delete_response(response_id: str, request: Request, services: ServicesDep) -> Response:
    """Forget a stored response."""
    return json_response(msgspec.json.encode(await retrieve.delete(response_id, record_of(request).client, services)))


@router.post(f"{_ONE}/cancel", response_model=ResponseObject, responses=_STORED_ERRORS)
async def cancel_response(response_id: str, request: Request, services: ServicesDep) -> Response:
    """Make no more of a response in the background."""
    return json_response(msgspec.json.encode(await retrieve.cancel(response_id, record_of(request).client, services)))


@router.get(f"{_ONE}/input_items", response_model=ItemList, responses=_STORED_ERRORS)
async def list_input_items(response_id: str, request: Request, services: ServicesDep) -> Response:
    """The items of a response's own input, a page at a time."""
    client = record_of(request).client
    asked = query_of(ItemsQuery, request)
    page = await services.storage.run(lambda rows: store.input_page(rows, response_id, client, asked))
    return json_response(msgspec.json.encode(page))


DIALECT = Dialect(
    router,
    requests={
        _ALL: CreateResponse,
        f"{_ALL}/input_tokens": CountInputTokens,
        f"{_ALL}/compact": CompactResponse,
    },
    events={_ALL: ResponseEvent},
    stream_error=stream_error,
    websockets=(_ALL,),
    resume=resume,
)
