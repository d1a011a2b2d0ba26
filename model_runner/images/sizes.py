"""To which sizes the image processors of transformers scale an image. Heights come before widths, in pixels.

The formulas, with their roundings, follow the image processors of transformers 5.24 for the named models.
"""

import math
from collections.abc import Sequence

_GRANITE_SIDE = 16
"""Tiles of Granite Docling at most in a line or column."""
_LARGEST = 4096
"""The longest side of an image for Idefics 3."""


def patches_at_most(height: int, width: int, longest: tuple[int, int], patch: int) -> tuple[int, int]:
    """Pixtral: the lines and columns of patches of an image that is scaled down to fit; 0 if a side becomes nothing."""
    ratio = max(height / longest[0], width / longest[1])
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return (height - 1) // patch + 1, (width - 1) // patch + 1


def idefics3_tiles(height: int, width: int, longest: int | None, tile: int) -> tuple[int, int]:
    """Idefics 3: the lines and columns of tiles of an image whose longer side becomes `longest`; 0, 0 for one tile."""
    if longest is not None:
        height, width = _with_longest(height, width, longest)
    aspect = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / aspect) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * aspect) / tile) * tile
    return (height // tile, width // tile) if max(height, width) > tile else (0, 0)


def _with_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """The size with this longer side and an even shorter one, not above the largest that is allowed."""
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height += height % 2
    else:
        height, width = longest, int(longest * aspect)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    if max(height, width) <= _LARGEST:
        return height, width
    aspect = width / height
    if width >= height:
        return max(int(_LARGEST / aspect), 1), _LARGEST
    return _LARGEST, max(int(_LARGEST * aspect), 1)


def tiled_canvas(
    height: int, width: int, tile: tuple[int, int], least: int, most: int, side: int | None = None
) -> tuple[int, int]:
    """InternVL: the lines and columns of tiles, `least` to `most` in all, whose shape is nearest to the image's.

    Among equally near ones, more tiles win as long as the image has more than half of their pixels. There are at most
    `side` tiles in a line or column.
    """
    longest = most if side is None else min(most, side)
    canvases = sorted(
        (
            (columns, lines)
            for columns in range(1, longest + 1)
            for lines in range(1, longest + 1)
            if least <= columns * lines <= most
        ),
        key=lambda canvas: canvas[0] * canvas[1],
    )
    best, best_difference = (1, 1), math.inf
    for columns, lines in canvases:
        difference = abs(width / height - columns / lines)
        is_large = height * width > 0.5 * tile[0] * tile[1] * columns * lines
        if difference < best_difference or (difference == best_difference and is_large):
            best, best_difference = (columns, lines), difference
    return best[1], best[0]


Dense = tuple[int, float, float, float]
"""For dense pages: tiles at most, and the scale and the aspects by which such pages are found; 0 tests nothing."""


def granite_tiles(
    height: int, width: int, tile: tuple[int, int], most: tuple[int, int], dense: Dense
) -> tuple[int, int]:
    """Granite Docling: the lines and columns of tiles of a page, from `most[0]` to `most[1]`; more for dense pages."""
    lines, columns = tiled_canvas(height, width, tile, *most, _GRANITE_SIDE)
    max_tiles, max_scale, min_aspect, max_aspect = dense
    if most[1] <= 1 or not max_tiles or (max_scale <= 0 and min_aspect <= 0):
        return lines, columns
    aspect = width / height
    is_dense = (min_aspect <= 0 or aspect > min_aspect) and (max_aspect <= 0 or aspect <= max_aspect)
    if is_dense and (max_scale <= 0 or columns * tile[1] / width < max_scale):
        return tiled_canvas(height, width, tile, most[0], max_tiles, _GRANITE_SIDE)
    return lines, columns


def best_canvas(height: int, width: int, canvases: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """LLaVA-NeXT: the canvas on which an image keeps the most of its pixels, and among those the smallest."""

    def rank(canvas: tuple[int, int]) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        return used, used - canvas[0] * canvas[1]

    return max(canvases, key=rank)


def without_padding(height: int, width: int, lines: int, columns: int) -> tuple[int, int]:
    """LLaVA-NeXT: the lines and columns of patches of a canvas that an image in its middle covers."""
    if width / height > columns / lines:
        return lines - (lines - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return lines, columns - (columns - int(round(width * (lines / height), 7))) // 2 * 2


def qwen_size(height: int, width: int, block: int, least: int, most: int, frames: int = 1) -> tuple[int, int]:
    """Qwen2-VL and later: multiples of `block` with an area from `least` to `most`, which counts all frames."""
    lines, columns = round(height / block), round(width / block)
    area = frames * lines * columns * block * block
    if area > most:
        factor = math.sqrt(frames * height * width / most)
        lines, columns = (max(1, math.floor(side / factor / block)) for side in (height, width))
    elif area < least:
        factor = math.sqrt(least / (frames * height * width))
        lines, columns = (math.ceil(side * factor / block) for side in (height, width))
    return lines * block, columns * block


def paddle_size(height: int, width: int, block: int, least: int, most: int) -> tuple[int, int]:
    """PaddleOCR-VL: as Qwen, for an image whose sides are at least `block`."""
    if height < block:
        height, width = block, round(width * block / height)
    if width < block:
        height, width = round(height * block / width), block
    return qwen_size(height, width, block, least, most)


def glm_size(height: int, width: int, block: int, least: int, most: int) -> tuple[int, int]:
    """GLM-4V and later: as Qwen, for an image whose sides are at least `block`; the areas count two frames."""
    if height < block or width < block:
        scale = max(block / height, block / width)
        height, width = int(height * scale), int(width * scale)
    return qwen_size(height, width, block, least, most, frames=2)


def gemma4_blocks(height: int, width: int, block: int, most: int) -> tuple[int, int]:
    """Gemma 4: the lines and columns of blocks of an image that is scaled to about `most` blocks."""
    factor = math.sqrt(most * block * block / (height * width))
    lines, columns = math.floor(factor * height / block), math.floor(factor * width / block)
    if lines == 0:
        return 1, min(math.floor(width / height), most)
    if columns == 0:
        return min(math.floor(height / width), most), 1
    return lines, columns


def minicpm_slices(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """MiniCPM-V: the lines and columns of slices of about `side` squared pixels, at most `most`; 0, 0 for none.

    Their shape is nearest to the image's; among equally near ones, the one with the most lines and the fewest slices.
    """
    wanted = min(math.ceil(height * width / (side * side)), most)
    if wanted <= 1:
        return 0, 0
    counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= most]
    grids = [(lines, count // lines) for count in counts for lines in range(1, count + 1) if count % lines == 0]
    aspect = math.log(width / height)
    best, best_difference = (1, 1), math.inf
    for lines, columns in grids:
        difference = abs(aspect - math.log(columns / lines))
        if difference < best_difference or (difference == best_difference and lines > best[0]):
            best, best_difference = (lines, columns), difference
    return best


def minicpm_size(height: float, width: float, side: int, block: int, *, may_grow: bool) -> tuple[int, int]:
    """MiniCPM-V: about `side` squared pixels in blocks; a smaller image is only rounded, unless it may grow."""
    if height * width > side * side or may_grow:
        aspect = width / height
        height = int(side / math.sqrt(aspect))
        width = int(height * aspect)
    return max(round(height / block), 1) * block, max(round(width / block), 1) * block


def minicpm_slice(height: int, width: int, grid: tuple[int, int], side: int, block: int) -> tuple[int, int]:
    """MiniCPM-V: the size of each slice of an image that is cut into these lines and columns."""
    lines, columns = grid
    shape = max(round(height / lines), 1), max(round(width / columns), 1)
    return minicpm_size(*shape, side, block, may_grow=True)
