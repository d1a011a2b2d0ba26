"""An API that the server speaks. A new one is a folder with such an object, and a line in server/api/dialects.py."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter
from pydantic import BaseModel

from server.api.fields.rules import RequestModel
from server.api.jobs import Work
from server.api.openai.errors import error_response, stream_error
from server.api.services import Services
from server.http.responses import ErrorWriter, StreamErrorWriter


@dataclass(frozen=True, slots=True)
class Dialect:
    """Its routes, and what has to be known of them elsewhere."""

    router: APIRouter
    errors: ErrorWriter = error_response
    """Answers with an error on its paths."""
    stream_error: StreamErrorWriter = stream_error
    """Ends a stream of its paths in the middle."""
    requests: Mapping[str, type[RequestModel]] = field(default_factory=dict)
    """By path, the bodies that clients send: for capabilities and docs."""
    events: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    """By path, the events of streams that are something else than the answer."""
    websockets: Sequence[str] = ()
    """Its paths that may become websockets."""
    resume: Callable[[Services], Awaitable[Work]] | None = None
    """Finds what the server has promised and not done, before it takes requests; what it returns takes that up."""
