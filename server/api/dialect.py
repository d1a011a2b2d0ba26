"""The interface of an API: its routes and errors, and the parts of one that generates.

An API that generates is a folder: schema.py (its body, and the GenerationRequest that it asks for), answer.py (events
to answer and stream) and routes.py. All APIs share the rest.
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
from server.http.event_stream import Frames
from server.http.responses import ErrorWriter, StreamErrorWriter
from server.text.tokenizer import Tokenizer


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
    websockets: Sequence[str] = ()
    """Its paths that may become websockets."""
    resume: Callable[[Services], Awaitable[Work]] | None = None
    """Finds what the server has promised and not done, before it takes requests; what it returns takes that up."""


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """The parts of an answer other than its events."""

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
    """An API that generates, made of names that can be imported, so that a worker process can be sent it."""

    schema: type[RequestModel]
    intent: Callable[[Any], GenerationRequest]
    """The request that a valid body asks for."""
    answer: Callable[[AnswerContext, Any], Answer]
    """Makes the answer; the second argument is the result of `options`."""
    options: Callable[[Any, Plan, Tokenizer], Any] = _nothing
    """What the answer needs to know of the body and the plan. Computed with the plan, off the event loop."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request after validation and planning."""

    plan: Plan
    options: Any
    """What its API needs to know of the request for the answer."""


def take_in(context: BodyContext, body: bytes, api: GenerationApi) -> PlannedRequest:
    """Validate and plan a request. Raises ApiError."""
    asked = context.validated(api.schema, body)
    with refused_constraints():
        plan = context.planner().plan(api.intent(asked))
    return PlannedRequest(plan, api.options(asked, plan, context.tokenizer))


@contextmanager
def refused_constraints() -> Iterator[None]:
    """While it runs, a ConstraintError is raised as InvalidRequestError."""
    try:
        yield
    except ConstraintError as error:
        message = f"Invalid '{error.path}': {error.reason}"
        raise InvalidRequestError(message, param=error.path, code="invalid_value") from error
