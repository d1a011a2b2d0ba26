"""Strips image files to the parts that decide the pixels of the first frame, so that decoders see nothing else.

Metadata can make a decoder work for hours: an EXIF directory that reads the same megabyte sixty thousand times, or
millions of empty chunks. So decoders never see it, however large it is. What is left costs as much as its bytes and
pixels, except for scans: each scan of a JPEG passes over all pixels again. Their number is bounded, and so is the
number of parts, which a decoder in Python reads one by one.
"""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_SCANS = 32
"""The most scans of a JPEG. Encoders write 1 to 10, and optimizers of files up to 20."""
_MAX_PARTS = 1_000
"""The most parts of a small file: segments, chunks and blocks."""
_BYTES_PER_PART = 128
"""A larger file may have one more part for so many bytes."""

_MARKER = re.compile(rb"\xff[^\x00\xff]")
_AFTER_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""A marker after the data of a scan, in which bytes 0xff are followed by 0 or begin a restart."""
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers without a segment: TEM, restarts and the start of the image."""
_END, _SCAN, _EXIF_OR_XMP, _ADOBE, _COMMENT = 0xD9, 0xDA, 0xE1, 0xEE, 0xFE
_APPLICATION = range(0xE1, 0xF0)
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNKS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})
_XMP_IN_PNG = b"XML:com.adobe.xmp\0\0"
_WEBP_CHUNKS = frozenset({b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF"})
_WEBP_METADATA = 0x2C
"""Flags of a profile, EXIF and XMP in a WebP file's header."""
_GIF_BLOCK = re.compile(rb"[!,;]")
_GIF_CONTROL = 0xF9
_GIF_HEADER = 13
_ORIENTATION = 0x0112
_IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')
_NUMBERS = {3: "H", 4: "I"}
"""Types of an orientation in EXIF."""


class CostlyError(ValueError):
    """Decoding a file would take more work than its pixels are worth."""


@dataclass(frozen=True, slots=True)
class StrippedFile:
    """The parts of an image file that decide its pixels."""

    data: bytes
    """The file without metadata and further frames; the whole file, if its format is none that is read."""
    orientation: int = 1
    """How the pixels are to be turned and mirrored, as numbered in EXIF; 1: not at all."""
    is_animated: bool = False
    """Whether the file has more frames than the one in `data`."""


def strip(data: bytes) -> StrippedFile:
    """Strip an image file. A damaged one stays damaged.

    Raises CostlyError if it has too many scans or parts.
    """
    walk = _walk_of(data)
    if walk is None:
        return StrippedFile(data)
    parts = _Parts(data)
    walk(data, parts)
    return StrippedFile(b"".join(parts.kept), parts.orientation, parts.num_frames > 1)


def has_signature(data: bytes) -> bool:
    """Whether a file begins as one of the formats does that are read."""
    return _walk_of(data) is not None


def _walk_of(data: bytes) -> "Callable[[bytes, _Parts], None] | None":
    walk = next((walk for start, walk in _WALKS.items() if data.startswith(start)), None)
    return None if walk is _walk_webp and data[8:12] != b"WEBP" else walk


@dataclass(slots=True)
class _Parts:
    """The parts of a file that were found."""

    data: bytes
    kept: list[bytes] = field(default_factory=list)
    exif: bytes = b""
    xmp: bytes = b""
    num_frames: int = 0
    num_scans: int = 0
    _number: int = 0

    def count(self) -> None:
        """Count a part. Raises CostlyError if there are too many."""
        self._number += 1
        if self._number > _MAX_PARTS + len(self.data) // _BYTES_PER_PART:
            message = f"The image file has more than {self._number - 1} parts in {len(self.data)} bytes. Save it again."
            raise CostlyError(message)

    def keep(self, start: int, end: int) -> None:
        """Keep these bytes of the file."""
        self.kept.append(self.data[start:end])

    def count_scan(self) -> None:
        """Count a scan. Raises CostlyError if there are too many."""
        self.num_scans += 1
        if self.num_scans > MAX_SCANS:
            message = f"The image has more than {MAX_SCANS} scans. Save it again, not as a progressive JPEG."
            raise CostlyError(message)

    @property
    def orientation(self) -> int:
        """The orientation in EXIF, otherwise in XMP, otherwise 1."""
        if found := _orientation_in(self.exif):
            return found
        in_xmp = _IN_XMP.search(self.xmp)
        return 1 if in_xmp is None else int(in_xmp[1])


def _walk_jpeg(data: bytes, parts: _Parts) -> None:
    """Everything up to the end of the first image, without comments and without the segments of applications.

    JFIF's and Adobe's segments stay: they decide the colours.
    """
    parts.keep(0, 2)
    at = 2
    pattern = _MARKER
    while True:
        found = pattern.search(data, at)
        start = len(data) if found is None else found.start()
        if pattern is _AFTER_SCAN:
            parts.keep(at, start)
        if found is None:
            return
        parts.count()
        marker, at, pattern = data[start + 1], found.end(), _MARKER
        if marker == _END:
            parts.keep(start, at)
            return
        if marker in _ALONE:
            continue
        end = at + max(2, int.from_bytes(data[at : at + 2]))
        if marker == _SCAN:
            parts.count_scan()
            pattern = _AFTER_SCAN
        if marker == _EXIF_OR_XMP:
            _note_jpeg_metadata(data[at + 2 : end], parts)
        if marker != _COMMENT and (marker == _ADOBE or marker not in _APPLICATION):
            parts.keep(start, end)
        at = end


def _note_jpeg_metadata(segment: bytes, parts: _Parts) -> None:
    if segment.startswith(_EXIF):
        parts.exif = parts.exif or segment
    elif segment.startswith(_XMP):
        parts.xmp = parts.xmp or segment


def _walk_png(data: bytes, parts: _Parts) -> None:
    """The chunks of header, palette, transparency and pixels."""
    at = len(_PNG)
    parts.keep(0, at)
    while at < len(data):
        parts.count()
        length, name = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8]
        body, end = at + 8, at + 12 + length
        if name in _PNG_CHUNKS or len(name) < len(b"IEND"):
            parts.keep(at, end)
        elif name == b"eXIf":
            parts.exif = data[body : end - 4]
        elif name == b"iTXt" and data.startswith(_XMP_IN_PNG, body):
            parts.xmp = data[body : end - 4]
        elif name == b"acTL":
            parts.num_frames = int.from_bytes(data[body : body + 4])
        if name == b"IEND":
            return
        at = end


def _walk_webp(data: bytes, parts: _Parts) -> None:
    """The chunks with pixels of the first frame."""
    at, size = 12, 4
    last = min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    while at < last:
        parts.count()
        name, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        end = at + 8 + length + length % 2
        parts.num_frames += name == b"ANMF"
        if name == b"EXIF":
            parts.exif = data[at + 8 : end]
        elif name == b"XMP ":
            parts.xmp = data[at + 8 : end]
        elif name in _WEBP_CHUNKS and (name != b"ANMF" or parts.num_frames == 1):
            parts.kept.append(_without_flags(data[at:end]) if name == b"VP8X" else data[at:end])
            size += end - at
        at = end
    parts.kept.insert(0, b"RIFF" + struct.pack("<I", min(size, 0xFFFFFFFE)) + b"WEBP")


def _without_flags(chunk: bytes) -> bytes:
    """A WebP file's header that promises no metadata."""
    flags = bytes(flag & ~_WEBP_METADATA for flag in chunk[8:9])
    return chunk[:8] + flags + chunk[9:]


def _walk_gif(data: bytes, parts: _Parts) -> None:
    """The header, and the first frame with its control block."""
    at = _after_palette(data, _GIF_HEADER, 10)
    parts.keep(0, at)
    while (found := _GIF_BLOCK.search(data, at)) is not None and parts.num_frames <= 1:
        parts.count()
        at, body = found.start(), found.end()
        is_first = not parts.num_frames
        match found[0]:
            case b"!":
                end = _after_blocks(data, body + 1, parts)
                if is_first and data[body : body + 1] == bytes((_GIF_CONTROL,)):
                    parts.keep(at, end)
            case b",":
                end = _after_blocks(data, _after_palette(data, body + 9, body + 8) + 1, parts)
                parts.num_frames += 1
                if is_first:
                    parts.keep(at, end)
            case _:
                break
        at = end
    parts.kept.append(b";" if at <= len(data) and parts.num_frames else b"")


def _after_palette(data: bytes, start: int, flags: int) -> int:
    """The place after a palette that may stand at `start`, as the byte at `flags` says."""
    has_palette, size = divmod(int.from_bytes(data[flags : flags + 1]), 1 << 7)
    return start + (3 << (size % 8 + 1) if has_palette else 0)


def _after_blocks(data: bytes, at: int, parts: _Parts) -> int:
    """The place after data blocks that begin here; past the file's end if that is missing."""
    while at < len(data) and (size := data[at]):
        parts.count()
        at += 1 + size
    return at + 1


def _orientation_in(exif: bytes) -> int:
    """The orientation in the first directory of EXIF metadata, 1 to 8; 0 if there is none."""
    exif = exif.removeprefix(_EXIF)
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 0
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (number,) = struct.unpack_from(f"{order}H", exif, start)
        for entry in range(start + 2, start + 2 + 12 * number, 12):
            tag, kind, _ = struct.unpack_from(f"{order}HHI", exif, entry)
            if tag == _ORIENTATION and kind in _NUMBERS:
                (value,) = struct.unpack_from(f"{order}{_NUMBERS[kind]}", exif, entry + 8)
                return value if value in range(1, 9) else 0
    except struct.error:
        pass
    return 0


_WALKS: dict[bytes, Callable[[bytes, _Parts], None]] = {
    b"\xff\xd8\xff": _walk_jpeg,
    _PNG: _walk_png,
    b"GIF87a": _walk_gif,
    b"GIF89a": _walk_gif,
    b"RIFF": _walk_webp,
}
"""Walks through files by their first bytes."""
