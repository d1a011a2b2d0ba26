"""Memory for weights and caches on CPU: in huge pages, and in pieces that are aligned for the kernels."""

# Short: every file that allocates large memory needs it, and nothing else of the library.

import contextlib
import ctypes
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20
_ALIGNMENT = 64


def return_freed_memory() -> None:
    """Let the C library give memory back to the system that was freed between pieces that are still in use."""
    with contextlib.suppress(AttributeError):  # only glibc has this function
        ctypes.CDLL(None).malloc_trim(0)


def huge_pages(num_bytes: int) -> Tensor:
    """Zeroed int8 memory [num_bytes], in huge pages if the system has them. Pages are allocated when first written."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without huge pages refuses
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.int8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes]


class Arena:
    """Allocates pieces of large chunks of memory. A chunk lives as long as its pieces."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.int8)

    def take(self, num_bytes: int) -> Tensor:
        """Zeroed int8 memory [num_bytes], aligned to 64 bytes."""
        rounded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if rounded > len(self._free):
            self._free = huge_pages(max(rounded, _CHUNK))
        piece, self._free = self._free[:num_bytes], self._free[rounded:]
        return piece
