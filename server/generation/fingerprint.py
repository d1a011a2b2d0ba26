"""OpenAI's `system_fingerprint`: a hash of everything that determines the answers."""

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from model_runner.hub.choice import Wanted, choose_small, choose_weights
from model_runner.hub.repository import cache_folder, hash_file
from model_runner.runner_interface import RunnerInfo
from model_runner.weights.safetensors_head import INDEX
from server import __version__
from server.config import Settings

_ARITHMETIC = "2"
"""Increase it if a change of arithmetic changes answers, because the version stays the same until the next release."""


_LIBRARIES = ("tokenizers", "llguidance", "jinja2", "pillow", "numpy")
"""Libraries that prepare prompts and images, and constrain outputs."""
_DECIDING = (
    *("exact", "logprobs", "max_model_len", "tool_parser", "reasoning_parser", "template_date", "score_tokens"),
    "literal_messages",
)
"""Settings that decide answers, next to those that `RunnerInfo` has."""


class Fingerprint:
    """The fingerprint of a server, from the content of its models' files and the settings that affect answers.

    A thread hashes the files while the engine loads them. The first time, large files take minutes.
    """

    def __init__(self, folders: Sequence[Path], settings: Settings, chat_template: str = "") -> None:
        """`folders` hold the models that affect answers; a `chat_template` replaces the model's own.

        Raises OSError if a folder cannot be listed, and ModelNotFoundError if it lacks a part of its weights.
        """
        # LongRoPE's factors follow from the limit that is set, not from the one that fits in memory.
        decided = [f"{name}={getattr(settings, name)}" for name in _DECIDING]
        replaced = [f"template={chat_template}"] if chat_template else []
        self._own_parts = (*decided, *_libraries(), *replaced)
        """Parts of the fingerprint that stay the same while the server runs."""
        self._files = [(index, path) for index, folder in enumerate(folders) for path in _files_of(folder)]
        self._digest: Future[str] = Future()
        self._digest.set_running_or_notify_cancel()  # cancelled waiters must not cancel it
        threading.Thread(target=self._run, name="samewise-fingerprint", daemon=True).start()

    @property
    def is_known(self) -> bool:
        """Whether the files are hashed, so that answers need not wait."""
        return self._digest.done() and self._digest.exception() is None

    async def wait_known(self) -> None:
        """Returns when the files are hashed. Raises OSError if one of them cannot be read."""
        await asyncio.wrap_future(self._digest)

    async def of_files(self) -> str:
        """The SHA-256 of the files alone, in hexadecimal. Raises OSError if one of them cannot be read."""
        return self._digest.result() if self._digest.done() else await asyncio.wrap_future(self._digest)

    def digest_now(self) -> str:
        """The same if it is known; before, a SHA-256 of the files' names, sizes and times."""
        if self.is_known:
            return self._digest.result()
        digest = hashlib.sha256()
        for index, path in self._files:
            with suppress(OSError):
                found = path.stat()
                digest.update(f"{index}\n{path.name}\n{found.st_size}\n{found.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    async def of(self, info: RunnerInfo) -> str:
        """The fingerprint, which changes whenever the answer to the same request may.

        Speculation is not included: `match` never changes an answer, and other verification must be requested and
        promises no repeatable answer. With --no-exact, answers also depend on concurrent requests.

        Raises OSError if a model file cannot be read.
        """
        digest = await self.of_files()
        types = (info.dtype, info.kv_dtype, info.activation_type)
        engine = (info.hardware, info.software, info.device, *types, info.kernels)
        sizes = (str(info.block_size), str(info.max_model_len))
        parts = (__version__, _ARITHMETIC, digest, *engine, *sizes, *self._own_parts)
        return "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def _run(self) -> None:
        try:
            self._digest.set_result(self._hash_files())
        except Exception as error:  # noqa: BLE001 - raised again where it is read
            self._digest.set_exception(error)

    def _hash_files(self) -> str:
        digest, cache = hashlib.sha256(), cache_folder()
        for index, path in self._files:
            digest.update(f"{index}\n{path.name}\n{hash_file(path, cache)}\n".encode())
        return digest.hexdigest()


@cache
def _libraries() -> tuple[str, ...]:
    """The versions of libraries that affect answers."""
    return tuple(f"{name} {_version(name)}" for name in _LIBRARIES)


def _version(name: str) -> str:
    """The version of a library; empty if it is not installed, as Pillow may be on a server without images."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _files_of(folder: Path) -> list[Path]:
    """The files of a model's folder that decide its answers: those that a download takes.

    Raises OSError and ModelNotFoundError.
    """
    found = (*folder.iterdir(), *folder.glob("*/*"))
    paths = sorted(path.relative_to(folder).as_posix() for path in found if path.is_file())
    index = folder / INDEX
    weights = choose_weights(paths, index if index.is_file() else None, str(folder))
    weights = weights or [path for path in paths if path.lower().endswith(".gguf")]
    return [folder / path for path in sorted({*choose_small(paths, Wanted()), *weights})]
