"""Ownership of KV blocks.

Every block is in exactly one of three places:

    free    no request holds it and its content is worthless
    cached  no request holds it, but the prefix cache can find it; evicted oldest first when no block is free
    used    held by as many block tables as its reference count says
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

from scheduler.prefix_cache import PrefixCache


class IntegrityError(AssertionError):
    """The accounting is inconsistent: a bug in the scheduler, or a runner that breaks the contract."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks `num_tokens` tokens need."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Allocates block ids 0 to `num_blocks` - 1 and counts their references."""

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self._cache = cache
        self._free = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._references = [0] * num_blocks

    @property
    def num_used(self) -> int:
        """Blocks that at least one block table holds."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that only the prefix cache holds."""
        return len(self._cached)

    def can_allocate(self, count: int, sharing: Iterable[int] = ()) -> bool:
        """Whether `count` blocks could be allocated while the blocks in `sharing` are kept."""
        revived = sum(block in self._cached for block in sharing)
        return len(self._free) + len(self._cached) - revived >= count

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with undefined content and one reference each. Check `can_allocate` first."""
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to used or cached blocks. Shared blocks must not be written to."""
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a table. Later blocks are evicted first, because they extend earlier
        ones.
        """
        for block in reversed(blocks):
            self._drop(block)

    def release_spare(self, block: int) -> None:
        """Drop one reference to a block that is evicted before all others, because it is hardly worth finding."""
        self._drop(block)
        if block in self._cached:
            self._cached.move_to_end(block, last=False)

    def forget(self, block: int) -> None:
        """Remove a block from the prefix cache. If no request holds it, it is free."""
        self._cache.forget(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def check_integrity(self, tables: Collection[Collection[int]]) -> None:
        """Raise IntegrityError unless `tables` are all the block tables and every block is in exactly one place."""
        held = Counter(block for table in tables for block in table)
        for block, references in enumerate(self._references):
            if references != held[block]:
                raise IntegrityError(f"block {block} counts {references} references, {held[block]} tables hold it")
        unheld = [*self._free, *self._cached]
        if sorted([*unheld, *held]) != list(range(self.num_blocks)):
            raise IntegrityError(
                f"{len(self._free)} free + {len(self._cached)} cached + {len(held)} used blocks "
                f"do not account for each of {self.num_blocks} blocks once"
            )
        if (
            set(self._cached) != {block for block in self._cache if block not in held}
            or not self._cache.is_consistent()
        ):
            raise IntegrityError(f"the pool has {len(self._cached)} cached blocks, but the prefix cache disagrees")

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] > 0:
            return
        if self._references[block] < 0:
            raise IntegrityError(f"block {block} was released more often than it was allocated")
        if block in self._cache:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._cached.popitem(last=False)
        self._cache.forget(block)
        return block
