"""Reading the bodies of requests: their media type, their size, and the memory that all of them take together."""

import asyncio

from fastapi import Request

from server.errors import BodyTooLargeError, MediaTypeError, UnavailableError

MAX_INCOMPLETE_MIB = 256.0
"""Of bodies that have come in part; at least four of the largest size are always allowed."""


class IncomingBodies:
    """Reads request bodies, and bounds the memory of bodies that have not come as a whole.

    A client may send its body slowly. If many do, the one that began first makes room for the others: a client of good
    will has long sent its body by then.
    """

    def __init__(self, max_mib: float, max_incomplete_mib: float = MAX_INCOMPLETE_MIB) -> None:
        """`max_mib` is the size of the largest body that is read."""
        self.max_bytes = int(max_mib * (1 << 20))
        """The size of the largest body."""
        self._max_incomplete = max(int(max_incomplete_mib * (1 << 20)), 4 * self.max_bytes)
        self._num_bytes = 0
        self._incomplete: dict[asyncio.Timeout, int] = {}
        """How much has come of each body, the one that began first at the front. Its timeout ends the reading."""

    async def read_json(self, request: Request) -> bytes:
        """Read the body of a request with JSON. Raises MediaTypeError, and what `read` does."""
        types = request.headers.getlist("content-type")
        if len(types) != 1 or types[0].partition(";")[0].strip().lower() != "application/json":
            raise MediaTypeError("The request needs the header 'Content-Type: application/json', once.")
        return await self.read(request)

    async def read(self, request: Request, max_mib: float | None = None) -> bytes:
        """Read a body of any media type, of at most `max_mib` if that is not the size of the largest.

        Raises BodyTooLargeError before more than that is read, UnavailableError if the body had to make room for
        others, and ClientDisconnect.
        """
        max_bytes = self.max_bytes if max_mib is None else int(max_mib * (1 << 20))
        too_large = BodyTooLargeError(f"The request body is too large. This server reads at most {max_bytes} bytes.")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 19 or int(declared) > max_bytes):
            raise too_large
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(None) as reading:
                self._incomplete[reading] = 0
                try:
                    async for chunk in request.stream():
                        chunks.append(chunk)
                        self._add(reading, len(chunk))
                        if self._incomplete[reading] > max_bytes:
                            raise too_large
                finally:
                    self._num_bytes -= self._incomplete.pop(reading)
        except TimeoutError:
            raise UnavailableError(
                "The request body came too slowly: the server needs the memory for other requests. Please try again."
            ) from None
        return b"".join(chunks)

    def _add(self, reading: asyncio.Timeout, num_bytes: int) -> None:
        """Count bytes of a body, and end the bodies that began first if all of them are too large together."""
        self._incomplete[reading] += num_bytes
        self._num_bytes += num_bytes
        excess = self._num_bytes - self._max_incomplete
        for oldest, size in self._incomplete.items():
            if excess <= 0:
                return
            if oldest.when() is None:
                oldest.reschedule(0)  # in the past: at once
            excess -= size
