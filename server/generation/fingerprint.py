"""What determines the answers, in a few characters: OpenAI's `system_fingerprint`."""

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from model_runner.models.repository import cache_folder, hash_file
from model_runner.runner_interface import RunnerInfo
from server import __version__
from server.config import Settings


class Fingerprint:
    """Of a server, from the content of its models' files on.

    They are hashed in a thread of its own, while the engine loads them: the first time, large ones take minutes.
    """

    def __init__(self, folders: Sequence[Path], settings: Settings) -> None:
        """`folders` hold the models whose scores are in the answers. Raises OSError if one cannot be listed."""
        self._settings = settings
        self._files = [
            (index, path) for index, folder in enumerate(folders) for path in sorted(folder.iterdir()) if path.is_file()
        ]
        self._digest: Future[str] = Future()
        self._digest.set_running_or_notify_cancel()  # nobody who stops waiting ends it
        threading.Thread(target=self._run, name="samewise-fingerprint", daemon=True).start()

    @property
    def is_known(self) -> bool:
        """Whether the files are hashed, so that no answer waits for that any more."""
        return self._digest.done() and self._digest.exception() is None

    async def wait_known(self) -> None:
        """Returns when the files are hashed. Raises OSError if one of them cannot be read."""
        await asyncio.wrap_future(self._digest)

    async def of(self, info: RunnerInfo) -> str:
        """Changes whenever the answer to the same request may. With --no-exact answers also depend on what else runs.

        How the server speculates is no part of it: drafts that are verified by `match` never change an answer, and
        the other ways, which a request must ask for, promise no answer that could be told again.

        Raises OSError if a file of the models cannot be read.
        """
        digest = self._digest.result() if self._digest.done() else await asyncio.wrap_future(self._digest)
        engine = (info.hardware, info.software, info.device, info.dtype, info.kv_dtype, info.rows, info.kernels)
        sizes = (str(info.block_size), str(info.max_model_len))
        settings = (f"exact={self._settings.exact}", self._settings.logprobs)
        parts = (__version__, digest, *engine, *sizes, *settings)
        return "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def _run(self) -> None:
        try:
            self._digest.set_result(self._hash_files())
        except Exception as error:  # noqa: BLE001 - raised again by whoever asks
            self._digest.set_exception(error)

    def _hash_files(self) -> str:
        digest, cache = hashlib.sha256(), cache_folder()
        for index, path in self._files:
            digest.update(f"{index}\n{path.name}\n{hash_file(path, cache)}\n".encode())
        return digest.hexdigest()
