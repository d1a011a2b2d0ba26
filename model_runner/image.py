"""An image of a prompt, as the server, the scheduler and the runner exchange it.

The prompt stays a tuple of token ids; at the places of an image these are the model's image token. Only the images'
runs say where an image stands: an image token elsewhere, typed by a user or drawn by the model, is an ordinary token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class ImageRun(NamedTuple):
    """Consecutive places of a prompt that hold consecutive feature rows of an image."""

    place: int
    """The first place."""
    row: int
    """The image's feature row at that place."""
    length: int
    """Number of places and rows."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image at its places in a prompt."""

    data: bytes
    """The file as the client sent it: PNG, JPEG, WebP or GIF. It has been decoded once, so it can be decoded again."""
    digest: bytes
    """32 bytes: SHA-256 of the pixels and of all that decides the features (see decoding.py). Equal digests have equal
    features."""
    runs: tuple[ImageRun, ...]
    """Where its feature rows stand, in ascending order of places and of rows. Together they hold every row once."""
    detail: str = ""
    """The resolution that the client asked for, if the model's processor has a choice; otherwise empty."""
    grid: tuple[int, int, int] | None = None
    """Frames, height and width in feature rows, for models with rotary positions in three axes; otherwise None."""

    @property
    def num_rows(self) -> int:
        """Number of feature rows."""
        return sum(run.length for run in self.runs)

    @property
    def start(self) -> int:
        """The place of the first feature row."""
        return self.runs[0].place

    @property
    def end(self) -> int:
        """The place after the last feature row."""
        return self.runs[-1].place + self.runs[-1].length

    def within(self, start: int, end: int) -> Iterator[ImageRun]:
        """The parts of the runs at places from `start` up to `end`."""
        for run in self.runs:
            first, last = max(run.place, start), min(run.place + run.length, end)
            if first < last:
                yield ImageRun(first, run.row + first - run.place, last - first)
