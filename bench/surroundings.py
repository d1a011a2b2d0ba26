"""What a server does and who listens to it, beside the load that is measured."""

# Short: a protocol.
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol


class Surroundings(Protocol):
    """Of one server."""

    @property
    def name(self) -> str:
        """In the table of results."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """The server's settings."""
        ...

    @property
    def api_key(self) -> str | None:
        """That it asks for."""
        ...

    def watching(self, url: str) -> AbstractAsyncContextManager[None]:
        """While the load is put on the server at this address."""
        ...


Kind = Callable[[], AbstractContextManager[Surroundings]]
"""Makes the surroundings of one turn."""
