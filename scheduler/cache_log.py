"""What the prefix cache has stored and removed, for routers that send prompts to where their beginning is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block can be found from now on."""

    name: bytes
    parent: bytes | None
    """Name of the block before it, which may have been removed meanwhile; None for the first one of a prompt."""
    tokens: tuple[int, ...]
    """As many as a block has."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block that was stored can be found no longer."""

    name: bytes


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be found any more."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class CacheLog:
    """Changes of one prefix cache in the order in which they happened.

    It has the blocks that a plain prompt finds. Others (of requests with a `cache_salt`, say) are left out: whoever
    reads the log knows of a block only its tokens, and would look for them under a prompt that never finds them.
    """

    def __init__(self) -> None:
        self._stored: set[bytes] = set()
        self._events: list[CacheEvent] = [AllBlocksCleared()]

    def note_stored(self, name: bytes, parent: bytes | None, tokens: tuple[int, ...]) -> None:
        """A block that a plain prompt finds was made findable."""
        self._stored.add(name)
        self._events.append(BlockStored(name, parent, tokens))

    def note_removed(self, name: bytes) -> None:
        """Some block, plain or not, is found no longer."""
        if name in self._stored:
            self._stored.remove(name)
            self._events.append(BlockRemoved(name))

    def take(self) -> list[CacheEvent]:
        """What has happened since the last time.

        A new cache is empty, which is said together with its first block: readers that knew an earlier one have had
        the time until then to come back.
        """
        if self._events == [AllBlocksCleared()]:
            return []
        events, self._events = self._events, []
        return events
