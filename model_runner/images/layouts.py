"""How images stand in the prompts of each model family: the text around and inside an image, and its feature rows.

Everything follows from the files of a model folder and from an image's width and height, so neither the pixels nor
transformers are needed. The counts are the same as with transformers' processors, with which the tests compare.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
_TRIED = (480, 640)
"""Height and width of an image for which the settings must suffice."""
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


@dataclass(frozen=True, slots=True)
class Layout:
    """How images stand in the prompts of one model, by the files of its folder. Picklable."""

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    """Content of processor_config.json."""
    settings: Mapping[str, Any]
    """The image processor's settings. They decide the features, so they are part of an image's digest."""
    tokens: Mapping[str, str]
    """Special tokens by their names in tokenizer_config.json."""
    detail: str = ""
    """`low` for low resolution, SEVERAL for one of several images in a prompt, where that matters; otherwise empty."""

    @property
    def family(self) -> str:
        """The model's type."""
        return str(self.config["model_type"])

    @property
    def _rules(self) -> "ImageFamily":
        """LLaVA's type also stands for models with Pixtral's tower, whose processor is Mistral 3's."""
        has_pixtral = self.family == "llava" and self.config["vision_config"].get("model_type") == "pixtral"
        return FAMILIES["mistral3" if has_pixtral else self.family]

    @property
    def image_token(self) -> int:
        """The token at the places of feature rows."""
        token: int = self.config.get("image_token_id", self.config.get("image_token_index"))
        return token

    @property
    def placeholder(self) -> str:
        """The text that the chat template writes for an image."""
        name, usual = self._rules.placeholder
        return str(self.processor.get(name, usual)) if self._rules.in_processor else self.token(name, usual)

    @property
    def around(self) -> tuple[str, str]:
        """Texts that a chat template writes before and after the placeholder. Used if the template knows only texts."""
        return self._rules.around

    @property
    def number(self) -> tuple[str, str] | None:
        """Texts around the image's number in its prompt, from 0, which then stands before the image."""
        return self._rules.number(self)

    @property
    def call(self) -> Mapping[str, Any]:
        """Arguments with which the image processor must be called."""
        return {**self._rules.call(self), **(self._rules.low(self.at("")) if self.detail == "low" else {})}

    @property
    def has_low(self) -> bool:
        """Whether the image processor has a low resolution."""
        return self._rules.low is not _no_arguments

    @property
    def has_several(self) -> bool:
        """Whether an image stands in another way if it is one of several."""
        return self._rules.has_several

    @property
    def options(self) -> Mapping[str, Any]:
        """The settings with the arguments of the call."""
        call = self.call
        older = ("min_pixels", "max_pixels") if "size" in call else ()  # names of what a size says
        return {**{name: value for name, value in self.settings.items() if name not in older}, **call}

    def token(self, name: str, default: str) -> str:
        """The text of the special token that the tokenizer's configuration has under this name."""
        return self.tokens.get(name, default)

    def at(self, detail: str) -> "Layout":
        """The layout for images of this detail: `low`, SEVERAL, or anything else for the model's own resolution."""
        is_other = {"low": self.has_low, SEVERAL: self.has_several}.get(detail, False)
        return replace(self, detail=detail if is_other else "")

    def of(self, width: int, height: int) -> Arrangement:
        """The arrangement of an image of this size, in pixels after orientation.

        Raises ImageError if the image processor would scale a side to nothing.
        """
        arranged = self._rules.arrange(self, height, width)
        if not arranged.num_rows:
            message = f"The image has {width} x {height} pixels, which is too long and narrow for this model. Crop it."
            raise ImageError(Fault.ASPECT, message)
        return arranged


Arguments = Callable[[Layout], Mapping[str, Any]]
"""Arguments with which the image processor is called."""


def _no_arguments(layout: Layout) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """How images stand in the prompts of models of one kind."""

    arrange: Callable[[Layout, int, int], Arrangement]
    """The arrangement of an image of this height and width; without rows, if a side is scaled to nothing."""
    placeholder: tuple[str, str]
    """The name of the token that the chat template writes for an image, and its usual text."""
    low: Arguments = _no_arguments
    """More arguments for low resolution; `_no_arguments` if the image processor has no choice."""
    call: Arguments = _no_arguments
    around: tuple[str, str] = ("", "")
    in_processor: bool = False
    """Whether the processor's configuration, instead of the tokenizer's, names the placeholder."""
    has_several: bool = False
    number: Callable[[Layout], tuple[str, str] | None] = lambda layout: None


