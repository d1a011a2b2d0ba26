"""Decodes image files to RGB pixels, with bounds, so that the same file gives the same pixels everywhere.

Only PNG, JPEG, WebP and GIF are read, without their metadata (see stripping.py). Orientation is applied, transparency
is composited on white, and the first frame counts. Nothing of a library's error texts, which may contain addresses or
paths, gets into an error.
"""

import hashlib
import io
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from model_runner.images.stripping import CostlyError, StrippedFile, has_signature, strip

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

FORMATS = ("png", "jpeg", "gif", "webp")
"""The formats that are read, under OpenAI's names and in its order."""
_READERS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_ASPECT = 200
"""The longer side at most divided by the shorter one. Several image processors refuse more."""
_WHITE = (255, 255, 255, 255)
_LINES = 64
"""Lines of an image that are composited at a time."""


class Fault(StrEnum):
    """Reasons to refuse an image file."""

    FORMAT = "format"
    """It is none of FORMATS."""
    DAMAGED = "damaged"
    """It is cut off or broken."""
    AREA = "area"
    """It has too many pixels."""
    ASPECT = "aspect"
    """It is too long and narrow."""
    COST = "cost"
    """It takes more work than its pixels are worth."""


class ImageError(ValueError):
    """A file is no image that can be used. The message is for clients and has nothing of a library's text."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault

    def __reduce__(self) -> tuple[type["ImageError"], tuple[Fault, str]]:
        return type(self), (self.fault, str(self))


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """The pixels of an image file."""

    pixels: "Pixels"
    """Mode RGB, upright, without transparency."""
    is_animated: bool
    """Whether the file has more frames than the one in `pixels`."""


def decode(data: bytes) -> "Pixels":
    """The pixels of an image file, as `read` gives them."""
    return read(data).pixels


def read(data: bytes, max_pixels: int | None = None) -> DecodedImage:
    """Read an image file. The width and height are checked before memory for the pixels is allocated.

    Raises ImageError, and MemoryError if the pixels do not fit into memory.
    """
    file = _stripped(data)
    image = _open(file.data)
    _check_size(*image.size, max_pixels)
    try:
        image.load()
        image = _turned(image, file.orientation)
        return DecodedImage(_to_rgb(image), file.is_animated)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - decoders raise anything, and their texts must not reach a client
        raise _damaged() from None


def digest(pixels: "Pixels", options: Mapping[str, Any]) -> bytes:
    """32 bytes that stand for an RGB image and for all that decides its features.

    `options` are JSON values: the model family's settings, the image processor's class, and the requested detail.
    """
    settings = json.dumps(options, sort_keys=True, separators=(",", ":")).encode()
    hashed = hashlib.sha256(struct.pack("<QQQ", *pixels.size, len(settings)))
    hashed.update(settings)
    hashed.update(pixels.tobytes())
    return hashed.digest()


def _stripped(data: bytes) -> StrippedFile:
    """The parts of a file that decide its pixels. Raises ImageError if they take too much work."""
    try:
        return strip(data)
    except CostlyError as error:
        raise ImageError(Fault.COST, str(error)) from None


def _open(data: bytes) -> "Pixels":
    """The file with its header read. Raises ImageError."""
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415  (only for requests with images)

    Image.MAX_IMAGE_PIXELS = None  # `_check_size` refuses large images; Pillow would only warn of most
    try:
        return Image.open(io.BytesIO(data), formats=_READERS)
    except UnidentifiedImageError:
        fault = Fault.DAMAGED if has_signature(data) else Fault.FORMAT
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - as in `decode`
        fault = Fault.DAMAGED
    if fault is Fault.DAMAGED:
        raise _damaged()
    message = f"The file is not an image in one of the formats {', '.join(FORMATS)}."
    raise ImageError(Fault.FORMAT, message)


def _check_size(width: int, height: int, max_pixels: int | None) -> None:
    if width < 1 or height < 1:
        raise _damaged()
    if max_pixels is not None and width * height > max_pixels:
        message = (
            f"The image has {width} x {height} = {width * height} pixels, and this server accepts at most "
            f"{max_pixels}. Scale it down."
        )
        raise ImageError(Fault.AREA, message)
    if max(width, height) > MAX_ASPECT * min(width, height):
        message = (
            f"The image has {width} x {height} pixels, and its longer side may be at most {MAX_ASPECT} times its "
            "shorter one. Crop it."
        )
        raise ImageError(Fault.ASPECT, message)


def _damaged() -> ImageError:
    return ImageError(Fault.DAMAGED, "The image is cut off or damaged.")


def _turned(image: "Pixels", orientation: int) -> "Pixels":
    """An image, turned and mirrored as an EXIF orientation says."""
    from PIL.Image import Transpose  # noqa: PLC0415

    methods = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(methods[orientation]) if orientation in methods else image


def _to_rgb(image: "Pixels") -> "Pixels":
    """The image in RGB. A large one takes hundreds of MiB, so it is not copied more often than necessary."""
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if image.has_transparency_data:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: "Pixels") -> "Pixels":
    """An image with transparency in RGB, some lines at a time."""
    from PIL import Image  # noqa: PLC0415

    result = Image.new("RGB", image.size)
    for top in range(0, image.height, _LINES):
        part = image.crop((0, top, image.width, min(top + _LINES, image.height))).convert("RGBA")
        white = Image.new("RGBA", part.size, _WHITE)
        result.paste(Image.alpha_composite(white, part).convert("RGB"), (0, top))
    return result


def _eight_bits(image: "Pixels") -> "Pixels":
    """The upper 8 of 16 bits of grey. A plain conversion would show all but the darkest 256 shades as white."""
    import numpy as np  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    values = np.asarray(image).astype(np.int32)
    grey = Image.fromarray((values >> 8).clip(0, 255).astype(np.uint8))
    hidden = image.info.get("transparency")
    if isinstance(hidden, int):
        grey.putalpha(Image.fromarray(np.where(values == hidden, 0, 255).astype(np.uint8)))
    return grey
