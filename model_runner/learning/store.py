"""Stores trained heads across restarts: `<cache folder>/learnt/<fingerprint>/heads-<version>.safetensors`.

A file is written under another name, flushed to disk and renamed, so that it is either complete or absent. Files are
checked when they are read. A file that is damaged, or belongs to another model or shape, is skipped with a warning. The
previous generation is used instead, or in the end the server's initial heads.

The files hold weights, not tokens; but weights that were trained on traffic reflect it.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from model_runner.heads.base import Heads, HeadsError, TargetShape
from model_runner.heads.checkpoint import HeadsCheckpoint
from model_runner.heads.loading import heads_checkpoint, heads_of, stored_as
from model_runner.hub.repository import hash_file
from model_runner.json_files import LARGE, parse_object
from model_runner.learning.plan import learning_needs
from model_runner.read_numbers import whole_number

_METADATA = "__metadata__"
_ALIGNMENT = 8
"""Alignment of the weights after the header, as the format requires."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """Contents of a file."""

    version: int
    fingerprint: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def pack_learnt(heads: Heads, version: int, fingerprint: str, num_layers: int) -> bytes:
    """The file of these heads; `num_layers` is the target's."""
    config, tensors = heads_checkpoint(heads, num_layers)
    metadata = {"config": json.dumps(config), "version": str(version), "fingerprint": fingerprint}
    header, weights = _split(save(stored_as(torch.bfloat16, tensors), metadata))
    header[_METADATA]["checksum"] = _checksum(header, weights)
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text + weights


