"""Which block holds which tokens: an index from content to block, so that equal prefixes are computed once.

A block is named by everything that its KV depends on: its own tokens and all tokens before them. Names are a chain of
hashes, so the name of block i costs the hash of one block when that of block i - 1 is known.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b

from model_runner.contract import SharedList


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


DIGEST_SIZE = 32  # bytes; at 256 bits a collision, which would show one request another's text, cannot be constructed


class BlockChain:
    """Names of the full blocks of a token list that only ever grows.

    Equal names mean equal salt, equal tokens and an equal kind: what KV a block holds beside the model's own.
    """

    def __init__(self, salt: str, block_size: int, kind: bytes = b"") -> None:
        self._block_size = block_size
        self._root = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_SIZE, person=kind).digest()
        self._names: SharedList[bytes] = SharedList()
        self.is_plain = not salt and not kind
        """Whether tokens alone name the blocks, and these hold nothing but the model's own KV."""

    def fork(self) -> "BlockChain":
        """A chain that goes on by itself; the names so far are common."""
        other = copy(self)
        other._names = self._names.fork()
        return other

    def names(self, tokens: Sequence[int], start: int, stop: int) -> list[bytes]:
        """Names of the blocks `start` to `stop` - 1 of `tokens`; each block is hashed once in the chain's life."""
        for index in range(len(self._names), stop):
            parent = self._names[-1] if self._names else self._root
            content = array("q", tokens[index * self._block_size : (index + 1) * self._block_size])
            self._names.append(blake2b(parent + content.tobytes(), digest_size=DIGEST_SIZE).digest())
        return self._names[start:stop]


class Lookup:
    """The blocks of the longest known prefix of some names, for as long as that is so."""

    def __init__(self, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """`blocks` are those of the first of `names`."""
        self.num_names = len(names)
        self.blocks = tuple(blocks)
        self.is_current = True
        self._held = frozenset(blocks)
        self._awaited = names[len(blocks)] if len(blocks) < len(names) else None

    def note_insert(self, name: bytes) -> None:
        """A block was made findable."""
        if name == self._awaited:
            self.is_current = False

    def note_forget(self, block: int) -> None:
        """A block is found no longer."""
        if block in self._held:
            self.is_current = False


class PrefixCache:
    """A one-to-one map between names and blocks. Holds no references: the pool says when a block loses its content."""

    def __init__(self, log: CacheLog | None = None) -> None:
        """`log` is told what is removed; what a stored block holds is known to whoever inserts it."""
        self.log = log
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self.followed: Sequence[Lookup] = ()
        """Lookups that are told of every change. They should be few."""

    def __contains__(self, block: int) -> bool:
        return block in self._name_of

    def __len__(self) -> int:
        return len(self._name_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._name_of)

    def lookup(self, names: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `names`."""
        blocks = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, name: bytes, block: int) -> bool:
        """Make a computed block findable. The first block of a name keeps it; for equal ones this returns False."""
        if name in self._block_of:
            return False
        self._block_of[name] = block
        self._name_of[block] = name
        for lookup in self.followed:
            lookup.note_insert(name)
        return True

    def forget(self, block: int) -> None:
        """Take a block out of the index, if it is there."""
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
