"""Conversations that open websockets remember, so that a turn can continue the one before although it is not stored."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from msgspec import Raw

LANE = "samewise.lane"
"""Under this name, the state of a request has the lane that it came through."""
_ITEM_BYTES = 128
"""Memory that an item takes besides its text."""


@dataclass(frozen=True, slots=True)
class _Turn:
    response_id: str
    items: Sequence[Raw]
    num_bytes: int


class Memories:
    """The memories of all connections, bounded together.

    Beyond the limit, the client whose connections remember most loses what they used longest ago.
    """

    def __init__(self, max_bytes: int, max_connection_bytes: int) -> None:
        """`max_connection_bytes` is for one connection."""
        self.max_connection_bytes = max_connection_bytes
        self._max_bytes = max_bytes
        self._open: set[Memory] = set()
        self._clock = count()

    @property
    def num_bytes(self) -> int:
        """What they take together."""
        return sum(memory.num_bytes for memory in self._open)

    def open(self, client: str) -> "Memory":
        """Return the memory of a new connection of this client; to be closed."""
        memory = Memory(self, client)
        self._open.add(memory)
        return memory

    def close(self, memory: "Memory") -> None:
        """Forget all of it."""
        self._open.discard(memory)

    def tick(self) -> int:
        """Return a number that is larger than all before."""
        return next(self._clock)

    def make_room(self) -> None:
        """Keep the limit."""
        while self.num_bytes > self._max_bytes:
            by_client: Counter[str] = Counter()
            for memory in self._open:
                by_client[memory.client] += memory.num_bytes
            ((most, _),) = by_client.most_common(1)
            held = [memory for memory in self._open if memory.client == most and memory.num_bytes]
            min(held, key=lambda memory: memory.used_at).drop_oldest()


class Memory:
    """What one connection remembers: the conversation up to the last response of each of its lanes."""

    def __init__(self, memories: Memories, client: str) -> None:
        self.client = client
        self.used_at = 0
        self.num_bytes = 0
        self._memories = memories
        self._turns: dict[str | None, _Turn] = {}  # by lane, the oldest first

    def find(self, response_id: str) -> Sequence[Raw] | None:
        """Return the items of the conversation up to a response; None if it is not remembered."""
        self.used_at = self._memories.tick()
        return next((turn.items for turn in self._turns.values() if turn.response_id == response_id), None)

    def keep(self, lane: str | None, response_id: str, items: Sequence[Raw]) -> None:
        """Remember a conversation in place of the lane's last one, if a request with all of it could be sent at all."""
        self.used_at = self._memories.tick()
        self._drop(lane)
        size = sum(len(item) + _ITEM_BYTES for item in items)
        if size > self._memories.max_connection_bytes:
            return
        while self.num_bytes + size > self._memories.max_connection_bytes:
            self.drop_oldest()
        self._turns[lane] = _Turn(response_id, items, size)
        self.num_bytes += size
        self._memories.make_room()

    def forget(self, response_id: str) -> None:
        """Remember a response no more."""
        for lane in [lane for lane, turn in self._turns.items() if turn.response_id == response_id]:
            self._drop(lane)

    def drop_oldest(self) -> None:
        """Forget the conversation that was kept longest ago."""
        self._drop(next(iter(self._turns)))

    def close(self) -> None:
        """Forget everything."""
        self._memories.close(self)

    def _drop(self, lane: str | None) -> None:
        turn = self._turns.pop(lane, None)
        self.num_bytes -= 0 if turn is None else turn.num_bytes


@dataclass(frozen=True, slots=True)
class Lane:
    """The responses of one connection that follow each other."""

    memory: Memory
    name: str | None
    """None: the one without a name."""

    def keep(self, response_id: str, items: Sequence[Raw]) -> None:
        """Remember the conversation up to this response, the last one of the lane."""
        self.memory.keep(self.name, response_id, items)
