"""Reading a form with a file (multipart/form-data) piece by piece: the file is never in memory as a whole."""

from collections.abc import AsyncIterator

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from server.errors import BodyTooLargeError, InvalidRequestError, MediaTypeError, shorten

MAX_PARTS = 16
MAX_VALUE_BYTES = 1024
"""Of a field that is no file: what is longer is cut off behind it, and so is too long for whoever reads it."""
FRAME_BYTES = 64 * 1024
"""What a form may have beside the content of its file."""


class Form:
    """Takes the body of a form apart as it comes. The field of one name is a file, all others are texts."""

    def __init__(self, content_type: str, file_field: str) -> None:
        """Raises MediaTypeError."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise MediaTypeError("The request needs the header 'Content-Type: multipart/form-data; boundary=...'.")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """As the client says; None as long as there was no file."""
        self._file_field = file_field
        self._name = ""
        """Of the part that comes now."""
        self._header = self._header_value = self._disposition = b""
        self._value = bytearray()
        self._content: list[bytes] = []
        self._num_parts = 0
        self._has_ended = False
        self._parser = self._make_parser(options[b"boundary"])

    def feed(self, piece: bytes) -> bytes:
        """What of the file is in this piece of the body. Raises InvalidRequestError."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _malformed(str(error)) from None
        content = b"".join(self._content)
        self._content.clear()
        return content

    def finish(self) -> None:
        """Raises InvalidRequestError if something is missing at the end."""
        if not self._has_ended:
            raise _malformed("it ends before its last boundary")

    def _make_parser(self, boundary: bytes) -> MultipartParser:
        try:
            return MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise _malformed(str(error)) from None

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequestError(f"The form has more than {MAX_PARTS} fields.")
        self._disposition = b""
        self._value.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if not options.get(b"name"):
            raise _malformed("a field has no name")
        self._name = _decoded(options[b"name"])
        if self._name in self.fields or (self._is_file and self.filename is not None):
            name = shorten(self._name)
            raise InvalidRequestError(f"Invalid '{name}': it is given twice.", param=name, code="invalid_value")
        if self._is_file:
            self.filename = _decoded(options.get(b"filename", b""))
            if not self.filename:
                message = f"Invalid type for '{self._name}': expected a file with a name."
                raise InvalidRequestError(message, param=self._name, code="invalid_type")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._content.append(data[start:end])
        else:
            self._value += data[start : min(end, start + MAX_VALUE_BYTES + 1 - len(self._value))]

    def _on_part_end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = _decoded(bytes(self._value))

    def _on_end(self) -> None:
        self._has_ended = True

    @property
    def _is_file(self) -> bool:
        return self._name == self._file_field


def form_of(request: Request, file_field: str) -> Form:
    """The form that the request says it has, of which nothing is read yet. Raises MediaTypeError."""
    types = request.headers.getlist("content-type")
    return Form(types[0] if len(types) == 1 else "", file_field)


async def pieces_of(request: Request, max_file_bytes: int) -> AsyncIterator[bytes]:
    """The body of a form with a file of at most this size. Raises BodyTooLargeError before much more than that is read.

    Raises ClientDisconnect if the client leaves before it is all there.
    """
    declared = request.headers.get("content-length", "")
    num_bytes = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
    check_size(num_bytes - FRAME_BYTES, max_file_bytes)
    num_bytes = 0
    async for piece in request.stream():
        num_bytes += len(piece)
        check_size(num_bytes - FRAME_BYTES, max_file_bytes)
        yield piece


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Raises BodyTooLargeError for a larger file."""
    if num_bytes > max_bytes:
        message = f"The file is too large. This server takes files of at most {max_bytes} bytes."
        raise BodyTooLargeError(message, param="file")


def _decoded(text: bytes) -> str:
    """As UTF-8, which all but very old clients write."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text.decode("latin-1")


def _malformed(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"The request body is no well-formed form: {why}.")
