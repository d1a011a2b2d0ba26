"""What an API that answers with numbers made of texts has to say for itself: as generation_api.py, without a stream."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.api.fields.rules import RequestModel
from server.api.generation_api import Taken
from server.api.intake import IntakeContext
from server.generation.pooling import PoolingRequest
from server.generation.run import Run
from server.generation.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class PoolingApi:
    """Consists of names that can be imported, so that another process can be told of it."""

    schema: type[RequestModel]
    intent: Callable[[Any], PoolingRequest]
    """What a body that has the schema asks for."""
    answer: Callable[[Run, ServedModel, Any], bytes]
    """The body of the answer, when all prompts have their numbers; gets what `options` said. Runs in a thread."""
    options: Callable[[Any], Any]
    """What the answer has to know of the body."""


def take_in_pooling(context: IntakeContext, body: bytes, api: PoolingApi) -> Taken:
    """The plan for the body of a request. Raises ApiError and HeavyError."""
    asked = context.validated(api.schema, body)
    request = api.intent(asked)
    context.weigh(request.asks.num_bytes)
    return Taken(context.pooling().plan(request), api.options(asked))
