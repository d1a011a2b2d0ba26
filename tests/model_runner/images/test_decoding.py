"""Decoding of image files: the pixels that a model sees, and what is refused."""

import io
import pickle
import random
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

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


def segment(marker: int, content: bytes) -> bytes:
    """A segment of a JPEG."""
    return bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content


def exif(*entries: tuple[int, int, int, bytes], size: int = 0) -> bytes:
    """EXIF metadata with these entries (tag, type, number, value), and so many bytes after them."""
    packed = b"".join(struct.pack("<HHI", *entry[:3]) + entry[3] for entry in entries)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + packed + bytes(4 + size)


def flooded(form: str, part: bytes, number: int) -> bytes:
    """A file of 8 x 8 pixels with a part repeated before its pixels."""
    data = saved(picture(8, 8), form)
    at = {"PNG": 33, "JPEG": 2, "GIF": data.find(b","), "WEBP": len(data)}[form]
    file = data[:at] + part * number + data[at:]
    return file if form != "WEBP" else file[:4] + struct.pack("<I", len(file) - 8) + file[8:]


PARTS = {
    "PNG": struct.pack(">I", 0) + b"tEXt" + struct.pack(">I", zlib.crc32(b"tEXt")),
    "JPEG": segment(0xED, b""),
    "GIF": b"!\xfe\1a\0",
    "WEBP": b"abcd" + bytes(4),
}
"""The smallest part of each format's files."""
LARGE = exif(*((0x9000 + tag, 7, 4 << 20, struct.pack("<I", 8)) for tag in range(60)), size=4 << 20)
"""EXIF metadata of 4 MiB that names 240 MiB."""


@pytest.mark.parametrize("form", FORMATS)
def test_many_parts(form: str) -> None:
    assert fault_of(flooded(form, PARTS[form], 2_000)) is Fault.COST
    assert np.array_equal(pixels(flooded(form, PARTS[form], 400)), pixels(saved(picture(8, 8), form)))


@pytest.mark.parametrize("progressive", [False, True])
def test_scans(progressive: bool) -> None:
    """A scan costs as much as all pixels, and some ten bytes."""
    whole = saved(picture(), "JPEG", progressive=progressive)
    at = whole.rindex(b"\xff\xda")
    scan, before = whole[at:-2], whole[:at].count(b"\xff\xda")
    if progressive:
        assert pixels(whole[:at] + scan * (32 - before) + whole[-2:]).shape == (20, 30, 3)
    assert fault_of(whole[:at] + scan * (33 - before) + whole[-2:]) is Fault.COST


def test_costly_metadata() -> None:
    """It is not read: these files would take up to 240 MiB, and one of them hours with more entries."""
    bomb = zlib.compress(bytes(80 << 20))
    body = ((b"IDAT", zlib.compress(bytes(200))), (b"IEND", b""))
    files = [
        png(8, 8, (b"zTXt", b"Comment\0\0" + bomb), *body),
        png(8, 8, (b"iCCP", b"profile\0\0" + bomb), *body),
        png(8, 8, (b"iTXt", b"Comment\0\1\0\0\0" + bomb), *body),
        png(8, 8, (b"eXIf", LARGE), *body),
        flooded("JPEG", b"".join(segment(0xE1, b"Exif\0\0" + LARGE[:60_000]) for _ in range(70)), 1),
        flooded("JPEG", b"".join(segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(60_000)) for _ in range(70)), 1),
        flooded("JPEG", segment(0xE2, b"MPF\0" + exif((0xB001, 4, 1, struct.pack("<I", 1 << 30)))), 1),
        flooded("WEBP", b"EXIF" + struct.pack("<I", len(LARGE)) + LARGE, 1),
    ]
    tracemalloc.start()
    for file in files:
        tracemalloc.reset_peak()
        assert pixels(file).shape == (8, 8, 3)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    "options",
    [
        {"exif": exif((0x0112, 4, 1, struct.pack("<I", 6)))},
        {"exif": exif((0x0112, 1, 1, b"\3\0\0\0"))},
        {"exif": exif((0x0112, 3, 1, b"\x09\0\0\0"))},
        {"exif": exif((0x0112, 2, 1, b"6\0\0\0"))},
        {"xmp": b'<x tiff:Orientation="8"/>'},
        {"xmp": b"<tiff:Orientation>5</tiff:Orientation>", "exif": exif((0x0110, 2, 1, b"a\0\0\0"))},
        {"icc_profile": b"not a profile", "comment": b"a comment"},
    ],
)
def test_metadata_is_read_as_pillow_reads_it(form: str, options: dict[str, bytes]) -> None:
    if form == "JPEG" and "exif" in options:
        options = {**options, "exif": b"Exif\0\0" + options["exif"]}
    data = saved(picture(), form, **options)
    if form == "PNG" and "xmp" in options:
        text = b"XML:com.adobe.xmp\0\0\0\0\0" + options["xmp"]
        data = data[:33] + png(1, 1, (b"iTXt", text))[33:] + data[33:]
    with Image.open(io.BytesIO(data)) as file:
        assert np.array_equal(pixels(data), np.asarray(ImageOps.exif_transpose(file)))


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
