"""Bounds the memory of things that arrive or grow piece by piece, fairly between those who send or own them."""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Item = TypeVar("_Item", bound=Hashable)


class FairMemory(Generic[_Item]):
    """Counts the bytes of growing items, such as request bodies that have arrived in part.

    If all items together are too large, the owner that has the most loses the one that began first. So owners of many
    slow items drop their own, and nobody else's.
    """

    def __init__(self, max_bytes: int, drop: Callable[[_Item], None]) -> None:
        """`drop` frees an item, which is no longer counted then."""
        self._max_bytes = max_bytes
        self._drop = drop
        self._items: dict[_Item, tuple[str, int]] = {}
        """Owner and bytes of each item, the one that began first at the front."""
        self._of_owners: Counter[str] = Counter()
        self._total = 0

    def resize(self, item: _Item, owner: str, num_bytes: int) -> None:
        """Record the size of an item; 0 if it is complete or given up. May drop items, also this one."""
        owner, before = self._items.get(item, (owner, 0))
        self._count(owner, num_bytes - before)
        if num_bytes:
            self._items[item] = owner, num_bytes
        else:
            self._items.pop(item, None)
        while self._total > self._max_bytes:
            most = max(self._of_owners, key=self._of_owners.__getitem__)
            oldest = next(one for one, (name, _) in self._items.items() if name == most)
            self._count(most, -self._items.pop(oldest)[1])
            self._drop(oldest)

    def _count(self, owner: str, num_bytes: int) -> None:
        self._total += num_bytes
        self._of_owners[owner] += num_bytes
        if not self._of_owners[owner]:
            del self._of_owners[owner]
