"""Streams of a response that somebody else makes, or that was made."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol

from server.api.responses.stream import SentFrames


class Followed(Protocol):
    """What has frames that others may read."""

    num_told: int
    """Of the frames, those that may be read."""
    has_ended: bool
    followers: "set[Following]"
    """Who is to be woken when there are more."""

    @property
    def frames(self) -> Sequence[bytes]:
        """All that are there."""
        ...


class Made:
    """All frames of a response that has ended."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        self.frames = frames
        self.num_told = len(frames)
        self.has_ended = True
        self.followers: set[Following] = set()


class Following(SentFrames):
    """The frames from one of them on, both a Source and its Frames. What makes them does not mind who follows."""

    def __init__(self, followed: Followed, start: int) -> None:
        self._followed = followed
        self._place = start
        self._woken = asyncio.Event()
        followed.followers.add(self)

    async def wait(self) -> bool:
        """See Source."""
        if self._place >= self._followed.num_told:
            if self._followed.has_ended:
                return False
            await self._woken.wait()
        self._woken.clear()
        return True

    def wake(self) -> None:
        """See Source."""
        self._woken.set()

    def take(self) -> Iterator[bytes]:
        """See Source."""
        end = self._followed.num_told
        yield from self._followed.frames[self._place : end]
        self._place = max(self._place, end)

    def close(self) -> None:
        """See Source."""
        self._followed.followers.discard(self)
