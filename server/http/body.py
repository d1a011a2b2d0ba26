"""Reads request bodies and uploaded forms, and limits the size of each and the memory of all."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from io import BytesIO

from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from model_runner.read_numbers import whole_number
from server.errors import BodyTooLargeError, InvalidRequestError, MediaTypeError, UnavailableError, shorten
from server.http.fair_memory import FairMemory
from server.http.middleware import sender_of

MAX_INCOMPLETE_MIB = 256.0
"""Memory for incomplete bodies. At least four of the largest size always fit."""
_UNTYPED: Sequence[Sequence[str]] = ([], ["application/x-www-form-urlencoded"])
"""Content types of clients that say nothing about the body: none, and the default of curl's option `-d`."""
_OF_PAGES = frozenset({"origin", "referer", "sec-fetch-site"})
"""Headers that browsers send with the requests of web pages, and other clients do not."""


class IncomingBodies:
    """Reads request bodies, and bounds the memory of incomplete ones, fairly between senders."""

    def __init__(self, max_mib: float, max_incomplete_mib: float = MAX_INCOMPLETE_MIB) -> None:
        """`max_mib` is the size of the largest body that is accepted."""
        self.max_bytes = int(max_mib * (1 << 20))
        """Size of the largest body that is accepted."""
        max_incomplete = max(int(max_incomplete_mib * (1 << 20)), 4 * self.max_bytes)
        self._incomplete = FairMemory[asyncio.Timeout](max_incomplete, lambda reading: reading.reschedule(0))
        """Bodies, each represented by the timeout that ends its reading when it is in the past."""

    async def read_json(self, request: Request) -> bytes:
        """Read a JSON body. Raises MediaTypeError and everything that `read` raises.

        An object without a content type, or with the one that `curl -d` sets, is JSON as well, but not from a web page:
        pages of all sites may send such a request, and browsers ask the server only before one of type JSON.
        """
        types = [text.partition(";")[0].strip().lower() for text in request.headers.getlist("content-type")]
        if types == ["application/json"]:
            return await self.read(request)
        wrong = MediaTypeError("The request needs exactly one header 'Content-Type: application/json'.")
        if types not in _UNTYPED or not _OF_PAGES.isdisjoint(request.headers.keys()):
            raise wrong
        body = await self.read(request)
        if not body.lstrip(b" \t\r\n").startswith(b"{"):
            raise wrong
        return body

    async def read(self, request: Request, max_mib: float | None = None) -> bytes:
        """Read a body of any media type, of at most `max_mib` (by default the limit of all bodies).

        Raises MediaTypeError if the body is compressed, BodyTooLargeError before more is read, UnavailableError if
        the body was dropped to free memory, and ClientDisconnect.
        """
        _check_encoding(request)
        max_bytes = self.max_bytes if max_mib is None else int(max_mib * (1 << 20))
        too_large = BodyTooLargeError(f"The request body is too large. This server accepts at most {max_bytes} bytes.")
        if (whole_number(request.headers.get("content-length", "")) or 0) > max_bytes:
            raise too_large
        sender, body = sender_of(request).name, bytearray()
        try:
            async with asyncio.timeout(None) as reading:
                try:
                    async for chunk in request.stream():
                        body += chunk
                        if len(body) > max_bytes:
                            raise too_large
                        if reading.when() is None:  # it was not dropped
                            self._incomplete.resize(reading, sender, len(body))
                finally:
                    self._incomplete.resize(reading, sender, 0)
        except TimeoutError:
            raise UnavailableError(
                "The request body arrived too slowly, and its memory was needed for others. Please try again."
            ) from None
        return bytes(body)


MAX_FIELDS = 16
FRAME_BYTES = 64 * 1024
"""The largest form, without the content of its file."""
Keep = Callable[[bytes], Awaitable[None]]
"""A function that stores the next piece of the file."""


