"""The parts of an API that generates: schema.py (the body, and the GenerationRequest that it asks for), answer.py (its
answer and its stream, made of events) and routes.py. All else is shared.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from server.api.body_worker import BodyContext
from server.api.fields.rules import RequestModel
from server.errors import InvalidRequestError
from server.generation.constraints.errors import ConstraintError
from server.generation.events import Event
from server.generation.planning.plan import Plan
from server.generation.request import GenerationRequest
from server.generation.result import WholeChoice
from server.generation.run import Run
from server.http.event_stream import Frames
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Answering:
    """What an answer is made of, beside its events."""

    run: Run
    tokenizer: Tokenizer
    fingerprint: str
    created: int
    """Unix time in seconds."""
    request_id: str


class Answer(Frames[Event], Protocol):
    """One answer in the form of its API, whole or as the frames of a stream."""

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """The body of an answer that is not streamed. Runs in a thread."""
        ...


def _nothing(body: object, plan: Plan, tokenizer: Tokenizer) -> None:
    """The options of an API that has none."""


@dataclass(frozen=True, slots=True)
class GenerationApi:
    """An API that generates. Consists of names that can be imported, so that another process can be told of it."""

    schema: type[RequestModel]
    intent: Callable[[Any], GenerationRequest]
    """What a body that has the schema asks for."""
    answer: Callable[[Answering, Any], Answer]
    """The answer; gets what `options` said of the body."""
    options: Callable[[Any, Plan, Tokenizer], Any] = _nothing
    """What the answer has to know of the body and the plan, where that takes time."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A request that was taken in."""

    plan: Plan
    options: Any
    """What its API has to remember of it for the answer."""


def take_in(context: BodyContext, body: bytes, api: GenerationApi) -> Taken:
    """The plan for the body of a request. Raises ApiError."""
    asked = context.validated(api.schema, body)
    with refused_constraints():
        plan = context.planner().plan(api.intent(asked))
    return Taken(plan, api.options(asked, plan, context.tokenizer))


@contextmanager
def refused_constraints() -> Iterator[None]:
    """Within it, a ConstraintError becomes the InvalidRequestError that a client is told."""
    try:
        yield
    except ConstraintError as error:
        message = f"Invalid '{error.path}': {error.reason}"
        raise InvalidRequestError(message, param=error.path, code="invalid_value") from error
