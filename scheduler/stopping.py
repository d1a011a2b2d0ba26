"""When a choice ends.

The context needs no rule of its own: a request whose prompt and max_tokens together exceed it is never taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.interface import FinishReason
from scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of sampled tokens: how many of them count, and whether the choice ends with them."""

    num_kept: int
    reason: FinishReason | None = None
    stop_token_id: int | None = None


_GOES_ON = Verdict(1)


def judge(request: Request, sampled: Sequence[int]) -> Verdict:
    """Decide over tokens that follow the request's own. A stop token is kept, and wins over the length limit.

    A choice that was complete before keeps none of them: max_tokens is 0, or it was resumed after its last token.
    """
    stops = request.sampling.stop_token_ids
    if request.num_output and request.tokens[-1] in stops:
        return Verdict(0, FinishReason.STOP, request.tokens[-1])
    room = request.max_tokens - request.num_output
    if len(sampled) == 1 < room and sampled[0] not in stops:
        return _GOES_ON
    for index, token in enumerate(sampled[:room]):
        if token in stops:
            return Verdict(index + 1, FinishReason.STOP, token)
    if len(sampled) >= room:
        return Verdict(room, FinishReason.LENGTH)
    return Verdict(len(sampled))