def read_layout(folder: Path) -> Layout | None:
    """The layout of a model; None if its family is not known here, or its files lack what is needed.

    Raises OSError or ValueError if a file cannot be read.
    """
    processor = find_object(folder / "processor_config.json")
    nested = processor.get("image_processor")
    settings = nested if isinstance(nested, dict) else find_object(folder / "preprocessor_config.json")
    tokens = find_object(folder / "tokenizer_config.json")
    extra = tokens.get("extra_special_tokens")
    named = {**tokens, **(extra if isinstance(extra, dict) else {})}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    config = find_object(folder / "config.json")
    layout = Layout(
        {name: one for name, one in config.items() if name == "vision_config" or not isinstance(one, dict | list)},
        processor,
        {name: value for name, value in settings.items() if name != "_valid_processor_keys"},
        {name: text for name, text in texts.items() if isinstance(text, str) and name.endswith("_token")},
    )
    if layout.config.get("model_type") not in FAMILIES or not layout.settings:
        return None
    try:
        is_complete = isinstance(layout.image_token, int)
        for detail in ("", "low", SEVERAL):
            layout.at(detail).of(*_TRIED)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None  # a setting is missing or of another form
    return layout if is_complete else None


def _side(size: Any, name: str) -> int:
    """A side of a size that is a number or an object."""
    return int(size) if isinstance(size, int) else int(size[name])


def _sides(size: Any) -> tuple[int, int]:
    """Height and width."""
    return _side(size, "height"), _side(size, "width")


def _longest(layout: Layout) -> tuple[int, int]:
    """Limits of height and width for Pixtral's image processor."""
    size = layout.options.get("size", 1024)
    if isinstance(size, dict) and "longest_edge" not in size:
        return size["height"], size["width"]
    return (_side(size, "longest_edge"),) * 2


def _low_longest(layout: Layout) -> Mapping[str, Any]:
    return {"size": {"longest_edge": min(*_longest(layout), _LOW_SIDE)}}


def _patch(layout: Layout) -> int:
    """The side of a patch, as LLaVA's processors find it."""
    return int(layout.processor.get("patch_size") or layout.config["vision_config"]["patch_size"])


def _num_more(layout: Layout) -> int:
    """Feature rows of LLaVA's towers in addition to their patches."""
    name = "vision_feature_select_strategy"
    is_default = (layout.processor.get(name) or layout.config.get(name)) == "default"
    return int(layout.processor.get("num_additional_image_tokens", 0)) - is_default


