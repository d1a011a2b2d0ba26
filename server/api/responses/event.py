"""The event `response.create`, by which a client asks for a response over a websocket."""

import re
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, Field

from server.api.fields.rules import SUPPORTED_VALUES_ONLY, problem
from server.api.responses.schema import CreateResponse, ResponseStreamOptions

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")


def _check_stream_id(value: str) -> str:
    if _STREAM_ID.fullmatch(value) is None:
        message = "Invalid '{path}': it needs 1 to 256 characters, all of them letters, digits, '_', '-' or '.'."
        raise problem("invalid_stream_id", message)
    return value


class CreateEvent(CreateResponse):
    """The fields of POST /v1/responses, and those of the websocket."""

    type: Literal["response.create"]
    stream_id: Annotated[str, AfterValidator(_check_stream_id)] | None = Field(
        None,
        description="The lane: responses of one lane follow each other, others run side by side. Their events have it.",
    )
    generate: bool | None = Field(
        None, description="If false, the input is read and kept for a later turn, and there is no output."
    )
    stream: Annotated[Literal[True] | None, SUPPORTED_VALUES_ONLY] = Field(
        None, description="Every answer over a websocket is a stream."
    )
    background: Annotated[Literal[False] | None, SUPPORTED_VALUES_ONLY] = Field(
        None, description="Not over a websocket."
    )
    stream_options: ResponseStreamOptions | None = Field(None, description="How the stream is written.")


class _Routing(msgspec.Struct):
    """What of an event has to be known before it is read as a request."""

    stream_id: Any = None
    previous_response_id: Any = None


def lane_and_previous(event: bytes) -> tuple[str | None, str | None]:
    """The lane of an event, and the response that it continues; None where it names none, or nothing that can be.

    Whatever is wrong with the event is found when it is read as a request, in the lane without a name.
    """
    try:
        found = msgspec.json.decode(event, type=_Routing)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None, None
    lane, previous = found.stream_id, found.previous_response_id
    is_lane = isinstance(lane, str) and _STREAM_ID.fullmatch(lane) is not None
    return lane if is_lane else None, previous if isinstance(previous, str) else None
