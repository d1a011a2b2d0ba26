"""A list whose forks share memory: the tokens of beams and of choices with the same prompt."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, TypeVar, overload

_Item = TypeVar("_Item")
_CHUNK: Final = 64
"""Items per chunk of a SharedList."""


class SharedList(Sequence[_Item]):
    """An append-only list whose forks share memory.

    Full chunks are never changed, so forks share them. A fork of any length copies at most one chunk, and references to
    the others.
    """

    __slots__ = ("_full", "_last")

    def __init__(self, items: Iterable[_Item] = ()) -> None:
        items = list(items)
        end = len(items) - len(items) % _CHUNK
        self._full = [items[start : start + _CHUNK] for start in range(0, end, _CHUNK)]
        self._last = items[end:]

    def append(self, item: _Item) -> None:
        """Append one item."""
        self._last.append(item)
        if len(self._last) == _CHUNK:
            self._full.append(self._last)
            self._last = []

    def extend(self, items: Iterable[_Item]) -> None:
        """Append several items."""
        for item in items:
            self.append(item)

    def fork(self, length: int | None = None) -> "SharedList[_Item]":
        """A list of the first `length` items, or of all."""
        num_full, rest = divmod(len(self) if length is None else length, _CHUNK)
        fork = SharedList[_Item]()
        fork._full = self._full[:num_full]
        fork._last = (self._full[num_full] if num_full < len(self._full) else self._last)[:rest]
        return fork

    def appended(self, item: _Item) -> "SharedList[_Item]":
        """A copy with one more item; this list is unchanged."""
        fork = self.fork()
        fork.append(item)
        return fork

    def __len__(self) -> int:
        return len(self._full) * _CHUNK + len(self._last)

    def __iter__(self) -> Iterator[_Item]:
        return chain.from_iterable([*self._full, self._last])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    @overload
    def __getitem__(self, index: int) -> _Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Item]: ...
    def __getitem__(self, index: int | slice) -> _Item | list[_Item]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return list(self)[index]
            first = start // _CHUNK
            chunks = [*self._full[first : -(-stop // _CHUNK)], self._last]
            begin = first * _CHUNK
            return list(chain.from_iterable(chunks))[start - begin : max(start, stop) - begin]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        chunk = place // _CHUNK
        return self._full[chunk][place % _CHUNK] if chunk < len(self._full) else self._last[place % _CHUNK]
