"""Sends the request of an answer once more, and asks for all that there is to know of its tokens."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.page.chat.answering import PATH, body_of
from server.page.conversation import Turn
from server.page.described import Fields
from server.page.inside.replayed import Replayed
from server.page.session import Session

_NUM_ALTERNATIVES = 5


def can_look_inside(session: Session, turn: Turn) -> bool:
    """Whether there is a request to send again, and the server tells of its tokens, for all that one knows."""
    has_text = bool(turn.content or turn.reasoning or turn.tool_calls)
    return has_text and turn.request is not None and session.has_field("logprobs")


async def replay(
    session: Session, messages: Sequence[Mapping[str, Any]], replayed: Replayed, on_more: Callable[[], None]
) -> None:
    """Fill `replayed`; `on_more` is called after each piece. An answer that broke off is had up to there.

    Raises ApiError; what came until then is kept.
    """
    body = body_of(replayed.turn, messages) | _wishes(session)

    async def stream(key: str) -> None:
        started = time.monotonic()
        async with session.api.stream(PATH, body, key) as chunks:
            async for chunk in chunks:
                replayed.add(chunk, time.monotonic() - started)
                on_more()
                if replayed.is_enough:
                    return

    await session.with_key(stream)


def _wishes(session: Session) -> dict[str, Any]:
    """The fields that tell of tokens, as far as the server has them."""
    wishes: dict[str, Any] = {"logprobs": True}
    if session.has_field("top_logprobs"):
        wishes["top_logprobs"] = _num_alternatives(session.fields)
    return wishes | {name: True for name in ("return_token_ids", "return_token_sources") if session.has_field(name)}


def _num_alternatives(described: Fields) -> int:
    alternatives = described["top_logprobs"].values.alternatives if described else []
    bounds = [int(one.maximum) for one in alternatives if one.maximum is not None]
    return min([_NUM_ALTERNATIVES, *bounds])
