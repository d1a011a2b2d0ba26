"""POST /v1/messages and POST /v1/messages/count_tokens."""

from collections.abc import Mapping

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.dialect import Dialect
from server.api.endpoint import from_body, respond
from server.api.generation_api import GenerationApi, refused_constraints
from server.api.intake import IntakeContext
from server.api.messages.answer import MessagesAnswer
from server.api.messages.errors import OVERLOADED, MessagesErrorBody, error_response, stream_error
from server.api.messages.intent import message_options, messages_intent
from server.api.messages.objects import AnsweredMessage, MessageEvent, TokenCount
from server.api.messages.schema import CountTokensRequest, MessagesRequest
from server.api.openapi import documented_errors, streamed, takes
from server.api.services import ServicesDep
from server.generation.notices import as_headers, as_warnings
from server.http.responses import json_response

MESSAGES = GenerationApi(MessagesRequest, messages_intent, MessagesAnswer, message_options)
_ERRORS = (400, 401, 404, 413, 415, 500, 503)

router = APIRouter(tags=["Anthropic"])


@router.post(
    "/v1/messages",
    response_model=AnsweredMessage,
    responses={
        200: streamed(MessageEvent, end=""),
        **documented_errors(*_ERRORS, 429, 504, OVERLOADED, body=MessagesErrorBody),
    },
    openapi_extra=takes(MessagesRequest),
)
async def create_message(request: Request, services: ServicesDep) -> Response:
    """Answer a conversation, as Anthropic's API does."""
    return await respond(MESSAGES, request, services)


@router.post(
    "/v1/messages/count_tokens",
    response_model=TokenCount,
    responses=documented_errors(*_ERRORS, 429, body=MessagesErrorBody),
    openapi_extra=takes(CountTokensRequest),
)
async def count_tokens(request: Request, services: ServicesDep) -> Response:
    """The tokens of a conversation, as a message's prompt."""
    content, headers = await from_body(request, services, count_body)
    return json_response(content, headers)


def count_body(context: IntakeContext, body: bytes) -> tuple[bytes, Mapping[str, str]]:
    """A TokenCount for the body, and headers. Raises ApiError."""
    asked = context.validated(CountTokensRequest, body)
    with refused_constraints():
        count, notices = context.planner().count(messages_intent(asked))
    return msgspec.json.encode({"input_tokens": count, **as_warnings(notices)}), as_headers(notices)


DIALECT = Dialect(
    router,
    errors=error_response,
    stream_error=stream_error,
    requests={"/v1/messages": MessagesRequest, "/v1/messages/count_tokens": CountTokensRequest},
    events={"/v1/messages": MessageEvent},
)