def _llava(layout: Layout, height: int, width: int) -> Arrangement:
    settings = layout.options
    is_cropped = settings.get("do_center_crop", "Siglip" not in str(settings.get("image_processor_type", "")))
    size = settings.get("crop_size", 224) if is_cropped else settings.get("size", {"shortest_edge": 224})
    lines, columns = (side // _patch(layout) for side in _sides(size))
    return Arrangement((lines * columns + _num_more(layout),))


def _llava_next(layout: Layout, height: int, width: int) -> Arrangement:
    tile = _side(layout.options.get("crop_size", 224), "height")
    lines, columns = _uncovered(layout, tile, tile // _patch(layout), height, width)
    return Arrangement(((tile // _patch(layout)) ** 2 + _num_more(layout) + lines * (columns + 1),))


def _uncovered(layout: Layout, tile: int, patches: int, height: int, width: int) -> tuple[int, int]:
    """Lines and columns of rows of an image in tiles. A row at the end of each line and the whole image's are more."""
    canvas = sizes.best_canvas(height, width, [tuple(canvas) for canvas in layout.options["image_grid_pinpoints"]])
    return sizes.without_padding(height, width, canvas[0] // tile * patches, canvas[1] // tile * patches)


def _llava_onevision(layout: Layout, height: int, width: int) -> Arrangement:
    """One image of a prompt is shown in tiles as well; several are shown whole, each in a square."""
    processor, aspect = layout.processor, "vision_aspect_ratio"
    num_rows, most = processor["num_image_tokens"], processor.get(aspect, "anyres_max_9")
    if (
        processor.get("vision_feature_select_strategy") == "default"
        or layout.config.get(aspect, "anyres_max_9") != most
    ):
        raise KeyError(aspect)
    if layout.detail == SEVERAL:
        return Arrangement((num_rows + 1,))
    patches = math.isqrt(num_rows)
    lines, columns = _uncovered(layout, _side(layout.options.get("size", 384), "height"), patches, height, width)
    scale = math.sqrt(lines * columns / (int(most.removeprefix("anyres_max_")) * patches**2))
    if scale > _SCALED_BEYOND:
        lines, columns = int(lines // scale), int(columns // scale)
    return Arrangement((patches**2 + lines * (columns + 1),))


def _granite_docling(layout: Layout, height: int, width: int) -> Arrangement:
    """Pages in tiles, and the whole page at the end; with the fine route, four times as many rows."""
    settings = layout.options
    num_rows = layout.processor.get("image_seq_len", 64) * (4 if settings.get("fine_route") else 1)
    dense = tuple(settings.get(f"dense_{name}", 0) for name in ("max_patches", "max_scale", "min_aspect", "max_aspect"))
    most = settings.get("min_patches", 1), settings.get("max_patches", 32)
    if not settings.get("crop_to_patches", True) or most[1] <= 1:
        most = 1, 1
    lines, columns = sizes.granite_tiles(height, width, _sides(settings.get("size", 512)), most, dense)
    pieces, text = _tiles(num_rows, _FAKE, lines, columns), "\n"
    if lines * columns > 1:
        pieces += (f"\n\n{_FAKE}<global-img>", num_rows)
        text = _FAKE
    return Arrangement((*pieces, text))


def _deepseek_vl(layout: Layout, height: int, width: int) -> Arrangement:
    return Arrangement((layout.processor.get("num_image_tokens", 576),))


def _merged_patch(layout: Layout) -> int:
    """The side of a merged patch of Pixtral."""
    merge = layout.processor.get("spatial_merge_size", layout.config.get("spatial_merge_size", 1))
    return int(layout.processor.get("patch_size", layout.config["vision_config"]["patch_size"]) * merge)


def _pixtral(layout: Layout, height: int, width: int) -> Arrangement:
    """Pixtral's tower: a break after each row of patches."""
    processor = layout.processor
    line_break, end = processor.get("image_break_token", "[IMG_BREAK]"), processor.get("image_end_token", "[IMG_END]")
    lines, columns = sizes.patches_at_most(height, width, _longest(layout), _merged_patch(layout))
    return Arrangement((*([columns, line_break] * lines)[:-1], end))


def _lighton_ocr(layout: Layout, height: int, width: int) -> Arrangement:
    """Pixtral's tower without breaks. The image processor's patches are merged ones."""
    merge = layout.processor.get("spatial_merge_size", layout.config.get("spatial_merge_size", 2))
    merged = layout.processor.get("patch_size", layout.config["vision_config"]["patch_size"]) * merge
    patch = _side(layout.options.get("patch_size", 16), "height")
    lines, columns = sizes.patches_at_most(height, width, _longest(layout), patch)
    return Arrangement(((lines * patch // merged) * (columns * patch // merged),))


def _idefics3(layout: Layout, height: int, width: int) -> Arrangement:
    settings, vision = layout.options, layout.config["vision_config"]
    num_rows = layout.processor.get("image_seq_len")
    if num_rows is None:
        num_rows = (vision["image_size"] // vision["patch_size"]) ** 2 // layout.config["scale_factor"] ** 2
    lines = columns = 0
    if settings.get("do_image_splitting", True):
        longest = _side(settings.get("size", 4 * 364), "longest_edge") if settings.get("do_resize", True) else None
        tile = _side(settings.get("max_image_size", 364), "longest_edge")
        lines, columns = sizes.idefics3_tiles(height, width, longest, tile)
    fake, whole = layout.token("fake_image_token", _FAKE), layout.token("global_image_token", "<global-img>")
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


def _internvl(layout: Layout, height: int, width: int) -> Arrangement:
    num_rows = layout.processor.get("image_seq_length", layout.config.get("image_seq_length", 256))
    begin, end = layout.token("start_image_token", "<img>"), layout.token("end_image_token", "</img>")
    return Arrangement((begin, num_rows * (_num_tiles(layout, height, width) + 1), end))


def _num_tiles(layout: Layout, height: int, width: int) -> int:
    """Tiles in addition to the whole image; 0 if one would be the whole."""
    options = layout.options
    least, most, tile = options.get("min_patches", 1), options.get("max_patches", 12), _sides(options.get("size", 384))
    if not options["crop_to_patches"] or most <= 1:
        return 0
    lines, columns = sizes.tiled_canvas(height, width, tile, least, most)
    return lines * columns if lines * columns > 1 else 0


def _aya_vision(layout: Layout, height: int, width: int) -> Arrangement:
    processor = layout.processor
    patch = processor.get("patch_size", 28) * processor.get("downsample_factor", 1)
    num_rows = (processor.get("img_size", 364) // patch) ** 2
    pieces: list[Piece] = [processor.get("start_of_img_token", "<|START_OF_IMG|>")]
    for name in (*range(1, _num_tiles(layout, height, width) + 1), "GLOBAL"):
        pieces += (f"TILE_{name}", num_rows)
    return Arrangement((*pieces, processor.get("end_of_img_token", "<|END_OF_IMG|>")))


def _gemma3(layout: Layout, height: int, width: int) -> Arrangement:
    if layout.options.get("do_pan_and_scan"):
        raise KeyError("do_pan_and_scan")
    begin, end = layout.token("boi_token", "<start_of_image>"), layout.token("eoi_token", "<end_of_image>")
    num_rows = layout.processor.get("image_seq_length", layout.config.get("mm_tokens_per_image", 256))
    return Arrangement((f"\n\n{begin}", num_rows, f"{end}\n\n"))


def _gemma4(layout: Layout, height: int, width: int) -> Arrangement:
    settings = layout.options
    block = settings.get("patch_size", 16) * settings.get("pooling_kernel_size", 3)
    lines, columns = sizes.gemma4_blocks(height, width, block, settings.get("max_soft_tokens", 280))
    return Arrangement((layout.token("boi_token", "<|image>"), lines * columns, layout.token("eoi_token", "<image|>")))


def _deepseek_ocr2(layout: Layout, height: int, width: int) -> Arrangement:
    """Rows of an image's tiles, if it is larger than one, then of the whole image, and a row at the end.

    There is no low resolution: transformers' processor then counts rows that the tower does not make.
    """
    settings, processor = layout.options, layout.processor
    patch = processor.get("patch_size", 16) * processor.get("downsample_ratio", 4)
    tile = settings.get("tile_size", 768)
    num_rows, whole = ((-(-side // patch)) ** 2 for side in (tile, _side(settings.get("size", 1024), "height")))
    lines = columns = 0
    if max(height, width) > tile:
        lines, columns = sizes.tiled_canvas(
            height, width, (tile, tile), settings["min_patches"], settings["max_patches"]
        )
    return Arrangement((lines * columns * num_rows + whole + 1,))


def _minicpm(layout: Layout, height: int, width: int) -> Arrangement:
    """The whole image, then its slices, line by line."""
    settings, mode = layout.options, "downsample_mode"
    if layout.config.get(mode, "16x") != settings.get(mode, "16x"):
        raise KeyError(mode)
    block = settings.get("patch_size", 14) * (2 if settings.get(mode) == "4x" else 4)
    side, most = settings.get("scale_resolution", 448), settings.get("max_slice_nums", 9)
    grid = sizes.minicpm_slices(height, width, side, most if settings.get("slice_mode", True) else 1)
    whole = sizes.minicpm_size(height, width, side, block, may_grow=grid == (0, 0))
    begin, end = layout.token("image_start_token", "<image>"), layout.token("image_end_token", "</image>")
    pieces: list[Piece] = [begin, whole[0] // block * (whole[1] // block), end]
    if grid != (0, 0):
        lines, columns = sizes.minicpm_slice(height, width, grid, side, block)
        begin, end = layout.token("slice_start_token", "<slice>"), layout.token("slice_end_token", "</slice>")
        for place in range(grid[0] * grid[1]):
            text = "\n" if place and place % grid[1] == 0 else ""
            pieces += (text + begin, lines // block * (columns // block), end)
    return Arrangement(tuple(pieces))


def _minicpm_number(layout: Layout) -> tuple[str, str] | None:
    if not layout.options.get("use_image_id", True):
        return None
    return layout.token("image_id_start_token", "<image_id>"), layout.token("image_id_end_token", "</image_id>")


def _by_area(
    scaled: Callable[[int, int, int, int, int], tuple[int, int]],
    area: tuple[int, int],
    image: tuple[str, str, str],
    frames: int = 1,
    *,
    has_axes: bool = True,
) -> ImageFamily:
    """A family whose images are scaled to an area, in blocks of merged patches.

    Args:
        scaled: the height and width for a height, a width, a block, and the least and most pixels.
        area: the least and most pixels, unless the settings have others.
        image: the usual texts of the tokens before an image, for it, and after it.
        frames: frames that an area counts for one image.
        has_axes: whether rotary positions have three axes; otherwise they are the places.
    """

    def limits(layout: Layout) -> tuple[int, int]:
        size = layout.options.get("size", {})  # whose edges mean areas
        least = layout.options.get("min_pixels", size.get("shortest_edge", area[0]))
        return least, layout.options.get("max_pixels", size.get("longest_edge", area[1]))

    def arrange(layout: Layout, height: int, width: int) -> Arrangement:
        block = layout.options.get("merge_size", 2) * layout.options.get("patch_size", 14)
        lines, columns = (side // block for side in scaled(height, width, block, *limits(layout)))
        return Arrangement((lines * columns,), (1, lines, columns) if has_axes else None)

    def low(layout: Layout) -> Mapping[str, Any]:
        least, most = limits(layout)
        return {"size": {"shortest_edge": least, "longest_edge": max(least, min(most, frames * _LOW_SIDE**2))}}

    return ImageFamily(arrange, ("image_token", image[1]), low, around=(image[0], image[2]))


def _cropped(
    arrange: Callable[[Layout, int, int], Arrangement], placeholder: tuple[str, str], *, in_processor: bool = False
) -> ImageFamily:
    """A family whose images are shown in tiles, too."""
    low, call = ({"crop_to_patches": crops} for crops in (False, True))
    return ImageFamily(arrange, placeholder, lambda _: low, lambda _: call, in_processor=in_processor)


_IMAGE = "image_token", "<image>"
_VISION = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
_QWEN_AREA = 56 * 56, 28 * 28 * 1280
FAMILIES: Mapping[str, ImageFamily] = {
    "aya_vision": _cropped(_aya_vision, _IMAGE, in_processor=True),
    # DeepSeek-OCR 2's processor asks for these tiles, whatever the image processor's file says.
    "deepseek_ocr2": ImageFamily(
        _deepseek_ocr2, _IMAGE, call=lambda _: {"crop_to_patches": True, "min_patches": 2, "max_patches": 6}
    ),
    "deepseek_vl": ImageFamily(_deepseek_vl, ("image_token", "<image_placeholder>")),
    **dict.fromkeys(("llava", "vipllava"), ImageFamily(_llava, _IMAGE)),
    **dict.fromkeys(("llava_next", "llava_next_video"), ImageFamily(_llava_next, _IMAGE)),
    "llava_onevision": ImageFamily(_llava_onevision, _IMAGE, has_several=True),
    "granite_docling": ImageFamily(_granite_docling, _IMAGE, lambda _: {"crop_to_patches": False}),
    "minicpmv4_6": ImageFamily(
        _minicpm, ("image_token", "<|image_pad|>"), lambda _: {"slice_mode": False}, number=_minicpm_number
    ),
    "mistral3": ImageFamily(
        _pixtral,
        ("image_token", "[IMG]"),
        _low_longest,
        lambda layout: {"patch_size": _merged_patch(layout)},
        in_processor=True,
    ),
    "lighton_ocr": ImageFamily(_lighton_ocr, ("image_token", "<|image_pad|>"), _low_longest),
    **dict.fromkeys(("idefics3", "smolvlm"), ImageFamily(_idefics3, _IMAGE, lambda _: {"do_image_splitting": False})),
    "internvl": _cropped(_internvl, ("context_image_token", "<IMG_CONTEXT>")),
    "qianfan_ocr": _cropped(_internvl, ("image_placeholder_token", "<image>"), in_processor=True),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        _by_area(sizes.qwen_size, _QWEN_AREA, _VISION),
    ),
    "exaone4_5": _by_area(sizes.qwen_size, _QWEN_AREA, _VISION, has_axes=False),
    **dict.fromkeys(
        ("glm4v", "glm4v_moe", "glm46v", "glm_ocr"),
        _by_area(
            sizes.glm_size, (112 * 112, 28 * 28 * 15_000), ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"), 2
        ),
    ),
    "paddleocr_vl": _by_area(
        sizes.paddle_size, (384 * 384, 1536 * 1536), ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>")
    ),
    "gemma3": ImageFamily(_gemma3, ("boi_token", "<start_of_image>")),
    "gemma4": ImageFamily(_gemma4, ("image_token", "<|image|>"), lambda _: {"max_soft_tokens": 70}),
}
"""By `model_type`."""
