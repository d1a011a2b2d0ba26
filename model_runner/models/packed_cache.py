"""Packed weights on disk: the first start writes them, later starts read them.

A file has the weights that one model packs from plain numbers, in one kind and layout. It begins with `_MAGIC`, the
size of a JSON header (uint64, little endian) and the header. Each weight follows at a multiple of 4 KiB: its packed
bytes, then at a multiple of 64 its float32 scales.

The header follows from the model, the checkpoint's files, the kernels and this code. A file is read only if it begins
with exactly the expected header, and its name ends with a hash of it. Nothing here is ever needed: whatever goes wrong,
weights are packed in memory.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from io import BufferedReader
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO

import torch
from torch import Tensor

from model_runner.kernels.library import Kernels, NativeWeight, WeightKind
from model_runner.kernels.library_folder import check_owner, locked, opened
from model_runner.kernels.memory import huge_pages
from model_runner.models.loading import checkpoint_files
from model_runner.models.model_spec import ModelSpec
from model_runner.models.native_packer import NativePacker
from model_runner.models.parameters import Linear
from model_runner.models.repository import hash_listing

logger = logging.getLogger("samewise.runner")

FOLDER = "packed"
"""Subfolder of the cache folder."""
ENDING = ".packed"
UNFINISHED = ".writing"
"""Ending of files that are being written, or were left by a process that was killed meanwhile."""
SMALLEST = 64 << 20
"""Models whose packed weights take fewer bytes are packed again: that takes less than half a second."""
_RESERVE = 10 << 30
"""Bytes of the disk that are left free, at most; fewer if the file is smaller itself."""
_SHARE = 4
"""The files together take at most one part of the disk's size in so many."""
_MAGIC = b"SWPACK\0\1"
_ALIGNMENT = 4096
_SCALES_ALIGNMENT = 64
_NOT_CACHED = "Packed weights are not cached, so the next start packs them again: %s"
_PIECE = 16 << 20
"""Bytes that a thread reads at once."""
_READERS = 4
_CODE = ("kernels", "models", "gguf")
"""Subpackages that lead from a checkpoint to packed weights."""


@dataclass(frozen=True, slots=True)
class Section:
    """A weight of the file. Offsets begin after the header."""

    kind: WeightKind
    outputs: int
    inputs: int
    packed: int
    """Offset of the packed bytes."""
    scales: int
    """Offset of the scales."""
    end: int
    """Offset after the scales."""

    def is_of(self, kind: WeightKind, weight: NativeWeight | Linear) -> bool:
        """Whether it is the place of such a weight."""
        return (self.kind, self.outputs, self.inputs) == (kind, weight.outputs, weight.inputs)


@dataclass(frozen=True, slots=True)
class Listing:
    """The files that decide what a model's weights are, as they were at some moment."""

    model: Path
    """The model's folder."""
    digest: str | None
    """SHA-256 of their places, sizes and times; None if one is missing."""

    @classmethod
    def of(cls, model: Path) -> "Listing":
        """As they are now."""
        with suppress(OSError, ValueError, LookupError, TypeError):  # damage, which the checkpoint's reader describes
            return cls(model, hash_listing([path.resolve() for path in checkpoint_files(model)]))
        return cls(model, None)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The name and content of a model's file, known before anything is packed."""

    name: str
    header: bytes
    start: int
    """Size of the header and of what fills it up."""
    sections: Sequence[Section]
    listing: Listing

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.start + self.sections[-1].end


@contextmanager
def cached(packer: NativePacker, spec: ModelSpec, listing: Listing, folder: Path) -> Iterator[NativePacker]:
    """A packer for a model that takes weights from the model's file below the cache folder, or writes them to it.

    It is the same packer if the model is small, or the cache cannot be used; the log says why.

    Args:
        packer: packs the linears of `form`, in their order, and the head in int8.
        spec: the model.
        listing: its files, from before the form was read, so that it is not newer than what is packed.
        folder: the cache folder.
    """
    weights = _open(packer, spec, listing, folder / FOLDER)
    if weights is None:
        yield packer
        return
    try:
        yield replace(packer, cache=weights)
    finally:
        if isinstance(weights, _Writer):
            weights.end()


