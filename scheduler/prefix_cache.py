"""The prefix cache: an index from content to KV block, so that equal prefixes are computed once.

A block's name identifies everything its KV depends on: its own tokens and all tokens before them. Names form a hash
chain, so naming block i costs one hash when the name of block i - 1 is known.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b

from model_runner.image import Image
from model_runner.shared_list import SharedList


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block can be found from now on."""

    name: bytes
    parent: bytes | None
    """Name of the preceding block, which may have been removed since. None for the first block of a prompt."""
    tokens: tuple[int, ...]
    """Exactly one block's tokens."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A stored block can no longer be found."""

    name: bytes


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache is empty."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class CacheLog:
    """The changes of one prefix cache in order.

    It contains only blocks that a plain prompt can find. Blocks of other requests, such as those with a `cache_salt`,
    are omitted: readers of the log know only a block's tokens, and a plain prompt would never find them.
    """

    def __init__(self) -> None:
        self._stored: set[bytes] = set()
        self._events: list[CacheEvent] = [AllBlocksCleared()]

    def note_stored(self, name: bytes, parent: bytes | None, tokens: tuple[int, ...]) -> None:
        """Log a new block that a plain prompt can find."""
        self._stored.add(name)
        self._events.append(BlockStored(name, parent, tokens))

    def note_removed(self, name: bytes) -> None:
        """Log the removal of a block, if its creation was logged."""
        if name in self._stored:
            self._stored.remove(name)
            self._events.append(BlockRemoved(name))

    def take(self) -> list[CacheEvent]:
        """Take the events since the last call.

        A new cache's AllBlocksCleared is held back until its first block, so that returning readers have time to
        reconnect.
        """
        if self._events == [AllBlocksCleared()]:
            return []
        events, self._events = self._events, []
        return events


DIGEST_SIZE = 32  # bytes; at 256 bits a collision, which would show one request another's text, cannot be constructed


class BlockChain:
    """Names of the full blocks of a growing token list.

    Equal names mean equal salt, tokens, images and kind. The kind says which KV a block holds in addition to the
    model's own. A block's name has the digests of the images whose rows it holds, with their places and rows.
    """

    def __init__(self, salt: str, block_size: int, kind: bytes = b"", images: Sequence[Image] = ()) -> None:
        self._block_size = block_size
        self._images = [(image.start, image.end, image) for image in images]
        self._root = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_SIZE, person=kind).digest()
        self._names: SharedList[bytes] = SharedList()
        self._has_plain_root = not salt and not kind

    def depends_on_tokens_alone(self, index: int) -> bool:
        """Whether a block's name depends on tokens alone, and the block holds only the model's own KV."""
        return self._has_plain_root and not (self._images and self._images[0][0] < (index + 1) * self._block_size)

    def fork(self) -> "BlockChain":
        """A copy that continues independently and shares the names so far."""
        other = copy(self)
        other._names = self._names.fork()
        return other

    def names(self, tokens: Sequence[int], start: int, stop: int) -> list[bytes]:
        """Names of blocks `start` to `stop` - 1 of `tokens`. Each block is hashed only once per chain."""
        for index in range(len(self._names), stop):
            parent = self._names[-1] if self._names else self._root
            content = array("q", tokens[index * self._block_size : (index + 1) * self._block_size])
            named = parent + content.tobytes() + self._images_in(index)
            self._names.append(blake2b(named, digest_size=DIGEST_SIZE).digest())
        return self._names[start:stop]

    def _images_in(self, index: int) -> bytes:
        """The rows of images in a block: first place, first row, length and digest of each run, all of fixed size."""
        first, end = index * self._block_size, (index + 1) * self._block_size
        return b"".join(
            array("q", run).tobytes() + image.digest
            for start, stop, image in self._images
            if start < end and stop > first
            for run in image.within(first, end)
        )


class Lookup:
    """A remembered lookup in one cache. `is_current` turns False when the cache changes in a way that may matter."""

    def __init__(self, held: Iterable[int], awaited: Iterable[bytes]) -> None:
        """The lookup found the blocks `held`; it would find more if one of the names `awaited` were there."""
        self.is_current = True
        self._held = frozenset(held)
        self._awaited = frozenset(awaited)

    def note_insert(self, name: bytes) -> None:
        """Record that a block was added to the cache."""
        if name in self._awaited:
            self.is_current = False

    def note_forget(self, block: int) -> None:
        """Record that a block was removed from the cache."""
        if block in self._held:
            self.is_current = False


class PrefixCache:
    """A one-to-one map between names and blocks, without references: the pool decides when a block is evicted."""

    def __init__(self, log: CacheLog | None = None) -> None:
        """`log` records removals. The caller of `insert` logs additions, because only it knows the block's tokens."""
        self.log = log
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self.followed: Sequence[Lookup] = ()
        """Lookups to notify of every change. Keep them few."""

    def __contains__(self, block: int) -> bool:
        return block in self._name_of

    def __len__(self) -> int:
        return len(self._name_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._name_of)

    def has(self, name: bytes) -> bool:
        """Whether there is a block with this name."""
        return name in self._block_of

    def block_of(self, name: bytes) -> int:
        """The block with this name, which `has` confirmed."""
        return self._block_of[name]

    def lookup(self, names: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `names`."""
        blocks = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, name: bytes, block: int) -> bool:
        """Add a computed block. Returns False, and changes nothing, if the name already has a block."""
        if name in self._block_of:
            return False
        self._block_of[name] = block
        self._name_of[block] = name
        for lookup in self.followed:
            lookup.note_insert(name)
        return True

    def forget(self, block: int) -> None:
        """Remove a block from the index if it is there."""
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]
            for lookup in self.followed:
                lookup.note_forget(block)
            if self.log is not None:
                self.log.note_removed(name)

    def is_consistent(self) -> bool:
        """Whether the two directions of the map agree."""
        return len(self._block_of) == len(self._name_of) and all(
            self._block_of.get(name) == block for block, name in self._name_of.items()
        )
