"""The state of all live choices: which wait, which run, their blocks, and the counters of their steps."""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.block_pool import BlockPool, IntegrityError
from scheduler.interface import STEP_TOKENS
from scheduler.request import Request
from scheduler.waiting_queue import WaitingQueue


@dataclass(slots=True)
class Counters:
    """Totals since the start, by their names in EngineStats."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    out_of_memory: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    steps_done: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    step_s: float = 0.0
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))

    def count_step(self, num_tokens: int) -> None:
        """A step that computes so many tokens."""
        self.steps += 1
        self.scheduled_tokens += num_tokens
        self.steps_by_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def count_result(self, prefills: Sequence[int], num_decoding: int) -> None:
        """A step's result is in: so many tokens of each choice within its prompt, and one of each that is beyond."""
        self.steps_done += 1
        self.prefill_tokens += sum(prefills)
        self.decode_tokens += num_decoding

    def totals(self) -> dict[str, Any]:
        """All of them by their names. Asked for after every step, for which `dataclasses.asdict` takes too long."""
        return {name: getattr(self, name) for name in self.__slots__} | {"steps_by_tokens": (*self.steps_by_tokens,)}


class RunState:
    """Where every request stands that has not ended: in the queue, or among the running ones with blocks and a slot.

    Of a group that waits only the first is in the queue, for all of them.
    """

    def __init__(self, waiting: WaitingQueue, pool: BlockPool, max_num_seqs: int) -> None:
        self.waiting = waiting
        self.running: dict[str, Request] = {}
        """By key, in admission order."""
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._released: list[str] = []

    @property
    def num_free_slots(self) -> int:
        """Choices that can still run beside the running ones; groups that run keep slots for all they may need."""
        groups = {id(request.group): request.group for request in self.running.values() if request.group is not None}
        alone = sum(request.group is None for request in self.running.values())
        return self._max_num_seqs - alone - sum(group.width for group in groups.values())

    def preempt(self, request: Request, not_yet_sent: Collection[str] = ()) -> None:
        """Have a request, with its group, give its blocks back and wait. `not_yet_sent` as in `stop`."""
        for member in request.members:
            if member.key in self.running:
                self.stop(member, not_yet_sent)
            member.start_over()
        self.waiting.requeue(request.members[0])

    def end(self, members: Sequence[Request]) -> None:
        """Strike off a group, or a single request, that runs or waits."""
        if members[0].key not in self.running:
            self.waiting.remove(members[0])
            return
        for member in members:
            if member.key in self.running:  # and not still to be forked
                self.stop(member)

    def stop(self, request: Request, not_yet_sent: Collection[str] = ()) -> None:
        """Strike off a single running request. Those whose keys are `not_yet_sent` the runner need not forget."""
        del self.running[request.key]
        self._pool.release(request.blocks)
        if request.key not in not_yet_sent:
            self._released.append(request.key)

    def take_released(self) -> tuple[str, ...]:
        """Keys of requests that run no longer, but that the runner still knows: for the next plan that reaches it."""
        released, self._released = tuple(self._released), []
        return released


def check_books(
    groups: Sequence[Sequence[Request]], running: Mapping[str, Request], num_waiting: int, block_size: int
) -> None:
    """Raise IntegrityError unless every choice is accounted for.

    Args:
        groups: the members of all that live; the first one stands for all in the queue, and forks are still to be made.
        running: by key.
        num_waiting: in the queue.
        block_size: of the cache.
    """
    num_live = 0
    for first, *others in groups:
        num_live += 1 + sum(other.forked_from is None for other in others if first.key in running)
    if num_live != len(running) + num_waiting:
        raise IntegrityError(f"{num_live} live != {len(running)} running + {num_waiting} waiting")
    for request in running.values():
        covered = len(request.blocks) * block_size
        if not request.num_computed <= covered or request.remaining < 1:
            raise IntegrityError(
                f"{request.key!r} has {request.num_computed} of {len(request.tokens)} tokens computed, "
                f"its blocks cover {covered}"
            )