def _open(packer: NativePacker, spec: ModelSpec, listing: Listing, folder: Path) -> "_Reader | _Writer | None":
    sections = _sections(packer, spec)
    if not sections or sections[-1].end < SMALLEST or listing.digest is None:
        return None
    plan = _plan(packer.kernels, sections, listing)
    try:
        with opened(folder) as descriptor:
            begin = time.perf_counter()
            if (memory := _load(plan, folder, descriptor)) is not None:
                seconds = time.perf_counter() - begin
                logger.info(
                    "cache      %s of packed weights read from %s in %.1f s", _gib(plan.size), plan.name, seconds
                )
                return _Reader(packer.kernels, plan, memory)
            with locked(descriptor):
                return _begin_writing(plan, folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: the system gives no more threads
        logger.warning(_NOT_CACHED, error)
        return None


def _sections(packer: NativePacker, spec: ModelSpec) -> list[Section]:
    """The weights that the model packs from plain numbers, with offsets after the header."""
    sections: list[Section] = []
    end = 0
    *inner, head = spec.linears
    for own, linear in [*((packer, linear) for linear in inner), (packer.in_int8, head)]:
        if (kind := own.dense_kind(linear)) is not None:
            packed = _up(end, _ALIGNMENT)
            scales = _up(packed + own.num_bytes(linear), _SCALES_ALIGNMENT)
            end = scales + linear.outputs * torch.float32.itemsize
            sections.append(Section(kind, linear.outputs, linear.inputs, packed, scales, end))
    return sections


def _plan(kernels: Kernels, sections: Sequence[Section], listing: Listing) -> FilePlan:
    """Describe the file that the model must have."""
    content = {
        "checkpoint": listing.digest,
        "code": _code_digest(),
        "layout": kernels.layout,
        "sections": [[one.kind, one.outputs, one.inputs, one.packed, one.scales] for one in sections],
    }
    text = json.dumps(content).encode()
    header = _MAGIC + struct.pack("<Q", len(text)) + text
    start = _up(len(header), _ALIGNMENT)
    model = listing.model
    place = model.parents[1] if model.parent.name == "snapshots" else model  # as the hub names folders
    title = re.sub(r"[^A-Za-z0-9._-]+", "_", place.name.removeprefix("models--"))[:100]
    name = f"{title}-{hashlib.sha256(header).hexdigest()[:16]}{ENDING}"
    return FilePlan(name, header, start, sections, listing)


class _Reader:
    """Implements WeightCache on the bytes of a file."""

    def __init__(self, kernels: Kernels, plan: FilePlan, memory: Tensor) -> None:
        self._kernels = kernels
        self._sections = iter(plan.sections)
        self._memory = memory[plan.start :]

    def obtain(self, kind: WeightKind, linear: Linear, pack: Callable[[], NativeWeight]) -> NativeWeight:
        section = next(self._sections, None)
        if section is None or not section.is_of(kind, linear):
            return pack()
        size = self._kernels.packed_bytes(kind, linear.outputs, linear.inputs)
        packed = self._memory[section.packed : section.packed + size]
        scales = self._memory[section.scales : section.end].view(torch.float32)
        return self._kernels.restore(kind, linear.inputs, packed, scales, linear.bias)


class _Writer:
    """Implements WeightCache by packing. A thread of its own writes the weights, so that nobody waits for the disk."""

    def __init__(self, plan: FilePlan, file: IO[bytes], place: Path) -> None:
        """Takes over the open temporary file, which becomes the file at `place` when it is complete."""
        self._plan = plan
        self._file = file
        self._place = place
        self._weights: SimpleQueue[tuple[WeightKind, NativeWeight] | None] = SimpleQueue()
        Thread(target=self._write, name="packed-cache", daemon=True).start()

    def obtain(self, kind: WeightKind, linear: Linear, pack: Callable[[], NativeWeight]) -> NativeWeight:
        weight = pack()
        self._weights.put((kind, weight))
        return weight

    def end(self) -> None:
        """There are no more weights. If some are lacking, the file is removed."""
        self._weights.put(None)

    def _write(self) -> None:
        begin = time.perf_counter()
        temporary = Path(self._file.name)
        try:
            with self._file:
                if not self._write_all():
                    temporary.unlink()
                    return
                temporary.replace(self._place)
        except OSError as error:
            logger.warning(_NOT_CACHED, error)
            with suppress(OSError):
                temporary.unlink()
            return
        size, seconds = _gib(self._plan.size), time.perf_counter() - begin
        logger.info("cache      %s of packed weights written to %s in %.1f s", size, self._place, seconds)

    def _write_all(self) -> bool:
        """Write the whole file, durably. Returns False if the model is not as planned, or its files changed."""
        file, plan = self._file, self._plan
        file.write(plan.header)
        for section in plan.sections:
            given = self._weights.get()
            if given is None or not section.is_of(*given):
                return False
            weight = given[1]
            file.seek(plan.start + section.packed)
            file.write(weight.packed.numpy().data)
            file.seek(plan.start + section.scales)
            file.write(weight.scales.numpy().data)
        if self._weights.get() is not None or Listing.of(plan.listing.model) != plan.listing:
            return False
        file.flush()
        os.fsync(file.fileno())
        return True


def _load(plan: FilePlan, folder: Path, descriptor: int) -> Tensor | None:
    """The bytes of the model's file; None if there is no file, or it is not as planned."""
    path = folder / plan.name
    try:
        with open(os.open(plan.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=descriptor), "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            check_owner(path, status)
            if status.st_size != plan.size or file.read(len(plan.header)) != plan.header:
                logger.warning("%s is damaged, so the weights are packed again", path)
                return None
            with suppress(OSError):  # the time of the last use, which a folder that is only read does not keep
                os.utime(file.fileno())
            return _read(file, plan.size)
    except FileNotFoundError:
        return None
    except OSError as error:  # also if another user can write to it, or it is a link
        logger.warning("Weights are packed again: %s", error)
        return None


def _read(file: BufferedReader, size: int) -> Tensor:
    """The bytes of a file, in huge pages: mapped, they would be in small ones, and decoding would be slower.

    Raises OSError if there are fewer than `size`.
    """
    memory = huge_pages(size)
    content = memory.numpy().data

    def read(start: int) -> None:
        end = min(start + _PIECE, size)
        while start < end:
            count = os.preadv(file.fileno(), [content[start:end]], start)
            if count == 0:
                raise OSError(errno.EIO, "the file ends early", file.name)
            start += count

    with ThreadPoolExecutor(_READERS) as readers:
        for _ in readers.map(read, range(0, size, _PIECE)):
            pass
    return memory


def _begin_writing(plan: FilePlan, folder: Path) -> _Writer | None:
    """Begin a file; None if another process writes the same one. Raises OSError, also if there is no room."""
    for path in folder.glob(f"*{UNFINISHED}"):
        if not _is_being_written(path):
            path.unlink(missing_ok=True)
        elif path.name.startswith(plan.name):
            return None
    _make_room(folder, plan.size)
    file = tempfile.NamedTemporaryFile(prefix=plan.name, suffix=UNFINISHED, dir=folder, delete=False)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _Writer(plan, file, folder / plan.name)
    except BaseException:
        file.close()
        Path(file.name).unlink()
        raise


def _is_being_written(path: Path) -> bool:
    """Whether a process has the lock of an unfinished file, which ends with the process."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def _make_room(folder: Path, size: int) -> None:
    """Remove the files that were not used for the longest time, as far as a new one needs it.

    Raises:
        OSError: if there is not enough room even then; nothing is removed.
    """
    disk = shutil.disk_usage(folder)
    limit, reserve = disk.total // _SHARE, min(size, _RESERVE)
    files = sorted(((path, path.stat()) for path in folder.glob(f"*{ENDING}")), key=lambda one: one[1].st_mtime_ns)
    kept, free = sum(status.st_size for _, status in files) + size, disk.free - size
    doomed: list[Path] = []
    for path, status in files:
        if kept <= limit and free >= reserve:
            break
        doomed.append(path)
        kept, free = kept - status.st_size, free + status.st_size
    if kept > limit or free < reserve:
        raise OSError(
            errno.ENOSPC,
            f"they take {_gib(size)}, but {_gib(disk.free)} of {_gib(disk.total)} are free, of which {_gib(reserve)} "
            f"stay free and the cache takes at most {_gib(limit)}",
            str(folder),
        )
    for path in doomed:
        path.unlink(missing_ok=True)
        logger.info("cache      %s removed, which was not used for the longest time", path)


@cache
def _code_digest() -> str:
    """A digest of the code between checkpoints and the kernels, which have their own in their layout's name."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for part in _CODE:
        for path in sorted((package / part).rglob("*.py")):
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _up(offset: int, step: int) -> int:
    return -(-offset // step) * step


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
