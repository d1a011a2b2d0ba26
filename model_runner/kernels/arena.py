"""Memory in huge pages, for weights that are read from end to end at every step.

With pages of 4 KiB, finding the pages costs a single thread nearly half of the machine's bandwidth.
"""

import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20
_ALIGNMENT = 64


def huge_pages(num_bytes: int) -> Tensor:
    """Zeroed int8 memory [num_bytes], in huge pages where the system has them; taken from it as it is written."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.int8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes]


class Arena:
    """Hands out pieces of large chunks of memory, for as long as the pieces live."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.int8)

    def take(self, num_bytes: int) -> Tensor:
        """Zeroed int8 memory [num_bytes], aligned to 64 bytes."""
        rounded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if rounded > len(self._free):
            self._free = huge_pages(max(rounded, _CHUNK))
        piece, self._free = self._free[:num_bytes], self._free[rounded:]
        return piece
