"""Lists that share their beginnings. Plain Python: scheduler and runner both keep histories in them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, TypeVar, overload

T = TypeVar("T")

_CHUNK: Final = 64


class SharedList(Sequence[T]):
    """A list that is only appended to, and of which forks go on by themselves.

    Full chunks are never changed, so forks have them in common: to fork takes a copy of one chunk at most, and of a
    reference to each of the others, however long the list is.
    """

    __slots__ = ("_full", "_last")

    def __init__(self, items: Iterable[T] = ()) -> None:
        items = list(items)
        end = len(items) - len(items) % _CHUNK
        self._full = [items[start : start + _CHUNK] for start in range(0, end, _CHUNK)]
        self._last = items[end:]

    def append(self, item: T) -> None:
        """One more."""
        self._last.append(item)
        if len(self._last) == _CHUNK:
            self._full.append(self._last)
            self._last = []

    def extend(self, items: Iterable[T]) -> None:
        """Some more."""
        for item in items:
            self.append(item)

    def fork(self, length: int | None = None) -> "SharedList[T]":
        """A list of the first items, or of all."""
        num_full, rest = divmod(len(self) if length is None else length, _CHUNK)
        fork = SharedList[T]()
        fork._full = self._full[:num_full]
        fork._last = (self._full[num_full] if num_full < len(self._full) else self._last)[:rest]
        return fork

    def appended(self, item: T) -> "SharedList[T]":
        """A list with one more, which leaves this one as it is."""
        fork = self.fork()
        fork.append(item)
        return fork

    def __len__(self) -> int:
        return len(self._full) * _CHUNK + len(self._last)

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable([*self._full, self._last])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
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
