"""Who waits, who runs, and the blocks of those who run."""

from collections.abc import Collection, Sequence

from scheduler.block_pool import BlockPool
from scheduler.queues.interface import WaitingQueue
from scheduler.request import Request


class Roster:
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

    def preempt(self, request: Request, unheard_of: Collection[str] = ()) -> None:
        """Have a request, with its group, give its blocks back and wait. `unheard_of` as in `stop`."""
        for member in request.members:
            if member.key in self.running:
                self.stop(member, unheard_of)
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

    def stop(self, request: Request, unheard_of: Collection[str] = ()) -> None:
        """Strike off a single running request. Those whose keys are `unheard_of` the runner need not forget."""
        del self.running[request.key]
        self._pool.release(request.blocks)
        if request.key not in unheard_of:
            self._released.append(request.key)

    def take_released(self) -> tuple[str, ...]:
        """Keys of requests that run no longer, but that the runner still knows: for the next plan that reaches it."""
        released, self._released = tuple(self._released), []
        return released
