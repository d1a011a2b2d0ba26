"""Whether the scheduler's books balance."""

from collections.abc import Mapping, Sequence

from scheduler.block_pool import IntegrityError
from scheduler.request import Request


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
