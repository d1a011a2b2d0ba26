"""Packed weights on disk: the first start writes them, later starts read them.

A safetensors file has the weights that one model packs from plain numbers, in one kind and layout. The Nth of them, in
the order in which the model packs them, are the tensors `N.packed` (bytes) and `N.scales` (float32).

The header, with its metadata, follows from the model, the checkpoint's files, the kernels and this code. A file is read
only if it begins with exactly the expected header, and its name ends with a hash of it. Nothing here is ever needed:
whatever goes wrong, weights are packed in memory.
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from io import BufferedReader
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO

import torch

from model_runner.kernels.library import Kernels, NativeWeight, WeightKind
from model_runner.kernels.library_folder import check_owner, locked, opened
from model_runner.native.packer import NativePacker
from model_runner.spec.model_folder import Listing
from model_runner.spec.model_spec import ModelSpec
from model_runner.weights.matrix import Linear

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
_NOT_CACHED = "Packed weights are not cached, so the next start packs them again: %s"
_PACKED_AGAIN = "Weights are packed again: %s"
_PIECE = 4 << 20
"""Packed bytes that a thread reads at once."""
_READERS = 4
_CODE = ("kernels", "models", "weights", "gguf")
"""Subpackages that lead from a checkpoint to packed weights."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The name and content of a model's file, known before anything is packed."""

    name: str
    header: bytes
    linears: Sequence[tuple[WeightKind, Linear]]
    """The kinds and layers of the weights, in the order of the file."""
    size: int
    """Bytes of the file."""
    listing: Listing


@contextmanager
def cached(packer: NativePacker, spec: ModelSpec, listing: Listing, folder: Path) -> Iterator[NativePacker]:
    """A packer for a model that takes weights from the model's file below the cache folder, or writes them to it.

    It is the same packer if the model is small, or the cache cannot be used; the log says why.

    Args:
        packer: packs the linears of `spec`, in their order, and the head in int8.
        spec: the model.
        listing: its files, from before the specification was read, so that it is not newer than what is packed.
        folder: the cache folder.
    """
    weights = _open(packer, spec, listing, folder / FOLDER)
    if weights is None:
        yield packer
        return
    try:
        yield replace(packer, cache=weights)
    finally:
        weights.end()


