"""How many tokens a step computes: all together, each choice, and background work.

If the runner runs out of memory, one choice gives way, and the next steps are smaller. Running out of KV blocks is not
an error: `Scheduler._continue` preempts instead.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from model_runner.contract import Failure, StepPlan
from scheduler.request import Request
from scheduler.waiting_queue import WaitingQueue

logger = logging.getLogger("samewise.scheduler")

OUT_OF_MEMORY: Final = Failure("the server ran out of memory computing this request alone; try a shorter one")

_PATIENCE: Final = 256
"""Successful steps before larger steps are tried again; every failed attempt wastes a step."""
_ADVICE: Final = "If this happens often, lower max_num_batched_tokens or kv_cache_gib."


def lockstep(members: Sequence[Request], budget: int) -> list[int]:
    """How many tokens each member computes in a step.

    All remaining tokens if they fit the budget; otherwise as many as fit, without any member's last token. Contrastive
    candidates of the members are deducted from the budget first.
    """
    budget = max(0, budget - sum(member.num_candidates for member in members))
    return split_budget(members, [member.num_computed for member in members], budget)


def split_budget(members: Sequence[Request], starts: Sequence[int], budget: int) -> list[int]:
    """`lockstep` for members that begin at these places, and have no candidates. Spans are not cut."""
    remaining = [len(member.tokens) - start for member, start in zip(members, starts, strict=True)]
    if sum(remaining) <= budget:
        return remaining
    shares = []
    for member, start, left in zip(members, starts, remaining, strict=True):
        shares.append(member.whole(start, min(left - 1, budget)))
        budget -= shares[-1]
    return shares


def least_share(members: Sequence[Request]) -> int:
    """The smallest budget with which `lockstep` makes progress."""
    if any(member.remaining > 1 for member in members):
        return max(_first_span(member) for member in members)
    return sum(1 + member.num_candidates for member in members)


def least_to_begin(head: Request) -> int:
    """A budget with which a waiting group makes progress, wherever it begins."""
    spans = (end - first for member in head.members for first, end in member.spans)
    return max([len(head.members), *spans])


def begins_no_span(request: Request) -> bool:
    """Sort key: first the choices whose next token begins a span."""
    return _first_span(request) == 1


def _first_span(member: Request) -> int:
    """Tokens of the span that begins where a member goes on; otherwise 1."""
    return next((end - first for first, end in member.spans if first == member.num_computed), 1)


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


_SHARE = 0.06
"""Long-run share of foreground step time that background work may add."""
_CHEAP = 0.05
"""If background work adds at most this share to a step, nearly every step may include some."""
_ALTERNATE = 2
"""Otherwise this many steps without background work follow each step with some, so most tokens are not delayed."""
_FEW, _MANY = 0.2, 0.5
"""A mixed step should take longer than one without background work, by a share between these two."""
_FIRST_WIDTH = 4
"""Background tokens in the first mixed step."""
_TOO_FAST = 0.8
"""If a mixed step takes less than this share of a step without background work, that earlier measurement was wrong."""
_HOLD_OUT = 16
"""At least one of this many steps has no background work, to keep its time measured."""
_WEIGHT = 0.1
"""Weight of the latest step in the moving average."""
_ALONE = 4
"""A step with only background work gets the full token budget divided by this, so that new requests wait less."""


@dataclass(frozen=True, slots=True)
class OthersLoad:
    """The foreground work of a step."""

    num_rows: int
    only_decodes: bool
    """Whether all foreground choices are past their prompt."""


class BackgroundBudget:
    """Limits the background work per step.

    Background work is added to steps in which foreground choices only decode. It is limited so that the time between
    foreground tokens grows by less than a tenth. Where extra rows cost nothing, nearly every step includes some.
    """

    def __init__(self, most: int) -> None:
        """`most` is the token limit of a step."""
        self._most = most
        self._alone: dict[int, float] = {}
        """Seconds per step without background work, by number of foreground rows."""
        self._width = min(_FIRST_WIDTH, most)
        self._credit = 0.0
        """Seconds that background work may still add."""
        self._cost = 0.0
        """Time that background work adds to a mixed step, as a share of the step."""
        self._num_mixed = 0
        """Consecutive steps with background work."""
        self._num_alone = 0
        """Consecutive steps without background work."""

    def num_tokens(self, others: OthersLoad, least: int) -> int:
        """How many background tokens the next step may include. Fewer than `least` would make no progress."""
        if not others.num_rows:
            return max(least, self._most // _ALONE)
        is_known = _size_class(others.num_rows) in self._alone
        is_turn = self._num_mixed < _HOLD_OUT - 1 if self._cost < _CHEAP else self._num_alone >= _ALTERNATE
        is_allowed = others.only_decodes and is_known and is_turn and self._credit >= 0
        return max(least, self._width) if is_allowed else 0

    def observe(self, others: OthersLoad, num_added: int, seconds: float) -> None:
        """Record the duration of a step with `num_added` tokens of background work."""
        if not others.num_rows or not others.only_decodes:
            return
        size = _size_class(others.num_rows)
        alone = self._alone.get(size, seconds)
        self._credit = min(self._credit + _SHARE * alone, alone)
        if num_added and seconds < _TOO_FAST * alone:
            self._alone[size] = alone = seconds
        if num_added:
            self._observe_added(seconds - alone, alone, num_added)
        else:
            self._num_alone, self._num_mixed = self._num_alone + 1, 0
            self._alone[size] = alone + _WEIGHT * (min(seconds, 2 * alone) - alone)

    def _observe_added(self, added: float, alone: float, num_added: int) -> None:
        self._num_alone, self._num_mixed = 0, self._num_mixed + 1
        self._credit -= max(added, 0.0)
        self._cost += _WEIGHT * (min(added / alone, 1.0) - self._cost)
        if added > _MANY * alone:
            self._width = max(1, self._width * 3 // 4)
        elif added < _FEW * alone and num_added == self._width:
            self._width = min(self._most, self._width + max(1, self._width // 4))


def _size_class(num_rows: int) -> int:
    """Round to a class: exact for few rows, within an eighth for many."""
    unit = 1 << max(0, num_rows.bit_length() - 4)
    return num_rows // unit * unit
