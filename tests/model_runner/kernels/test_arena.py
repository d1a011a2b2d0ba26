"""Memory in huge pages."""

import errno
import mmap

import pytest
import torch

from model_runner.kernels.memory import Arena, huge_pages


@pytest.mark.parametrize("num_bytes", [0, 1, 4097, (2 << 20) + 1])
def test_huge_pages_are_zeros_on_a_page_of_their_own(num_bytes: int) -> None:
    memory = huge_pages(num_bytes)
    assert memory.dtype == torch.int8
    assert memory.shape == (num_bytes,)
    assert not memory.any()
    assert num_bytes == 0 or memory.data_ptr() % (2 << 20) == 0


def test_pieces_are_aligned_and_apart() -> None:
    arena = Arena()
    sizes = [1, 63, 64, 65, 70 << 20, 100]  # one of them larger than a chunk
    pieces = [arena.take(size) for size in sizes]
    for value, (piece, size) in enumerate(zip(pieces, sizes, strict=True), start=1):
        assert piece.shape == (size,)
        assert piece.data_ptr() % 64 == 0
        assert not piece.any()
        piece.fill_(value)
    assert all((piece == value).all() for value, piece in enumerate(pieces, start=1))


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux may be built without them; then madvise fails."""

    class Memory(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Memory)
    assert not huge_pages(4097).any()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert not huge_pages(4097).any()