async def read_form(request: Request, file_field: str, max_file_bytes: int, keep: Keep) -> dict[str, str]:
    """Read a form with a file of at most this size. Returns its fields; the file's value is its filename.

    Raises BodyTooLargeError before much more is read, MediaTypeError, InvalidRequestError, ClientDisconnect, and
    everything that `keep` raises.
    """
    types = request.headers.getlist("content-type")
    kind, options = parse_options_header(types[0] if len(types) == 1 else "")
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise MediaTypeError("The request needs the header 'Content-Type: multipart/form-data; boundary=...'.")
    _check_encoding(request)
    file = _File(max_file_bytes, keep)
    parser = _FormParser(request.headers, _pieces(request, max_file_bytes, file), file_field, file)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise _malformed(error.message) from None
    if not parser.has_ended:
        raise _malformed("It ends before its last boundary.")
    return _fields(form.multi_items(), file_field)


class _File(UploadFile):
    """An uploaded file that is passed on as it arrives, without Starlette's temporary file."""

    def __init__(self, max_bytes: int, keep: Keep | None) -> None:
        """Without `keep`, the content is dropped."""
        super().__init__(BytesIO())
        self._max_bytes = max_bytes
        self._keep = keep
        self._num_bytes = 0
        self._unsaved: list[bytes] = []

    async def write(self, data: bytes) -> None:
        """Collect a part of the body's last piece; it may be as short as a line."""
        if self._keep is not None:
            self._unsaved.append(data)

    async def save(self) -> None:
        """Store the collected parts. Raises BodyTooLargeError and everything that `keep` raises."""
        if self._keep is not None and (content := b"".join(self._unsaved)):
            self._unsaved.clear()
            self._num_bytes += len(content)
            _check_size(self._num_bytes, self._max_bytes)
            await self._keep(content)


class _FormParser(MultiPartParser):
    """Starlette's parser without temporary files. It notices a form that is cut off, which Starlette accepts."""

    def __init__(self, headers: Headers, body: AsyncGenerator[bytes], file_field: str, file: _File) -> None:
        super().__init__(headers, body, max_files=MAX_FIELDS, max_fields=MAX_FIELDS, max_part_size=FRAME_BYTES)
        self.has_ended = False
        self._file_field = file_field
        self._file = file

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        part = self._current_part
        if part.file is not None:
            part.file.file.close()
            file = self._file if part.field_name == self._file_field else _File(0, None)
            part.file, file.filename = file, part.file.filename

    def on_end(self) -> None:
        self.has_ended = True


async def _pieces(request: Request, max_file_bytes: int, file: _File) -> AsyncGenerator[bytes]:
    """Yield the body in pieces, and store each piece's part of the file before reading the next."""
    declared = whole_number(request.headers.get("content-length", "")) or 0
    _check_size(declared - FRAME_BYTES, max_file_bytes)
    num_bytes = 0
    async for piece in request.stream():
        num_bytes += len(piece)
        _check_size(num_bytes - FRAME_BYTES, max_file_bytes)
        yield piece
        await file.save()


def _check_encoding(request: Request) -> None:
    """Refuse a compressed body, which would not be what its media type says."""
    encoding = ", ".join(request.headers.getlist("content-encoding"))
    if encoding.lower() not in ("", "identity"):
        message = f"Unsupported header 'Content-Encoding: {shorten(encoding)}'. Send the body without compression."
        raise MediaTypeError(message)


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        message = f"The file is too large. This server accepts files of at most {max_bytes} bytes."
        raise BodyTooLargeError(message, param="file")


def _fields(items: list[tuple[str, UploadFile | str]], file_field: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for name, value in items:
        shown = shorten(name)
        if name in fields:
            raise InvalidRequestError(f"Invalid '{shown}': the field is sent twice.", param=shown, code="invalid_value")
        text = value if isinstance(value, str) else value.filename or ""
        if name == file_field and (isinstance(value, str) or not text):
            message = f"Invalid type for '{shown}': expected a file with a name."
            raise InvalidRequestError(message, param=shown, code="invalid_type")
        fields[name] = text
    return fields


def _malformed(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"The form in the request body is malformed: {why}")
