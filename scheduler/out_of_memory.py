"""Recovery when the runner runs out of memory: which choice gives way, and how large the next steps may be.

Running out of KV blocks is not an error: `Scheduler._continue` preempts instead.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from model_runner.contract import Failure, StepPlan
from scheduler.groups import least_share, least_to_begin
from scheduler.request import Request
from scheduler.waiting_queue import WaitingQueue

logger = logging.getLogger("samewise.scheduler")

OUT_OF_MEMORY: Final = Failure("the server ran out of memory computing this request alone; try a shorter one")

_PATIENCE: Final = 256
"""Successful steps before larger steps are tried again; every failed attempt wastes a step."""
_ADVICE: Final = "If this happens often, lower max_num_batched_tokens or kv_cache_gib."


@dataclass(frozen=True, slots=True)
class OomDecision:
    """The choice that pays for a failed step. The first member represents its whole group."""

    preempted: Request | None = None
    """Goes back to the waiting queue."""
    failed: Request | None = None
    """Cannot be computed: memory ran out although it ran alone in the smallest possible step."""


class StepLimit:
    """The token budget of steps: the configured one, or half of the last failed step.

    Memory other than weights and KV cache grows with the tokens of a step. The pressure may be temporary, such as
    another program or one very long request, so the limit doubles after `_PATIENCE` successful steps.
    """

    def __init__(self, most: int, rank: Callable[[Request], tuple[int, ...]]) -> None:
        """`most` is the configured limit; `rank` is the waiting queue's `rank`."""
        self._most = most
        self._rank = rank
        self._tokens = most
        self._num_passed = 0

    def budget(self, running: Mapping[str, Request], waiting: WaitingQueue) -> int:
        """Token budget of the next step, always large enough for the first choice in line to make progress."""
        leaders = (request for request in running.values() if request is request.members[0])
        if (first := next(leaders, None)) is not None:
            return max(self._tokens, least_share(first.members))
        return max(self._tokens, least_to_begin(waiting.peek())) if waiting else self._tokens

    def note_success(self) -> None:
        """Record a successful step."""
        if self._tokens < self._most:
            self._num_passed += 1
            if self._num_passed == _PATIENCE:
                self._num_passed = 0
                self._tokens = min(2 * self._tokens, self._most)

    def decide(self, plan: StepPlan, running: Mapping[str, Request], reason: str) -> OomDecision:
        """Choose who pays for a step that ran out of memory, and halve the step limit.

        The step's largest choice or group is preempted, unless it ranks first: that one keeps its memory, so that work
        always completes. Every failed step makes later steps smaller or fails a choice, so the same step never fails
        twice.

        Args:
            plan: of the failed step. Drafts and candidates of its choices are discarded.
            running: the choices that still run, by key.
            reason: error message of the device or the host.
        """
        sizes: Counter[str] = Counter()  # by the key of the choice, or of its group's first
        for share in plan.scheduled:
            if (request := running.get(share.key)) is not None:
                sizes[request.members[0].key] += share.num_rows
        num_tokens = sum(share.num_rows for share in plan.scheduled)
        decision = self._choose(sizes, num_tokens, running)
        for share in plan.scheduled:
            if share.key in running:
                running[share.key].clear_proposals()
        self._tokens = max(1, num_tokens // 2)
        self._num_passed = 0
        logger.warning(
            "Out of memory in a step of %d tokens for %s%s. Steps have at most %d tokens for now. %s %s",
            num_tokens,
            ", ".join(f"{key} ({size})" for key, size in sizes.most_common(8)) or "choices that are gone",
            _describe(decision),
            self._tokens,
            _ADVICE,
            reason,
        )
        return decision

    def _choose(self, sizes: Counter[str], num_tokens: int, running: Mapping[str, Request]) -> OomDecision:
        leaders = [running[key] for key in sizes]
        if len(leaders) == 1 and num_tokens == sizes[leaders[0].key]:
            is_least = num_tokens <= least_share(leaders[0].members)
            return OomDecision(failed=leaders[0]) if is_least else OomDecision()
        first = min(leaders, key=self._rank, default=None)
        largest = max(leaders, key=lambda leader: sizes[leader.key], default=None)
        return OomDecision() if largest is first else OomDecision(preempted=largest)


def _describe(decision: OomDecision) -> str:
    if decision.failed is not None:
        return f"; {decision.failed.key} fails because it needs them all in one step"
    if decision.preempted is not None:
        return f"; {decision.preempted.key} goes back to the queue"
    return ""
