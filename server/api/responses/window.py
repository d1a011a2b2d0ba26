"""Conversations that are measured or compacted, instead of answered."""

import msgspec

from server.api.generation_api import refused_constraints
from server.api.intake import IntakeContext
from server.api.responses.intake import Occasion
from server.api.responses.intent import (
    Found,
    References,
    compact_intent,
    conversation_of,
    history_of,
    offer_of,
    paths_of,
    references_of,
    stored_of,
)
from server.api.responses.opaque import sealed
from server.api.responses.schema import CompactResponse, CountInputTokens
from server.api.responses.telling import make_usage
from server.api.responses.tools import tool_use
from server.errors import InvalidRequestError
from server.generation.events import Usage
from server.generation.notices import Notice, as_headers, as_warnings
from server.generation.planning.plan import Plan
from server.generation.request import GenerationRequest
from server.generation.result import WholeChoice


def count_tokens(
    context: IntakeContext, body: bytes, occasion: Occasion, found: Found | None = None
) -> tuple[bytes, dict[str, str]] | References:
    """The body of an answer with the tokens of the input, and its headers; or what the body names that is stored.

    Raises ApiError.
    """
    asked = context.validated(CountInputTokens, body)
    references = references_of(asked)
    if references and found is None:
        return references
    offer = offer_of(asked)
    history = history_of(asked, stored_of(found), offer)
    tool_use(offer, asked.tool_choice, is_parallel=asked.parallel_tool_calls is not False)
    request = GenerationRequest(
        model=asked.model,
        prompts=(conversation_of(history, asked, offer, {}),),
        paths=paths_of(history),
        notices=tuple(asked.left_out()),
    )
    num_tokens, notices = context.planner().count(request)
    answer = {"object": "response.input_tokens", "input_tokens": num_tokens, **as_warnings(notices)}
    return msgspec.json.encode(answer), as_headers(notices)


def take_in_compaction(
    context: IntakeContext, body: bytes, occasion: Occasion, found: Found | None = None
) -> Plan | References:
    """The plan for a summary of the conversation; or what the body names that is stored. Raises ApiError."""
    asked = context.validated(CompactResponse, body)
    references = references_of(asked)
    if references and found is None:
        return references
    with refused_constraints():
        return context.planner().plan(compact_intent(asked, stored_of(found), occasion.answer_id))


def compaction(plan: Plan, choice: WholeChoice, usage: Usage, created: int) -> tuple[bytes, dict[str, str]]:
    """The body of an answer with the conversation that the choice sums up, and its headers.

    Raises InvalidRequestError if it has no summary.
    """
    if not choice.text.strip():
        message = "Invalid 'input': the model came to no summary of it, perhaps for want of room in the context."
        raise InvalidRequestError(message, param="input", code="invalid_value")
    cut = [Notice("input", "Its summary was cut off where the context ends.")]
    notices = [*plan.notices, *(cut if choice.finish_reason == "length" else [])]
    suffix = plan.id.partition("_")[2]
    item = {"id": f"cmp_{suffix}", "type": "compaction", "encrypted_content": sealed(summary=choice.text)}
    answer = {
        "id": plan.id,
        "object": "response.compaction",
        "created_at": created,
        "output": [item],
        "usage": make_usage(usage),
        "seed": plan.seed,
        **as_warnings(notices),
    }
    return msgspec.json.encode(answer), as_headers(notices)
