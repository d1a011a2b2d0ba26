"""How images stand in the prompts of each model family: the text around and inside an image, and its feature rows.

Everything follows from the files of a model folder and from an image's width and height, so neither the pixels nor
transformers are needed. The counts are the same as with transformers' processors, with which the tests compare.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from model_runner.images import sizes
from model_runner.images.decoding import Fault, ImageError
from model_runner.json_files import find_object

_LOW_SIDE = 512
"""The side of a square, in pixels, into which an image is scaled that a client asks for in low resolution."""
_FAKE = "<fake_token_around_image>"
_SCALED_BEYOND = 1.1
"""LLaVA-OneVision scales the rows of tiles down if their lines are so many times as long as the longest ones."""
_LOW_TOKENS = 70
"""The least number of rows of Gemma 4's image processor."""
_DEEPSEEK_TILES = (2, 6)
"""The least and most tiles that DeepSeek-OCR 2's processor asks for, whatever the image processor's file says."""
SEVERAL = "several"
"""The detail of images that are not alone in their prompt, where that matters."""
Piece = str | int
"""A text of special tokens and line breaks, or a number of feature rows."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The texts and feature rows that replace the placeholder of one image."""

    pieces: tuple[Piece, ...]
    grid: tuple[int, int, int] | None = None
    """Frames, height and width in feature rows, for models with rotary positions in three axes."""

    @property
    def num_rows(self) -> int:
        """Number of feature rows."""
        return sum(piece for piece in self.pieces if isinstance(piece, int))


Arrange = Callable[[int, int], Arrangement]
"""The arrangement of an image of this height and width."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How images stand in the prompts of one model. Picklable."""

    family: str
    """The model's type."""
    image_token: int
    """The token at the places of feature rows."""
    placeholder: str
    """The text that the chat template writes for an image."""
    arrange: Arrange
    around: tuple[str, str] = ("", "")
    """Texts that a chat template writes before and after the placeholder. Used if the template knows only texts."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with which the image processor must be called."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The image processor's settings. They decide the features, so they are part of an image's digest."""
    low: "Layout | None" = None
    """How images in low resolution stand in prompts; None if the image processor has no choice."""
    several: "Layout | None" = None
    """How each of several images of a prompt stands in it; None if their number does not matter."""
    number: tuple[str, str] | None = None
    """Texts around the image's number in its prompt, from 0, which then stands before the image."""

    def at(self, detail: str) -> "Layout":
        """The layout for images of this detail: `low`, SEVERAL, or anything else for the model's own resolution."""
        variant = {"low": self.low, SEVERAL: self.several}.get(detail)
        return variant or self

    def of(self, width: int, height: int) -> Arrangement:
        """The arrangement of an image of this size, in pixels after orientation.

        Raises ImageError if the image processor would scale a side to nothing.
        """
        arranged = self.arrange(height, width)
        if not arranged.num_rows:
            message = f"The image has {width} x {height} pixels, which is too long and narrow for this model. Crop it."
            raise ImageError(Fault.ASPECT, message)
        return arranged


def read_layout(folder: Path) -> Layout | None:
    """The layout of a model; None if its family is not known here, or its files lack what is needed.

    Raises OSError or ValueError if a file cannot be read.
    """
    files = _Files.read(folder)
    make = FAMILIES.get(str(files.config.get("model_type")))
    if make is None or not files.settings:
        return None
    try:
        return make(files)
    except (KeyError, TypeError, AttributeError):
        return None  # a setting is missing or of another form


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a model folder that decide the layout."""

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    settings: Mapping[str, Any]
    """Settings of the image processor."""
    tokens: Mapping[str, Any]
    """Content of tokenizer_config.json."""

    @classmethod
    def read(cls, folder: Path) -> "_Files":
        processor = find_object(folder / "processor_config.json")
        nested = processor.get("image_processor")
        settings = nested if isinstance(nested, dict) else find_object(folder / "preprocessor_config.json")
        config, tokens = find_object(folder / "config.json"), find_object(folder / "tokenizer_config.json")
        return cls(config, processor, settings, tokens)

    def token(self, name: str, default: str) -> str:
        """The text of the special token that the tokenizer's configuration has under this name."""
        extra = self.tokens.get("extra_special_tokens")
        named = extra.get(name) if isinstance(extra, dict) else None
        value = self.tokens.get(name) if named is None else named
        text = value.get("content") if isinstance(value, dict) else value
        return text if isinstance(text, str) else default

    def layout(
        self,
        placeholder: str,
        arrange: Arrange,
        around: tuple[str, str] = ("", ""),
        low: "tuple[Arrange, Mapping[str, Any]] | None" = None,
        **call: Any,
    ) -> Layout:
        """The layout with what all families have; `low` has its arrangement and arguments for low resolution."""
        token = self.config.get("image_token_id", self.config.get("image_token_index"))
        if not isinstance(token, int):
            raise KeyError("image_token_id")
        family = str(self.config["model_type"])
        settings = {key: value for key, value in self.settings.items() if key != "_valid_processor_keys"}
        layout = Layout(family, token, placeholder, arrange, around, call, settings)
        return layout if low is None else replace(layout, low=replace(layout, arrange=low[0], call={**call, **low[1]}))


