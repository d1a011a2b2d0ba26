"""Interface of a measured server's surroundings: its settings, and consumers of its telemetry or page."""

# Short: only a protocol.
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol


class Surroundings(Protocol):
    """Settings and consumers of one server, apart from the measured load."""

    @property
    def name(self) -> str:
        """Name in the table of results."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """The server's settings, as environment variables."""
        ...

    @property
    def api_key(self) -> str | None:
        """The API key that the server requires, if any."""
        ...

    def watching(self, url: str) -> AbstractAsyncContextManager[None]:
        """Context in which the consumers run while the server at `url` is under load."""
        ...


Kind = Callable[[], AbstractContextManager[Surroundings]]
"""Creates the surroundings for one turn."""
