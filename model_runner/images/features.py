"""Features of images, computed in a thread next to the steps, one image at a time, and kept in bounded memory.

The thread has a lower priority than the steps: a tower takes seconds on a CPU, and running requests must not wait for
it. Features depend on one image alone, so features that were evicted are computed again with the same bits.

After each image, the next one is of the client that was served least, and among its choices of the one that was served
least. So a choice with a hundred images delays others by one image at a time. A client that holds features for a choice
gets at most half of the memory for all of its choices, so that the other half is left to others.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from model_runner.contract import Failure
from model_runner.image import Image
from model_runner.images.decoding import ImageError
from model_runner.runner_interface import FeatureHolder, Holding, ImageFeatures, ImageStats

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
class _Held:
    """The features that are held for a choice."""

    holder: FeatureHolder
    names: set[Key] = field(default_factory=set)
    served: float = 0.0
    """Seconds for which they were computed, as far as they count for its turn."""


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
            limit: bytes of all features. A choice alone may hold more.
        """
        self._encode = encode
        self._row_bytes = row_bytes
        self._limit = limit
        self._entries: OrderedDict[Key, _Entry[Rows]] = OrderedDict()
        self._held: dict[str, _Held] = {}
        self._served: dict[str, float] = {}
        """Seconds for which images of a client were computed, divided by its weight. Others have `_fair`."""
        self._fair = 0.0
        """The service of a client that waited all the time and got its share. Clients that come begin with it."""
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

    @property
    def max_rows(self) -> int:
        """Feature rows for which there is memory."""
        return self._limit // self._row_bytes

    def hold(self, holder: FeatureHolder, images: Sequence[Image]) -> Holding:
        wanted = {key_of(holder.salt, image): image for image in images}
        with self._changed:
            held = self._held.get(holder.key) or _Held(holder)
            if (outcome := self._room_for(held, wanted)) is not Holding.HELD:
                return outcome
            entries = self._entries
            known = {name: entry for name in wanted if (entry := entries.get(name)) is not None}
            hits = sum(entry.rows is not None and holder.key not in entry.holders for entry in known.values())
            self._stats = replace(self._stats, hits=self._stats.hits + hits)
            self._lift(held)
            for name, image in wanted.items():
                entry = entries.setdefault(name, _Entry(image, self._bytes_of(image)))
                entry.holders.add(holder.key)
                entries.move_to_end(name)
            held.names.update(wanted)
            self._held[holder.key] = held
            self._start()
            self._changed.notify_all()
        return Holding.HELD

    def served(self, client: str) -> float:
        with self._changed:
            return self._served_of(client)

    def _served_of(self, client: str) -> float:
        return self._served.get(client, self._fair)

    def _bytes_of(self, image: Image) -> int:
        return image.num_rows * self._row_bytes

    def _room_for(self, held: _Held, wanted: Mapping[Key, Image]) -> Holding:
        """Whether features that a choice wants fit into memory, next to those that others hold."""
        mine = {name: self._bytes_of(image) for name, image in wanted.items()}
        mine |= {name: self._entries[name].num_bytes for name in held.names}
        needed = sum(mine.values())
        others = {name for one in self._held.values() if one is not held for name in one.names}
        client = held.holder.client
        of_client = {
            name for one in self._held.values() if one is not held and one.holder.client == client for name in one.names
        }
        new = sum(size for name, size in mine.items() if name not in others and name not in held.names)
        if not new or not others:
            return Holding.HELD
        total = sum(entry.num_bytes for entry in self._entries.values() if entry.holders) + new
        in_share = needed + sum(self._entries[name].num_bytes for name in of_client - mine.keys())
        if of_client and in_share > self._limit / 2:
            return Holding.OVER_SHARE
        return Holding.NO_MEMORY if total > self._limit else Holding.HELD

    def _lift(self, held: _Held) -> None:
        """Let a client and a choice that wait for nothing begin as if they had waited all the time.

        Otherwise they would save up the service that they did not need.
        """
        waiting = self._waiting()
        client = held.holder.client
        of_client = [one.served for one in waiting if one.holder.client == client]
        if not of_client:
            self._served[client] = max(self._served_of(client), self._fair)
        elif held not in waiting:
            held.served = max(held.served, min(of_client))

    def _waiting(self) -> list[_Held]:
        """The choices whose features are not all computed."""
        return [one for one in self._held.values() if not all(self._entries[name].is_done for name in one.names)]

    def is_ready(self, key: str) -> bool:
        with self._changed:
            return all(self._entries[name].is_done for name in self._names_of(key))

    def failure(self, key: str) -> Failure | None:
        with self._changed:
            failures = (self._entries[name].failure for name in self._names_of(key))
            return next(filter(None, failures), None)

    def release(self, key: str) -> None:
        with self._changed:
            for name in self._names_of(key):
                entry = self._entries[name]
                entry.holders.discard(key)
                if not entry.holders and entry.rows is None:
                    del self._entries[name]  # nobody waits for it, or it failed
            self._held.pop(key, None)
            self._evict()

    def _names_of(self, key: str) -> Collection[Key]:
        held = self._held.get(key)
        return () if held is None else held.names

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
            name, image, held = job
            start = time.perf_counter()
            rows, failure = self._try(image)
            self._finish(name, held, rows, failure, time.perf_counter() - start)
            del rows  # or it would outlive its eviction until the next image

    def _next(self) -> tuple[Key, Image, _Held] | None:
        """Wait for the next image, and return it with the choice whose turn it uses; None at the end."""
        with self._changed:
            while not self._is_closed:
                missing = [
                    (name, entry.image, self._held[key])
                    for name, entry in self._entries.items()
                    if entry.image is not None
                    for key in entry.holders
                ]
                if missing:
                    return min(missing, key=lambda one: self._turn(one[2]))
                self._advance(max(self._served.values(), default=0.0))
                self._changed.wait()
        return None

    def _advance(self, fair: float) -> None:
        """Raise the service of clients that come, and forget those that have no more and wait for nothing."""
        self._fair = max(self._fair, fair)
        waiting = {one.holder.client for one in self._waiting()}
        self._served = {
            client: served for client, served in self._served.items() if served > self._fair or client in waiting
        }

    def _turn(self, held: _Held) -> tuple[int, float, float]:
        """Sort key of choices. Equals have the order in which they asked."""
        return held.holder.tier, self._served_of(held.holder.client), held.served

    def _try(self, image: Image) -> tuple[Rows | None, Failure | None]:
        try:
            return self._encode(image), None
        except ImageError as error:
            return None, Failure(str(error), by_request=True)
        except Exception:
            logger.exception("An image of %d feature rows could not be encoded.", image.num_rows)
            return None, Failure(_FAILED)

    def _finish(self, name: Key, held: _Held, rows: Rows | None, failure: Failure | None, seconds: float) -> None:
        with self._changed:
            held.served += seconds
            client, weight = held.holder.client, held.holder.weight
            self._served[client] = self._served_of(client) + seconds / weight
            weights = {one.holder.client: one.holder.weight for one in self._waiting()} | {client: weight}
            self._advance(self._fair + seconds / sum(weights.values()))
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
