"""Decoding of image files: the pixels that a model sees, and what is refused."""

import io
import pickle
import random
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from model_runner.images.decoding import Fault, ImageError, decode, digest, read

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def picture(width: int = 30, height: int = 20, seed: int = 0) -> Image.Image:
    """A picture of large random squares, which lossy formats keep apart."""
    colours = np.random.default_rng(seed).integers(0, 256, (-(-height // 10), -(-width // 10), 3), np.uint8)
    return Image.fromarray(np.kron(colours, np.ones((10, 10, 1), np.uint8))[:height, :width])


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    """The image as a file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def pixels(data: bytes) -> np.ndarray:
    """The decoded pixels, of shape (height, width, 3)."""
    return np.asarray(decode(data))


def fault_of(data: bytes, max_pixels: int | None = None) -> Fault:
    """Why the file is refused."""
    with pytest.raises(ImageError) as refused:
        read(data, max_pixels)
    text = str(refused.value)
    assert not any(word in text for word in ("0x", "object at", "PIL"))
    assert pickle.loads(pickle.dumps(refused.value)).fault is refused.value.fault
    return refused.value.fault


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG file with this header and these chunks."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in ((b"IHDR", header), *chunks)
    )


def test_exact_pixels() -> None:
    image = picture()
    for form, options in (("PNG", {}), ("WEBP", {"lossless": True})):
        assert np.array_equal(pixels(saved(image, form, **options)), np.asarray(image))
    for form in ("JPEG", "GIF"):
        assert pixels(saved(image, form)).shape == (20, 30, 3)
    assert np.array_equal(pixels(saved(image, "PNG") + b"junk"), np.asarray(image))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_orientation(orientation: int, form: str) -> None:
    upright = picture()
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    lying = upright.transpose(turns[orientation]) if orientation in turns else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(form, {})
    shown = pixels(saved(lying, form, exif=exif, **options)).astype(int)
    assert shown.shape == (20, 30, 3)
    assert abs(shown - np.asarray(upright)).mean() < 4


@pytest.mark.parametrize("exif", [b"Exif\0\0II*\0", b"Exif\0\0" + b"\xff" * 40])
def test_broken_orientation(exif: bytes) -> None:
    assert pixels(saved(picture(), "JPEG", exif=exif)).shape == (20, 30, 3)


def test_grey_of_16_bits() -> None:
    values = np.arange(0, 65536, 655, dtype=np.uint16).reshape(1, -1)
    shown = pixels(saved(Image.fromarray(values), "PNG"))
    assert np.array_equal(shown[..., 0], values >> 8)
    assert np.array_equal(shown[..., 1], shown[..., 2])


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_transparency_is_white(form: str) -> None:
    image = picture().convert("RGBA")
    alpha = np.full((20, 30), 255, np.uint8)
    alpha[:, :15] = 0
    image.putalpha(Image.fromarray(alpha))
    shown = pixels(saved(image, form, lossless=True))
    assert (shown[:, :15] == 255).all()
    assert np.array_equal(shown[:, 15:], np.asarray(picture())[:, 15:])


def test_transparent_colours() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    for form in ("PNG", "GIF"):
        assert pixels(saved(palette, form, transparency=0)).tolist() == [[[255] * 3, [40, 50, 60]]]
    grey = Image.fromarray(np.array([[7, 200]], np.uint8))
    assert pixels(saved(grey, "PNG", transparency=7)).tolist() == [[[255] * 3, [200] * 3]]
    deep = Image.fromarray(np.array([[0x0700, 0x0701]], np.uint16))
    assert pixels(saved(deep, "PNG", transparency=0x0700)).tolist() == [[[255] * 3, [7] * 3]]
    faint = Image.fromarray(np.array([[[100, 128]]], np.uint8), "LA")
    assert pixels(saved(faint, "PNG"))[0, 0, 0] == 177


def test_other_colour_models() -> None:
    cmyk = Image.new("CMYK", (12, 12), (255, 0, 0, 0))
    assert abs(pixels(saved(cmyk, "JPEG")).astype(int) - [0, 255, 255]).max() < 12
    assert pixels(saved(Image.new("1", (9, 9), 1), "PNG")).min() == 255


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_first_frame(form: str) -> None:
    first, second = picture(seed=1).quantize(16).convert("RGB"), picture(seed=2)
    data = saved(first, form, save_all=True, append_images=[second], lossless=True)
    shown = read(data)
    assert shown.is_animated
    assert np.array_equal(np.asarray(shown.pixels), np.asarray(first))
    assert not read(saved(first, form)).is_animated


@pytest.mark.parametrize("form", ["BMP", "TIFF", "PPM", "ICO", "JPEG2000", "TGA", "PDF", "EPS"])
def test_other_formats(form: str) -> None:
    assert fault_of(saved(picture(), form)) is Fault.FORMAT


@pytest.mark.parametrize("data", [b"", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7"])
def test_no_images(data: bytes) -> None:
    assert fault_of(data) is Fault.FORMAT


@pytest.mark.parametrize("form", FORMATS)
def test_truncated(form: str) -> None:
    data = saved(picture(200, 100), form)
    for length in (12, 40, len(data) // 2, len(data) - 30):
        assert fault_of(data[:length]) in (Fault.DAMAGED, Fault.FORMAT)
    assert fault_of(data[: len(data) // 2]) is Fault.DAMAGED


def test_bombs() -> None:
    """Large claims are refused from the header, before memory for the pixels is taken."""
    tracemalloc.start()
    assert fault_of(png(20_000, 20_000, (b"IDAT", zlib.compress(b"")), (b"IEND", b"")), 50_000_000) is Fault.AREA
    gif = bytearray(saved(picture(), "GIF"))
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    assert fault_of(bytes(gif), 50_000_000) is Fault.AREA
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4 << 20
    text = (b"zTXt", b"Comment\0\0" + zlib.compress(b"a" * (80 << 20)))
    assert fault_of(png(8, 8, text, (b"IDAT", zlib.compress(b"\0" * 200)), (b"IEND", b""))) is Fault.DAMAGED


def test_sizes() -> None:
    assert fault_of(png(0, 5, (b"IEND", b""))) in (Fault.DAMAGED, Fault.FORMAT)
    assert fault_of(saved(picture(201, 1), "PNG")) is Fault.ASPECT
    assert fault_of(saved(picture(1, 201), "PNG")) is Fault.ASPECT
    assert pixels(saved(picture(200, 1), "PNG")).shape == (1, 200, 3)
    assert pixels(saved(picture(1, 1), "PNG")).shape == (1, 1, 3)
    assert fault_of(saved(picture(30, 20), "PNG"), 599) is Fault.AREA
    assert read(saved(picture(30, 20), "PNG"), 600).pixels.size == (30, 20)


def test_digest() -> None:
    data = bytes(range(256)) * 3
    wide, tall = Image.frombytes("RGB", (64, 4), data), Image.frombytes("RGB", (4, 64), data)
    options = {"size": 56, "detail": ""}
    assert len(digest(wide, options)) == 32
    assert digest(wide, options) == digest(decode(saved(wide, "PNG")), dict(reversed(options.items())))
    others = [digest(tall, options), digest(wide, {**options, "size": 57}), digest(wide, {}), digest(picture(), {})]
    assert len({digest(wide, options), *others}) == 5


@pytest.mark.parametrize("form", FORMATS)
def test_mutations(form: str) -> None:
    """Damaged files are decoded or refused, and nothing else."""
    draw = random.Random(form)
    whole = saved(picture(64, 48), form)
    outcomes = set()
    for _ in range(100):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            outcomes.add(read(bytes(data[: draw.randint(len(data) // 4, len(data))]), 1_000_000).pixels.mode)
        except ImageError as error:
            outcomes.add(error.fault)
    assert Fault.DAMAGED in outcomes