def read_learnt(content: bytes) -> Learnt:
    """Read a file's header. Raises HeadsError if it is not such a file, or is damaged."""
    try:
        header, weights = _split(content)
        metadata = header[_METADATA]
        if metadata.pop("checksum") != _checksum(header, weights):
            raise HeadsError("its checksum does not match")
        config = parse_object(metadata["config"].encode(), "their configuration")
        return Learnt(int(metadata["version"]), metadata["fingerprint"], config, dict(load(content)))
    except (struct.error, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HeadsError(f"it is not a file of trained heads ({type(error).__name__})") from error


def load_learnt(checkpoint: bytes, target: TargetShape) -> Heads:
    """The heads in float32 on the CPU, in evaluation mode. Raises HeadsError if they are damaged or do not fit."""
    learnt = read_learnt(checkpoint)
    return heads_of(HeadsCheckpoint(f"learnt heads, version {learnt.version},", learnt.config, learnt.tensors), target)


def _split(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """Split a file into header and weights. Raises ValueError or struct.error."""
    (length,) = struct.unpack_from("<Q", content)
    start = struct.calcsize("<Q") + length
    header = parse_object(content[struct.calcsize("<Q") : start], "the header", most=LARGE)
    return header, memoryview(content)[start:]


def _checksum(header: dict[str, Any], weights: memoryview) -> str:
    """Checksum of the weights and of the header without its checksum, independent of the header's formatting."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    digest.update(weights)
    return digest.hexdigest()


logger = logging.getLogger("samewise.learning")

GENERATIONS = 2
"""Number of files to keep: one to use, and a spare in case it is damaged."""
_PARTIAL = ".partial"


def fingerprint(model: Path, kind: str, heads: Path | None, cache: Path) -> str:
    """Identifies the training data: the target's files, the kind of heads, and the initial heads, if there are any.

    The first call reads all files; hashes of large ones are cached in `cache`. Raises OSError.
    """
    digest = hashlib.sha256(kind.encode())
    for folder in (model, heads):
        digest.update(b"\n--\n")
        files = [] if folder is None else sorted(file for file in folder.iterdir() if file.is_file())
        for file in files:
            digest.update(f"{file.name} {hash_file(file, cache)}\n".encode())
    return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Stored:
    """A generation of heads that was read."""

    version: int
    checkpoint: bytes
    heads: Heads


class HeadsStore:
    """The files of one fingerprint. If several servers share the folder, only the first writes; others only read."""

    def __init__(self, cache: Path, identity: str, target: TargetShape, like: Heads) -> None:
        """Takes the lock, if it is free, until the process ends.

        Args:
            cache: the cache folder.
            identity: result of `fingerprint`.
            target: shape of the target.
            like: heads of the kind and shape to read.
        """
        self._folder = cache / "learnt" / identity
        self._identity = identity
        self._target = target
        self._like = like
        self._lock = self._take_lock()
        self._warned = False
        self._good: list[int] = []
        """Versions whose files are intact, in ascending order."""
        if self._lock is not None:
            for orphan in self._folder.glob(f"*{_PARTIAL}"):  # left by a process that was killed while it wrote
                self._remove(orphan)

    @property
    def last_version(self) -> int:
        """The highest version of any file, intact or not; 0 if there is none."""
        return max(self._versions(), default=0)

    def pack(self, heads: Heads, version: int) -> bytes:
        """Serialise heads; never raises."""
        return pack_learnt(heads, version, self._identity, self._target.num_layers)

    def load(self, checkpoint: bytes) -> Heads:
        """Read serialised heads. Raises HeadsError, also for heads of another kind or shape."""
        heads, like = load_learnt(checkpoint, self._target), self._like
        if heads.kind != like.kind or learning_needs(heads) != learning_needs(like):
            raise HeadsError(f"it holds {heads.kind} heads on {', '.join(heads.needs)} instead of {like.kind} heads")
        if heads.depth != like.depth:
            raise HeadsError(f"its heads predict {heads.depth} tokens ahead, the initial ones {like.depth}")
        return heads

    def read(self) -> Stored | None:
        """The newest intact generation."""
        found: Stored | None = None
        for version in sorted(self._versions(), reverse=True):
            file = self._file(version)
            try:
                content = file.read_bytes()
                learnt = read_learnt(content)
                if learnt.fingerprint != self._identity:
                    raise HeadsError("it belongs to another model, or to other heads")
                heads = self.load(content)
            except (OSError, HeadsError) as error:
                logger.warning("Skipping %s: %s", file, error)
                continue
            self._good.insert(0, version)
            found = found or Stored(version, content, heads)
        return found

    def write(self, version: int, checkpoint: bytes) -> bool:
        """Store a generation and remove all but two; returns whether it was stored.

        If the disk fails repeatedly, only the first failure is logged.
        """
        if self._lock is None:
            return False
        try:
            self._write(self._file(version), checkpoint)
        except OSError as error:
            if not self._warned:
                logger.warning("Trained heads cannot be stored in %s: %s", self._folder, error.strerror or error)
            self._warned = True
            return False
        self._warned = False
        self._good = [*self._good, version][-GENERATIONS:]
        for old in set(self._versions()).difference(self._good):
            self._remove(self._file(old))
        return True

    def _write(self, file: Path, content: bytes) -> None:
        partial = file.with_suffix(f".{os.getpid()}{_PARTIAL}")
        try:
            with partial.open("wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            partial.replace(file)
        except OSError:
            self._remove(partial)
            raise
        folder = os.open(self._folder, os.O_RDONLY)  # the new name also has to be flushed
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _take_lock(self) -> int | None:
        """A descriptor that holds the lock; the system releases it when the process ends."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            logger.warning("Trained heads cannot be stored in %s: %s", self._folder, error.strerror or error)
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            logger.warning("Another server stores its trained heads in %s; this one does not store any", self._folder)
            return None
        return descriptor

    def _versions(self) -> list[int]:
        names = (file.stem.removeprefix("heads-") for file in self._folder.glob("heads-*.safetensors"))
        return [version for name in names if (version := whole_number(name)) is not None]

    def _file(self, version: int) -> Path:
        return self._folder / f"heads-{version:08d}.safetensors"

    @staticmethod
    def _remove(file: Path) -> None:
        with contextlib.suppress(OSError):
            file.unlink()
