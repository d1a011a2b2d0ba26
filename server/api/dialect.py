"""The interface of an API: its routes and errors, and for an API that generates, its schema and answer.

An API that generates is a folder: schema.py (its body, and the conversion to a GenerationRequest), answer.py (the
response and its stream, made from events) and routes.py. All APIs share the rest.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import APIRouter

from server.api.body_worker import BodyContext
from server.api.fields.rules import RequestModel
from server.api.jobs import Work
from server.api.openai.errors import error_response, stream_error
from server.api.services import Services
from server.errors import InvalidRequestError
from server.generation.constraints.fragment import ConstraintError
from server.generation.events import Event
from server.generation.planning.plan import Plan
from server.generation.request import GenerationRequest
from server.generation.result import WholeChoice
from server.generation.run import Run
from server.http.event_stream import EVENT_STREAM, Frames
from server.http.responses import ErrorWriter, StreamErrorWriter
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API: its routes, and everything that shared code must know about them."""

    router: APIRouter
    errors: ErrorWriter = error_response
    """Makes the error responses of its paths."""
    stream_error: StreamErrorWriter = stream_error
    """Makes the frames that end a stream of its paths with an error."""
    requests: Mapping[str, type[RequestModel]] = field(default_factory=dict)
    """Request schemas by path, for capabilities and docs."""
    below: Sequence[str] = ()
    """Paths below which unknown paths get its errors, too."""
    websockets: Sequence[str] = ()
    """Paths that accept websockets."""
    resume: Callable[[Services], Awaitable[Work]] | None = None
    """Called before the server accepts requests. Returns the work that continues unfinished jobs of an earlier run."""


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """Everything that an answer needs in addition to its events."""

    run: Run
    tokenizer: Tokenizer
    fingerprint: str
    created: int
    """Unix time in seconds."""
    request_id: str


class Answer(Frames[Event], Protocol):
    """One answer in its API's format, whole or as the frames of a stream."""

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """The body of an answer that is not streamed. Runs in a thread."""
        ...


def _nothing(body: object, plan: Plan, tokenizer: Tokenizer) -> None:
    """The options of an API without options."""


@dataclass(frozen=True, slots=True)
class GenerationApi:
    """An API that generates. All of its parts can be imported by name, so that it can be sent to a worker process."""

    schema: type[RequestModel]
    intent: Callable[[Any], GenerationRequest]
    """Converts a valid body."""
    answer: Callable[[AnswerContext, Any], Answer]
    """Makes the answer from its context and the result of `options`."""
    options: Callable[[Any, Plan, Tokenizer], Any] = _nothing
    """Extracts what the answer needs from the body and the plan. Runs with the planning, off the event loop."""
    media_type: str = EVENT_STREAM
    """The content type of its streams."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request after validation and planning."""

    plan: Plan
    options: Any
    """The result of the API's `options`."""


def plan_body(context: BodyContext, body: bytes, api: GenerationApi) -> PlannedRequest:
    """Validate a body and plan its request. Raises ApiError."""
    asked = context.validated(api.schema, body)
    with refused_constraints():
        plan = context.planner().plan(api.intent(asked))
    return PlannedRequest(plan, api.options(asked, plan, context.tokenizer))


@contextmanager
def refused_constraints() -> Iterator[None]:
    """Context in which a ConstraintError becomes an InvalidRequestError."""
    try:
        yield
    except ConstraintError as error:
        message = f"Invalid '{error.path}': {error.reason}"
        raise InvalidRequestError(message, param=error.path, code="invalid_value") from error