def _open(packer: NativePacker, spec: ModelSpec, listing: Listing, folder: Path) -> "_Reader | _Writer | None":
    if listing.digest is None or (plan := _plan(packer, spec, listing)) is None:
        return None
    try:
        with opened(folder) as descriptor:
            if (file := _find(plan, folder, descriptor)) is not None:
                return _Reader(packer.kernels, plan, file)
            with locked(descriptor):
                return _begin_writing(plan, folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: the system gives no more threads
        logger.warning(_NOT_CACHED, error)
        return None


def _plan(packer: NativePacker, spec: ModelSpec, listing: Listing) -> FilePlan | None:
    """Describe the file that the model must have, with the weights that it packs from plain numbers; None if small."""
    *inner, head = spec.linears
    linears: list[tuple[WeightKind, Linear]] = []
    tensors, end = {}, 0
    for own, linear in [*((packer, linear) for linear in inner), (packer.in_int8, head)]:
        if (kind := own.dense_kind(linear)) is None:
            continue
        for part, dtype, count, size in (
            ("packed", "I8", own.num_bytes(linear), 1),
            ("scales", "F32", linear.outputs, torch.float32.itemsize),
        ):
            place = [end, end := end + count * size]
            tensors[f"{'+'.join(linear.paths)}.{part}"] = {"dtype": dtype, "shape": [count], "data_offsets": place}
        linears.append((kind, linear))
    if end < SMALLEST:
        return None
    metadata = {
        "checkpoint": listing.digest,
        "code": _code_digest(),
        "layout": packer.kernels.layout,
        "weights": json.dumps([(kind, linear.outputs, linear.inputs) for kind, linear in linears]),
    }
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    header = struct.pack("<Q", len(text)) + text
    model = listing.model
    origin = model.parents[1] if model.parent.name == "snapshots" else model  # as the hub names folders
    title = re.sub(r"[^A-Za-z0-9._-]+", "_", origin.name.removeprefix("models--"))[:100]
    name = f"{title}-{hashlib.sha256(header).hexdigest()[:16]}{ENDING}"
    return FilePlan(name, header, linears, len(header) + end, listing)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A weight that is being read."""

    linear: Linear
    weight: NativeWeight
    size: int
    counts: Iterator[int]
    """The bytes of each part. Waits until they are read, and raises OSError if they cannot be."""


class _Reader:
    """Implements WeightCache on a file, which several threads read ahead.

    Weights are copied to huge pages: mapped, they would be in small ones, and decoding would be slower.
    """

    def __init__(self, kernels: Kernels, plan: FilePlan, file: BufferedReader) -> None:
        """Takes over the open file."""
        self._plan = plan
        self._file = file
        self._threads = ThreadPoolExecutor(_READERS)
        self._begin = time.perf_counter()
        self._at = len(plan.header)
        self._readings = iter([self._read(kernels, *planned) for planned in plan.linears])

    def obtain(self, kind: WeightKind, linear: Linear, pack: Callable[[], NativeWeight]) -> NativeWeight:
        reading = next(self._readings, None)
        if reading is None or reading.linear is not linear:
            return pack()
        try:
            if sum(reading.counts) == reading.size:
                return reading.weight
            raise OSError(errno.EIO, "the file ends early", self._plan.name)
        except OSError as error:
            logger.warning(_PACKED_AGAIN, error)
            return pack()

    def end(self) -> None:
        self._threads.shutdown()
        self._file.close()
        size, seconds = _gib(self._plan.size), time.perf_counter() - self._begin
        logger.info("cache      %s of packed weights read from %s in %.1f s", size, self._plan.name, seconds)

    def _read(self, kernels: Kernels, kind: WeightKind, linear: Linear) -> _Reading:
        """Begin to read the next weight."""
        weight = kernels.start(kind, linear.outputs, linear.inputs, linear.bias)
        packed, scales = (tensor.numpy().data.cast("B") for tensor in (weight.packed, weight.scales))
        parts = [[packed[start : start + _PIECE]] for start in range(0, len(packed), _PIECE)]
        parts[-1].append(scales)  # which follow in the file, too
        places = range(self._at, self._at + len(packed), _PIECE)
        size = len(packed) + len(scales)
        self._at += size
        return _Reading(linear, weight, size, self._threads.map(partial(os.preadv, self._file.fileno()), parts, places))


class _Writer:
    """Implements WeightCache by packing. A thread of its own writes the weights, so that nobody waits for the disk."""

    def __init__(self, plan: FilePlan, file: IO[bytes], place: Path) -> None:
        """Takes over the open temporary file, which becomes the file at `place` when it is complete."""
        self._plan = plan
        self._file = file
        self._place = place
        self._weights: SimpleQueue[tuple[Linear, NativeWeight] | None] = SimpleQueue()
        Thread(target=self._write, name="packed-cache", daemon=True).start()

    def obtain(self, kind: WeightKind, linear: Linear, pack: Callable[[], NativeWeight]) -> NativeWeight:
        weight = pack()
        self._weights.put((linear, weight))
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
                    return
                temporary.replace(self._place)
            size, seconds = _gib(self._plan.size), time.perf_counter() - begin
            logger.info("cache      %s of packed weights written to %s in %.1f s", size, self._place, seconds)
        except OSError as error:
            logger.warning(_NOT_CACHED, error)
        finally:
            with suppress(OSError):
                temporary.unlink()

    def _write_all(self) -> bool:
        """Write the whole file, durably. Returns False if the model is not as planned, or its files changed."""
        file, plan = self._file, self._plan
        file.write(plan.header)
        for _, linear in plan.linears:
            given = self._weights.get()
            if given is None or given[0] is not linear:
                return False
            file.write(given[1].packed.numpy().data)
            file.write(given[1].scales.numpy().data)
        if self._weights.get() is not None or Listing.of(plan.listing.model) != plan.listing:
            return False
        file.flush()
        os.fsync(file.fileno())
        return True


def _find(plan: FilePlan, folder: Path, descriptor: int) -> BufferedReader | None:
    """The model's open file; None if there is no file, or it is not as planned."""
    path = folder / plan.name
    try:
        with ExitStack() as stack:
            descriptor = os.open(plan.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=descriptor)
            file = stack.enter_context(open(descriptor, "rb"))  # noqa: PTH123
            status = os.fstat(descriptor)
            check_owner(path, status)
            if status.st_size != plan.size or file.read(len(plan.header)) != plan.header:
                raise OSError(errno.EIO, "it is damaged", str(path))
            with suppress(OSError):  # the time of the last use, which a folder that is only read does not keep
                os.utime(descriptor)
            stack.pop_all()
            return file
    except FileNotFoundError:
        return None
    except OSError as error:  # also if another user can write to it, or it is a link
        logger.warning(_PACKED_AGAIN, error)
        return None


def _begin_writing(plan: FilePlan, folder: Path) -> _Writer | None:
    """Begin a file; None if another process writes the same one. Raises OSError, also if there is no room."""
    for path in folder.glob(f"*{UNFINISHED}"):
        try:
            with suppress(FileNotFoundError), path.open("r+b") as unfinished:
                fcntl.flock(unfinished, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer holds the lock until it ends
                path.unlink()
        except BlockingIOError:
            if path.name.startswith(plan.name):
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


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
