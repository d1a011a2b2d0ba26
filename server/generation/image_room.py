"""Bounds the memory of the image files of all requests that have not ended.

The files stay with their requests, so that these continue after a crash of the engine.
"""

from server.errors import RateLimitError
from server.generation.planning.plan import Plan

MAX_LIVE_MIB = 1024
"""Size of the images of all requests together. More are refused with status 429."""


class ImageRoom:
    """The memory for image files."""

    def __init__(self, max_bytes: int = MAX_LIVE_MIB << 20) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Size of the images of running and waiting requests."""

    def hold(self, plan: Plan) -> "HeldImages":
        """Hold the images of a plan until `release`. Raises RateLimitError if there is no room for them."""
        files = {id(image.data): len(image.data) for request in plan.requests for image in request.images}
        num_bytes = sum(files.values())
        if num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            message = f"The images of running and waiting requests have {self.num_bytes} of {self._max_bytes} bytes."
            raise RateLimitError(f"{message} Please try again later.")
        self.num_bytes += num_bytes
        return HeldImages(self, num_bytes)


class HeldImages:
    """The images of one request."""

    def __init__(self, room: ImageRoom, num_bytes: int) -> None:
        self._room = room
        self._num_bytes = num_bytes

    def release(self) -> None:
        """Free the memory; at most once."""
        self._room.num_bytes -= self._num_bytes
        self._num_bytes = 0
