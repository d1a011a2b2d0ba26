"""Rotary positions of prompts with images, for models that count them in three axes (M-RoPE, arXiv:2409.12191).

Tokens before the first image have their place as their position. The rows of an image have a frame, a line and a
column, counted from the position at its start. After it, positions go on from the largest of these. So they fall behind
the places, by which the cache, windows and causality go. Nothing is stored for each place: positions of any place
follow from the images.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from model_runner.image import Image

IntArray = npt.NDArray[np.int64]


def rotary_positions(images: Sequence[Image]) -> "RotaryPositions | None":
    """The rotary positions of a prompt with these images; None if they are the places, as in models without grids."""
    return RotaryPositions(images) if images and images[0].grid else None


class RotaryPositions:
    """Rotary positions of the places of one prompt and its output."""

    def __init__(self, images: Sequence[Image]) -> None:
        """Takes the images of a prompt, whose rows have grids and stand together."""
        self._starts = np.array([image.start for image in images], dtype=np.int64)
        self._ends = np.array([image.end for image in images], dtype=np.int64)
        self._grids = [image.grid or (1, 1, 1) for image in images]
        behind = [0]
        """How far positions are behind places, before each image and after the last."""
        for image, grid in zip(images, self._grids, strict=True):
            behind.append(behind[-1] + image.num_rows - max(grid))
        self._behind = np.array(behind, dtype=np.int64)

    def of(self, places: IntArray) -> IntArray:
        """Places [n] -> positions [3, n]: frame, height and width."""
        before = np.searchsorted(self._ends, places, side="right")  # images that end before each place
        positions = np.tile(places - self._behind[before], (3, 1))
        for number, (start, grid) in enumerate(zip(self._starts, self._grids, strict=True)):
            inside = (before == number) & (places >= start)
            if inside.any():
                axes = np.unravel_index(places[inside] - start, grid)
                positions[:, inside] = np.stack(axes) + (start - self._behind[number])
        return positions
