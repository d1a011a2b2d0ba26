"""Features of images, computed in a thread next to the steps, one image at a time, and kept in bounded memory.

The thread has a lower priority than the steps: a tower takes seconds on a CPU, and running requests must not wait for
it. Features depend on one image alone, so features that were evicted are computed again with the same bits.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from model_runner.contract import Failure
from model_runner.images.decoding import ImageError
from model_runner.images.image import Image
from model_runner.runner_interface import ImageFeatures, ImageStats

logger = logging.getLogger("samewise.runner")

Rows = TypeVar("Rows")

_NICENESS = 15
"""The thread's niceness. Next to steps it gets what they leave, a third of a core with two of them; with 7 it would get
half, and steps would take half as long again. Next to other busy programs it gets a thirtieth."""
_FAILED = "an image could not be encoded; the server's log has the reason"

Key = tuple[str, bytes, int]
"""Salt, digest and number of rows."""


def key_of(salt: str, image: Image) -> Key:
    """The key of an image's features. Salted requests find no others', or their time would tell who sent them."""
    return salt, image.digest, image.num_rows


@dataclass(slots=True)
class _Entry(Generic[Rows]):
    image: Image | None
    """None once it is done: the file may be large."""
    num_bytes: int
    rows: Rows | None = None
    failure: Failure | None = None
    holders: set[str] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        return self.rows is not None or self.failure is not None


class FeatureCache(ImageFeatures, Generic[Rows]):
    """Features by salt and digest, least recently used first. The thread starts with the first image."""

    def __init__(self, encode: Callable[[Image], Rows], row_bytes: int, limit: int) -> None:
        """Computes nothing yet.

        Args:
            encode: computes the feature rows of an image, in the thread. Raises ImageError for a bad file.
            row_bytes: memory of a feature row.
            limit: bytes of all features. One request alone may hold more.
        """
        self._encode = encode
        self._row_bytes = row_bytes
        self._limit = limit
        self._entries: OrderedDict[Key, _Entry[Rows]] = OrderedDict()
        self._held: dict[str, set[Key]] = {}
        self._changed = threading.Condition()
        self._has_news = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._stats = ImageStats()

    def rows(self, salt: str, image: Image) -> Rows:
        """The feature rows of an image, which somebody holds and which have been computed."""
        with self._changed:
            rows = self._entries[key_of(salt, image)].rows
        assert rows is not None, "features are computed before a step needs them"
        return rows

    def hold(self, key: str, salt: str, images: Sequence[Image]) -> bool:
        with self._changed:
            wanted = {key_of(salt, image): image for image in images}
            known = {name: entry for name in wanted if (entry := self._entries.get(name)) is not None}
            new_bytes = sum(
                image.num_rows * self._row_bytes
                for name, image in wanted.items()
                if name not in known or not known[name].holders
            )
            held_bytes = sum(entry.num_bytes for entry in self._entries.values() if entry.holders)
            is_alone = not any(entry.holders - {key} for entry in self._entries.values())
            if new_bytes and not is_alone and held_bytes + new_bytes > self._limit:
                return False
            hits = sum(entry.rows is not None and key not in entry.holders for entry in known.values())
            self._stats = replace(self._stats, hits=self._stats.hits + hits)
            for name, image in wanted.items():
                entry = self._entries.setdefault(name, _Entry(image, image.num_rows * self._row_bytes))
                entry.holders.add(key)
                self._entries.move_to_end(name)
            self._held.setdefault(key, set()).update(wanted)
            self._start()
            self._changed.notify_all()
        return True

    def is_ready(self, key: str) -> bool:
        with self._changed:
            return all(self._entries[name].is_done for name in self._held.get(key, ()))

    def failure(self, key: str) -> Failure | None:
        with self._changed:
            failures = (self._entries[name].failure for name in self._held.get(key, ()))
            return next(filter(None, failures), None)

    def release(self, key: str) -> None:
        with self._changed:
            for name in self._held.pop(key, ()):
                entry = self._entries[name]
                entry.holders.discard(key)
                if not entry.holders and entry.rows is None:
                    del self._entries[name]  # nobody waits for it, or it failed
            self._evict()

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_news, timeout_s)
            self._has_news = False

    def stats(self) -> ImageStats:
        with self._changed:
            entries = self._entries.values()
            return replace(
                self._stats,
                waiting=sum(not entry.is_done for entry in entries),
                held_bytes=sum(entry.num_bytes for entry in entries if entry.holders),
                cached_bytes=sum(entry.num_bytes for entry in entries if entry.rows is not None),
            )

    def close(self) -> None:
        """End the thread after the image that it is computing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="images", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # not on every system, and not in every container
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (job := self._next()) is not None:
            name, image = job
            start = time.perf_counter()
            rows, failure = self._try(image)
            self._finish(name, rows, failure, time.perf_counter() - start)
            del rows  # or it would outlive its eviction until the next image

    def _next(self) -> tuple[Key, Image] | None:
        """Wait for the next image; None at the end. Images are computed in the order in which they were asked for."""
        with self._changed:
            while not self._is_closed:
                for name, entry in self._entries.items():
                    if entry.image is not None:
                        return name, entry.image
                self._changed.wait()
        return None

    def _try(self, image: Image) -> tuple[Rows | None, Failure | None]:
        try:
            return self._encode(image), None
        except ImageError as error:
            return None, Failure(str(error), by_request=True)
        except Exception:
            logger.exception("An image of %d feature rows could not be encoded.", image.num_rows)
            return None, Failure(_FAILED)

    def _finish(self, name: Key, rows: Rows | None, failure: Failure | None, seconds: float) -> None:
        with self._changed:
            encoded = self._stats.encoded + (failure is None)
            self._stats = replace(self._stats, encoded=encoded, encode_s=self._stats.encode_s + seconds)
            if (entry := self._entries.get(name)) is not None:  # somebody still waits for it
                entry.image, entry.rows, entry.failure = None, rows, failure
            self._evict()
            self._has_news = True
            self._changed.notify_all()

    def _evict(self) -> None:
        """Forget features that nobody holds, the least recently used first, until the rest fits."""
        total = sum(entry.num_bytes for entry in self._entries.values())
        for name, entry in list(self._entries.items()):
            if total <= self._limit:
                return
            if not entry.holders:
                total -= entry.num_bytes
                del self._entries[name]
