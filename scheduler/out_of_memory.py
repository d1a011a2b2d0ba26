"""Out of memory in a step of the runner: which choices make room, and how large the next steps may be.

Where blocks of the KV cache run out, nothing fails: Scheduler._continue preempts.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from model_runner.contract import Failure, StepPlan
from scheduler.groups import least_share
from scheduler.request import Request
from scheduler.waiting_queue import WaitingQueue

logger = logging.getLogger("samewise.scheduler")

OUT_OF_MEMORY: Final = Failure("the server ran out of memory although it computed nothing else")

_PATIENCE: Final = 256
"""Steps that go well before larger ones are tried again: one that fails is a step lost."""
_ADVICE: Final = "If this happens often, lower max_num_batched_tokens or kv_cache_gib."


@dataclass(frozen=True, slots=True)
class Retreat:
    """Who pays for a step that failed. Each is a choice, or the first of a group and stands for all of it."""

    preempted: Request | None = None
    """Goes back into the queue."""
    failed: Request | None = None
    """Cannot be computed: memory ran out although it was alone and the step as small as can be."""


class StepLimit:
    """The token budget of steps: as configured, but after a step that failed only half of what that one had.

    What a step takes beside weights and KV cache grows with its tokens. What took the memory may be gone later, such as
    another program or one very long request, so after `_PATIENCE` steps that went well the limit doubles.
    """

    def __init__(self, most: int, rank: Callable[[Request], tuple[int, ...]]) -> None:
        """`most` is what is configured, `rank` that of the waiting queue."""
        self._most = most
        self._rank = rank
        self._tokens = most
        self._num_passed = 0

    def budget(self, running: Mapping[str, Request], waiting: WaitingQueue) -> int:
        """Of the next step: never too small to bring the choice that is served first on."""
        leaders = (request for request in running.values() if request is request.members[0])
        if (first := next(leaders, None)) is not None:
            return max(self._tokens, least_share(first.members))
        return max(self._tokens, len(waiting.peek().members)) if waiting else self._tokens

    def note_success(self) -> None:
        """A step went well."""
        if self._tokens < self._most:
            self._num_passed += 1
            if self._num_passed == _PATIENCE:
                self._num_passed = 0
                self._tokens = min(2 * self._tokens, self._most)

    def retreat(self, plan: StepPlan, running: Mapping[str, Request], reason: str) -> Retreat:
        """Memory ran out in this step.

        Its largest choice or group gives up its place, unless it is the one that matters most: as where KV blocks run
        out, that one keeps what it has, so that work always completes. Every step that fails makes the next ones
        smaller or fails a choice, so the same step never fails twice.

        Args:
            plan: of the step; the drafts and candidates of its choices are lost, so that these are not planned again.
            running: the choices that still run, by key.
            reason: what the device or the host said.
        """
        sizes: Counter[str] = Counter()  # by the key of the choice, or of its group's first
        for share in plan.scheduled:
            if (request := running.get(share.key)) is not None:
                sizes[request.members[0].key] += share.num_rows
        num_tokens = sum(share.num_rows for share in plan.scheduled)
        retreat = self._choose(sizes, num_tokens, running)
        for share in plan.scheduled:
            if share.key in running:
                running[share.key].forget_offers()
        self._tokens = max(1, num_tokens // 2)
        self._num_passed = 0
        logger.warning(
            "Out of memory in a step of %d tokens for %s%s. Steps have at most %d tokens for now. %s %s",
            num_tokens,
            ", ".join(f"{key} ({size})" for key, size in sizes.most_common(8)) or "choices that are gone",
            _describe(retreat),
            self._tokens,
            _ADVICE,
            reason,
        )
        return retreat

    def _choose(self, sizes: Counter[str], num_tokens: int, running: Mapping[str, Request]) -> Retreat:
        leaders = [running[key] for key in sizes]
        if len(leaders) == 1 and num_tokens == sizes[leaders[0].key]:
            is_least = num_tokens <= least_share(leaders[0].members)
            return Retreat(failed=leaders[0]) if is_least else Retreat()
        first = min(leaders, key=self._rank, default=None)
        largest = max(leaders, key=lambda leader: sizes[leader.key], default=None)
        return Retreat() if largest is first else Retreat(preempted=largest)


def _describe(retreat: Retreat) -> str:
    if retreat.failed is not None:
        return f"; {retreat.failed.key}, which needs them all at once, fails"
    if retreat.preempted is not None:
        return f"; {retreat.preempted.key} goes back into the queue"
    return ""
