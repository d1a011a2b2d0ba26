"""The state of all live choices: which wait, which run, their blocks, and the step counters."""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.block_groups import BlockGroups
from scheduler.block_pool import IntegrityError
from scheduler.image_queue import ImageQueue
from scheduler.interface import STEP_TOKENS
from scheduler.request import Request
from scheduler.waiting_queue import WaitingQueue


@dataclass(slots=True)
class Counters:
    """Totals since the engine started. Fields have the same names as in EngineStats."""

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
        """Count a scheduled step of `num_tokens` tokens."""
        self.steps += 1
        self.scheduled_tokens += num_tokens
        self.steps_by_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def count_result(self, prefills: Sequence[int], num_decoding: int) -> None:
        """Count a finished step.

        Args:
            prefills: for each choice still in its prompt, the number of tokens computed.
            num_decoding: number of choices past their prompt, which computed one token each.
        """
        self.steps_done += 1
        self.prefill_tokens += sum(prefills)
        self.decode_tokens += num_decoding

    def totals(self) -> dict[str, Any]:
        """All counters by name. Called after every step, where `dataclasses.asdict` would be too slow."""
        return {name: getattr(self, name) for name in self.__slots__} | {"steps_by_tokens": (*self.steps_by_tokens,)}


class RunState:
    """Tracks every live request: waiting in the queue or for images, or running with blocks and a slot.

    A waiting group is represented in the queue by its first member.
    """

    def __init__(self, waiting: WaitingQueue, blocks: BlockGroups, max_num_seqs: int, images: ImageQueue) -> None:
        self.waiting = waiting
        self.images = images
        self.running: dict[str, Request] = {}
        """By key, in admission order."""
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._released: list[str] = []

    @property
    def num_free_slots(self) -> int:
        """Free slots. A running group reserves slots for its largest number of members."""
        groups = {id(request.group): request.group for request in self.running.values() if request.group is not None}
        alone = sum(request.group is None for request in self.running.values())
        return self._max_num_seqs - alone - sum(group.width for group in groups.values())

    def preempt(self, request: Request, not_yet_sent: Collection[str] = ()) -> None:
        """Release the blocks of a request and its group, and put it back in the queue. `not_yet_sent` as in `stop`."""
        for member in request.members:
            if member.key in self.running:
                self.stop(member, not_yet_sent)
            member.reset_progress()
        self.waiting.requeue(request.members[0])

    def end(self, members: Sequence[Request]) -> None:
        """Remove a running or waiting group."""
        if members[0].key not in self.running:
            (self.images if members[0] in self.images else self.waiting).remove(members[0])
            for member in members:
                self.images.release(member)
            return
        for member in members:
            if member.key in self.running:  # forks may still be pending
                self.stop(member)

    def stop(self, request: Request, not_yet_sent: Collection[str] = ()) -> None:
        """Remove one running request. The runner is not asked to forget keys in `not_yet_sent`, because it never got
        them.
        """
        del self.running[request.key]
        self.images.release(request)
        self._blocks.release(request)
        if request.key not in not_yet_sent:
            self._released.append(request.key)

    def take_released(self) -> tuple[str, ...]:
        """Keys that stopped running and that the runner must forget, to be sent with the next plan."""
        released, self._released = tuple(self._released), []
        return released


def check_accounting(
    groups: Sequence[Sequence[Request]], running: Mapping[str, Request], num_waiting: int, block_size: int
) -> None:
    """Raise IntegrityError unless every choice is accounted for.

    Args:
        groups: the members of each live group. In the queue the first represents all; forks may still be pending.
        running: running requests by key.
        num_waiting: groups in the queue, and those that wait for images.
        block_size: tokens per KV block.
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