def _side(size: Any, name: str) -> int:
    """A side of a size that is a number or an object."""
    return int(size) if isinstance(size, int) else int(size[name])


def _fixed(num_rows: int, before: str, after: str, height: int, width: int) -> Arrangement:
    return Arrangement((before, num_rows, after))


def _llava(files: _Files) -> Layout:
    vision = files.config["vision_config"]
    if vision.get("model_type") == "pixtral":
        return _pixtral(files)
    settings, processor = files.settings, files.processor
    size = settings.get("size", {"shortest_edge": 224})
    is_cropped = settings.get("do_center_crop", "Siglip" not in str(settings.get("image_processor_type", "")))
    if is_cropped:
        size = settings.get("crop_size", 224)
    patch = processor.get("patch_size") or vision["patch_size"]
    num_rows = (_side(size, "height") // patch) * (_side(size, "width") // patch)
    strategy = processor.get("vision_feature_select_strategy") or files.config.get("vision_feature_select_strategy")
    num_rows += processor.get("num_additional_image_tokens", 0) - (strategy == "default")
    return files.layout("<image>", partial(_fixed, num_rows, "", ""))


def _llava_next(files: _Files) -> Layout:
    settings, processor = files.settings, files.processor
    tile = _side(settings.get("crop_size", 224), "height")
    patch = processor.get("patch_size") or files.config["vision_config"]["patch_size"]
    strategy = processor.get("vision_feature_select_strategy") or files.config.get("vision_feature_select_strategy")
    more = processor.get("num_additional_image_tokens", 0) - (strategy == "default")
    canvases = [tuple(canvas) for canvas in settings["image_grid_pinpoints"]]
    return files.layout("<image>", partial(_with_overview, canvases, tile, tile // patch, more))


def _with_overview(
    canvases: Sequence[tuple[int, int]], tile: int, patches: int, more: int, height: int, width: int
) -> Arrangement:
    """Rows of the whole image, then of the image in tiles, with a row at the end of each line."""
    canvas = sizes.best_canvas(height, width, canvases)
    lines, columns = sizes.without_padding(height, width, canvas[0] // tile * patches, canvas[1] // tile * patches)
    return Arrangement((patches * patches + more + lines * (columns + 1),))


def _llava_onevision(files: _Files) -> Layout:
    """One image of a prompt is shown in tiles as well; several are shown whole, each in a square."""
    settings, processor, config = files.settings, files.processor, files.config
    num_rows = processor["num_image_tokens"]
    if processor.get("vision_feature_select_strategy") == "default":
        raise KeyError("vision_feature_select_strategy")
    tile = _side(settings.get("size", 384), "height")
    canvases = [tuple(canvas) for canvas in settings["image_grid_pinpoints"]]
    most = int(processor.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_"))
    if config.get("vision_aspect_ratio", "anyres_max_9") != f"anyres_max_{most}":
        raise KeyError("vision_aspect_ratio")
    alone = partial(_with_overview_at_most, canvases, tile, math.isqrt(num_rows), most)
    layout = files.layout(files.token("image_token", "<image>"), alone)
    return replace(layout, several=replace(layout, arrange=partial(_fixed, num_rows + 1, "", "")))


def _with_overview_at_most(
    canvases: Sequence[tuple[int, int]], tile: int, patches: int, most: int, height: int, width: int
) -> Arrangement:
    """As `_with_overview`, for tiles that are scaled down to the patches of `most` tiles."""
    canvas = sizes.best_canvas(height, width, canvases)
    lines, columns = sizes.without_padding(height, width, canvas[0] // tile * patches, canvas[1] // tile * patches)
    scale = math.sqrt(lines * columns / (most * patches**2))
    if scale > _SCALED_BEYOND:
        lines, columns = int(lines // scale), int(columns // scale)
    return Arrangement((patches * patches + lines * (columns + 1),))


def _granite_docling(files: _Files) -> Layout:
    """Pages in tiles, and the whole page at the end; with the fine route, four times as many rows."""
    settings = files.settings
    size = settings.get("size", 512)
    num_rows = files.processor.get("image_seq_len", 64) * (4 if settings.get("fine_route") else 1)
    arrange = partial(_in_pages, num_rows, (_side(size, "height"), _side(size, "width")))
    dense = tuple(settings.get(f"dense_{name}", 0) for name in ("max_patches", "max_scale", "min_aspect", "max_aspect"))
    most = settings.get("min_patches", 1), settings.get("max_patches", 32)
    is_cropped = settings.get("crop_to_patches", True) and most[1] > 1
    low = partial(arrange, (1, 1), (0, 0, 0, 0)), {"crop_to_patches": False}
    tiled = partial(arrange, most if is_cropped else (1, 1), dense)
    return files.layout(files.token("image_token", "<image>"), tiled, low=low)


def _in_pages(
    num_rows: int, tile: tuple[int, int], most: tuple[int, int], dense: sizes.Dense, height: int, width: int
) -> Arrangement:
    lines, columns = sizes.granite_tiles(height, width, tile, most, dense)
    pieces, text = _tiles(num_rows, _FAKE, lines, columns), "\n"
    if lines * columns > 1:
        pieces += (f"\n\n{_FAKE}<global-img>", num_rows)
        text = _FAKE
    return Arrangement((*pieces, text))


def _deepseek_vl(files: _Files) -> Layout:
    num_rows = files.processor.get("num_image_tokens", 576)
    return files.layout(files.token("image_token", "<image_placeholder>"), partial(_fixed, num_rows, "", ""))


def _pixtral(files: _Files) -> Layout:
    """Pixtral's tower: a break after each row of patches."""
    processor, vision = files.processor, files.config["vision_config"]
    merge = processor.get("spatial_merge_size", files.config.get("spatial_merge_size", 1))
    patch = processor.get("patch_size", vision["patch_size"]) * merge
    token = processor.get("image_token", "[IMG]")
    breaks = processor.get("image_break_token", "[IMG_BREAK]"), processor.get("image_end_token", "[IMG_END]")
    longest = _longest(files.settings.get("size", 1024))
    small = min(*longest, _LOW_SIDE)
    low = partial(_in_lines, (small, small), patch, *breaks), {"size": {"longest_edge": small}}
    return files.layout(token, partial(_in_lines, longest, patch, *breaks), low=low, patch_size=patch)


def _longest(size: Any) -> tuple[int, int]:
    """Limits of height and width, from a size of Pixtral's image processor."""
    if isinstance(size, dict) and "longest_edge" not in size:
        return size["height"], size["width"]
    return (_side(size, "longest_edge"),) * 2


def _in_lines(longest: tuple[int, int], patch: int, line_break: str, end: str, height: int, width: int) -> Arrangement:
    rows, columns = sizes.patches_at_most(height, width, longest, patch)
    pieces: list[Piece] = []
    for _ in range(rows):
        pieces += (columns, line_break)
    return Arrangement((*pieces[:-1], end))


def _lighton_ocr(files: _Files) -> Layout:
    """Pixtral's tower without breaks. The image processor's patches are merged ones."""
    merge = files.processor.get("spatial_merge_size", files.config.get("spatial_merge_size", 2))
    merged = files.processor.get("patch_size", files.config["vision_config"]["patch_size"]) * merge
    patch = _side(files.settings.get("patch_size", 16), "height")
    longest = _longest(files.settings.get("size", 1024))
    small = min(*longest, _LOW_SIDE)
    low = partial(_merged, (small, small), patch, merged), {"size": {"longest_edge": small}}
    return files.layout(files.token("image_token", "<|image_pad|>"), partial(_merged, longest, patch, merged), low=low)


def _merged(longest: tuple[int, int], patch: int, merged: int, height: int, width: int) -> Arrangement:
    rows, columns = sizes.patches_at_most(height, width, longest, patch)
    return Arrangement(((rows * patch // merged) * (columns * patch // merged),))


def _idefics3(files: _Files) -> Layout:
    settings, vision = files.settings, files.config["vision_config"]
    num_rows = files.processor.get("image_seq_len")
    if num_rows is None:
        num_rows = (vision["image_size"] // vision["patch_size"]) ** 2 // files.config["scale_factor"] ** 2
    arrange = partial(
        _tiled,
        num_rows,
        files.token("fake_image_token", "<fake_token_around_image>"),
        files.token("global_image_token", "<global-img>"),
        _side(settings.get("size", 4 * 364), "longest_edge") if settings.get("do_resize", True) else None,
        _side(settings.get("max_image_size", 364), "longest_edge"),
    )
    splits = partial(arrange, settings.get("do_image_splitting", True))
    low = partial(arrange, False), {"do_image_splitting": False}
    return files.layout(files.token("image_token", "<image>"), splits, low=low)


def _tiled(  # noqa: PLR0913, PLR0917 - bound once, above
    num_rows: int, fake: str, whole: str, longest: int | None, tile: int, splits: bool, height: int, width: int
) -> Arrangement:
    lines, columns = sizes.idefics3_tiles(height, width, longest, tile) if splits else (0, 0)
    pieces, text = _tiles(num_rows, fake, lines, columns), "\n\n" if lines else ""
    return Arrangement((*pieces, f"{text}{fake}{whole}", num_rows, fake))


def _tiles(num_rows: int, fake: str, lines: int, columns: int) -> list[Piece]:
    """The tiles of an image, line by line; each is announced by its place."""
    pieces: list[Piece] = []
    for line in range(1, lines + 1):
        for column in range(1, columns + 1):
            text = "\n" if line > 1 and column == 1 else ""
            pieces += (f"{text}{fake}<row_{line}_col_{column}>", num_rows)
    return pieces


def _internvl(files: _Files) -> Layout:
    settings = files.settings
    size = settings.get("size", 384)
    tile = _side(size, "height"), _side(size, "width")
    num_rows = files.processor.get("image_seq_length", files.config.get("image_seq_length", 256))
    around = files.token("start_image_token", "<img>"), files.token("end_image_token", "</img>")
    most = settings.get("min_patches", 1), settings.get("max_patches", 12)
    arrange = partial(_on_canvas, num_rows, *around, tile, most)
    low = partial(_on_canvas, num_rows, *around, tile, (1, 1)), {"crop_to_patches": False}
    placeholder = files.token("context_image_token", "<IMG_CONTEXT>")
    if files.config["model_type"] == "qianfan_ocr":
        placeholder = files.processor.get("image_placeholder_token", "<image>")
    return files.layout(placeholder, arrange, low=low, crop_to_patches=True)


def _on_canvas(
    num_rows: int, begin: str, end: str, tile: tuple[int, int], most: tuple[int, int], height: int, width: int
) -> Arrangement:
    return Arrangement((begin, num_rows * (_num_tiles(tile, most, height, width) + 1), end))


def _num_tiles(tile: tuple[int, int], most: tuple[int, int], height: int, width: int) -> int:
    """Tiles in addition to the whole image; 0 if one would be the whole."""
    lines, columns = sizes.tiled_canvas(height, width, tile, *most) if most[1] > 1 else (1, 1)
    return lines * columns if lines * columns > 1 else 0


def _aya_vision(files: _Files) -> Layout:
    settings, processor = files.settings, files.processor
    patch = processor.get("patch_size", 28) * processor.get("downsample_factor", 1)
    size = settings.get("size", 384)
    arrange = partial(
        _numbered,
        (processor.get("img_size", 364) // patch) ** 2,
        processor.get("start_of_img_token", "<|START_OF_IMG|>"),
        processor.get("end_of_img_token", "<|END_OF_IMG|>"),
        (_side(size, "height"), _side(size, "width")),
    )
    tiled = partial(arrange, (settings.get("min_patches", 1), settings.get("max_patches", 12)))
    low = partial(arrange, (1, 1)), {"crop_to_patches": False}
    return files.layout(processor.get("image_token", "<image>"), tiled, low=low, crop_to_patches=True)


def _numbered(
    num_rows: int, begin: str, end: str, tile: tuple[int, int], most: tuple[int, int], height: int, width: int
) -> Arrangement:
    names = [f"TILE_{number}" for number in range(1, _num_tiles(tile, most, height, width) + 1)]
    pieces: list[Piece] = [begin]
    for name in (*names, "TILE_GLOBAL"):
        pieces += (name, num_rows)
    return Arrangement((*pieces, end))


def _area(files: _Files, shortest: int, longest: int) -> tuple[int, int]:
    """The least and most pixels, from a size whose edges mean areas, with the defaults of an image processor."""
    size = files.settings.get("size", {})
    least = files.settings.get("min_pixels", size.get("shortest_edge", shortest))
    return least, files.settings.get("max_pixels", size.get("longest_edge", longest))


def _by_area(name: str, files: _Files) -> Layout:
    """Families whose images are scaled to an area, in blocks of merged patches: Qwen, GLM and Paddle."""
    form = _BY_AREA[name]
    merge, patch = files.settings.get("merge_size", 2), files.settings.get("patch_size", form.patch)
    least, most = _area(files, *form.area)
    small = max(least, min(most, form.frames * _LOW_SIDE**2))
    arrange, arrange_low = (partial(_in_grid, name, patch * merge, (least, largest)) for largest in (most, small))
    if files.config["model_type"] in _WITHOUT_AXES:
        arrange, arrange_low = partial(_in_line, arrange), partial(_in_line, arrange_low)
    low = arrange_low, {"size": {"shortest_edge": least, "longest_edge": small}}
    return files.layout(files.token("image_token", form.token), arrange, form.around, low)


def _in_grid(name: str, block: int, area: tuple[int, int], height: int, width: int) -> Arrangement:
    scaled = _BY_AREA[name].scaled(height, width, block, *area)
    grid = 1, scaled[0] // block, scaled[1] // block
    return Arrangement((grid[1] * grid[2],), grid)


_WITHOUT_AXES = frozenset({"exaone4_5"})
"""Types whose images are scaled to an area, and whose rotary positions are the places."""


def _in_line(arrange: Arrange, height: int, width: int) -> Arrangement:
    return replace(arrange(height, width), grid=None)


@dataclass(frozen=True, slots=True)
class _ByArea:
    scaled: Callable[[int, int, int, int, int], tuple[int, int]]
    """The scaled height and width for a height, a width, a block, and the least and most pixels."""
    patch: int
    area: tuple[int, int]
    token: str
    around: tuple[str, str]
    frames: int = 1
    """Frames that an area counts for one image."""


_BY_AREA = {
    "qwen": _ByArea(
        sizes.qwen_size, 14, (56 * 56, 28 * 28 * 1280), "<|image_pad|>", ("<|vision_start|>", "<|vision_end|>")
    ),
    "glm": _ByArea(
        sizes.glm_size, 14, (112 * 112, 28 * 28 * 15_000), "<|image|>", ("<|begin_of_image|>", "<|end_of_image|>"), 2
    ),
    "paddle": _ByArea(
        sizes.paddle_size, 14, (384 * 384, 1536 * 1536), "<|IMAGE_PLACEHOLDER|>", ("<|IMAGE_START|>", "<|IMAGE_END|>")
    ),
}  # fmt: skip


def _gemma3(files: _Files) -> Layout:
    if files.settings.get("do_pan_and_scan"):
        raise KeyError("do_pan_and_scan")
    begin, end = files.token("boi_token", "<start_of_image>"), files.token("eoi_token", "<end_of_image>")
    num_rows = files.processor.get("image_seq_length", files.config.get("mm_tokens_per_image", 256))
    return files.layout(begin, partial(_fixed, num_rows, f"\n\n{begin}", f"{end}\n\n"))


def _gemma4(files: _Files) -> Layout:
    settings = files.settings
    arrange = partial(
        _pooled,
        files.token("boi_token", "<|image>"),
        files.token("eoi_token", "<image|>"),
        settings.get("patch_size", 16),
        settings.get("pooling_kernel_size", 3),
    )
    low = partial(arrange, _LOW_TOKENS), {"max_soft_tokens": _LOW_TOKENS}
    most = settings.get("max_soft_tokens", 280)
    return files.layout(files.token("image_token", "<|image|>"), partial(arrange, most), low=low)


def _pooled(begin: str, end: str, patch: int, pooling: int, most: int, height: int, width: int) -> Arrangement:
    lines, columns = sizes.gemma4_blocks(height, width, patch * pooling, most)
    return Arrangement((begin, lines * columns, end))


def _deepseek_ocr2(files: _Files) -> Layout:
    """Rows of an image's tiles, if it is larger than one, then of the whole image, and a row at the end.

    There is no low resolution: transformers' processor then counts rows that the tower does not make.
    """
    settings, processor = files.settings, files.processor
    patch = processor.get("patch_size", 16) * processor.get("downsample_ratio", 4)
    tile = settings.get("tile_size", 768)
    num_rows, whole = ((-(-side // patch)) ** 2 for side in (tile, _side(settings.get("size", 1024), "height")))
    least, most = _DEEPSEEK_TILES
    arrange = partial(_tiles_then_whole, num_rows, whole, tile)
    token = files.token("image_token", "<image>")
    return files.layout(token, arrange, crop_to_patches=True, min_patches=least, max_patches=most)


def _tiles_then_whole(num_rows: int, whole: int, tile: int, height: int, width: int) -> Arrangement:
    lines = columns = 0
    if max(height, width) > tile:
        lines, columns = sizes.tiled_canvas(height, width, (tile, tile), *_DEEPSEEK_TILES)
    return Arrangement((lines * columns * num_rows + whole + 1,))


def _minicpm(files: _Files) -> Layout:
    """The whole image, then its slices, line by line; the image's number stands before them."""
    settings = files.settings
    mode = settings.get("downsample_mode", "16x")
    if files.config.get("downsample_mode", "16x") != mode:
        raise KeyError("downsample_mode")
    block = settings.get("patch_size", 14) * (2 if mode == "4x" else 4)
    arrange = partial(
        _whole_then_slices,
        (files.token("image_start_token", "<image>"), files.token("image_end_token", "</image>")),
        (files.token("slice_start_token", "<slice>"), files.token("slice_end_token", "</slice>")),
        settings.get("scale_resolution", 448),
        block,
    )
    sliced = partial(arrange, settings.get("max_slice_nums", 9) if settings.get("slice_mode", True) else 1)
    low = partial(arrange, 1), {"slice_mode": False}
    layout = files.layout(files.token("image_token", "<|image_pad|>"), sliced, low=low)
    if not settings.get("use_image_id", True):
        return layout
    number = files.token("image_id_start_token", "<image_id>"), files.token("image_id_end_token", "</image_id>")
    assert layout.low is not None, "made above"
    return replace(layout, number=number, low=replace(layout.low, number=number))


def _whole_then_slices(
    of_image: tuple[str, str],
    of_slice: tuple[str, str],
    side: int,
    block: int,
    most: int,
    height: int,
    width: int,
) -> Arrangement:
    grid = sizes.minicpm_slices(height, width, side, most)
    lines, columns = sizes.minicpm_size(height, width, side, block, may_grow=grid == (0, 0))
    pieces: list[Piece] = [of_image[0], lines // block * (columns // block), of_image[1]]
    if grid != (0, 0):
        lines, columns = sizes.minicpm_slice(height, width, grid, side, block)
        for line in range(grid[0]):
            for column in range(grid[1]):
                text = "\n" if line and not column else ""
                pieces += (text + of_slice[0], lines // block * (columns // block), of_slice[1])
    return Arrangement(tuple(pieces))


FAMILIES: Mapping[str, Callable[[_Files], Layout]] = {
    "aya_vision": _aya_vision,
    "deepseek_ocr2": _deepseek_ocr2,
    "deepseek_vl": _deepseek_vl,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_next_video": _llava_next,
    "llava_onevision": _llava_onevision,
    "granite_docling": _granite_docling,
    "vipllava": _llava,
    "minicpmv4_6": _minicpm,
    "mistral3": _pixtral,
    "lighton_ocr": _lighton_ocr,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "internvl": _internvl,
    "qianfan_ocr": _internvl,
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "exaone4_5"),
        partial(_by_area, "qwen"),
    ),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr"), partial(_by_area, "glm")),
    "paddleocr_vl": partial(_by_area, "paddle"),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
}
"""By `model_type`."""
