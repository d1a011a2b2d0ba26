"""Frames on a stream socket: each is its length in four bytes, and then itself."""

from collections.abc import Iterator

_LENGTH_BYTES = 4


def framed(payload: bytes) -> bytes:
    """The payload as one frame. Raises OverflowError from 4 GiB on."""
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


class FrameReader:
    """Puts frames together, however the stream was cut into pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that these bytes complete."""
        self._buffer += data
        start, end = 0, len(self._buffer)
        while end - start >= _LENGTH_BYTES:
            payload = start + _LENGTH_BYTES
            length = int.from_bytes(self._buffer[start:payload], "big")
            if end - payload < length:
                break
            yield bytes(memoryview(self._buffer)[payload : payload + length])
            start = payload + length
        del self._buffer[:start]
