"""POST /v1/messages and POST /v1/messages/count_tokens."""

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from server.api.body_worker import BodyContext
from server.api.dialect import Dialect, GenerationApi, refused_constraints
from server.api.endpoint import respond, tokens_of_body
from server.api.messages.answer import AnsweredMessage, MessageEvent, MessagesAnswer, TokenCount, message_options
from server.api.messages.errors import OVERLOADED, MessagesErrorBody, error_response, stream_error
from server.api.messages.schema import CountTokensRequest, MessagesRequest, messages_intent
from server.api.openapi import answers, takes
from server.api.services import ServicesDep
from server.generation.notices import as_headers
from server.http.responses import json_response

MESSAGES = GenerationApi(MessagesRequest, messages_intent, MessagesAnswer, message_options)
_ERRORS = (400, 401, 404, 413, 415, 500, 503)

router = APIRouter(tags=["Anthropic"])


@router.post(
    "/v1/messages",
    responses=answers(
        AnsweredMessage, *_ERRORS, 429, 504, OVERLOADED, events=MessageEvent, end="", error_body=MessagesErrorBody
    ),
    openapi_extra=takes(MessagesRequest),
)
async def create_message(request: Request, services: ServicesDep) -> Response:
    """Answer a conversation, as Anthropic's API does."""
    return await respond(MESSAGES, request, services)


@router.post(
    "/v1/messages/count_tokens",
    responses=answers(TokenCount, *_ERRORS, 429, error_body=MessagesErrorBody),
    openapi_extra=takes(CountTokensRequest),
)
async def count_tokens(request: Request, services: ServicesDep) -> Response:
    """Count the tokens of a conversation, as a prompt of POST /v1/messages."""
    count, headers = await tokens_of_body(request, services, count_body)
    return json_response(count, headers)


def count_body(context: BodyContext, body: bytes) -> tuple[TokenCount, Mapping[str, str]]:
    """The token count of a body, and the answer's headers. Raises ApiError."""
    asked = context.validated(CountTokensRequest, body)
    with refused_constraints():
        count, notices = context.planner().count(messages_intent(asked))
    return TokenCount(input_tokens=count, warnings=notices or UNSET), as_headers(notices)


DIALECT = Dialect(
    router,
    errors=error_response,
    stream_error=stream_error,
    requests={"/v1/messages": MessagesRequest, "/v1/messages/count_tokens": CountTokensRequest},
)
