"""What the front knows of the replicas: it hands requests to them, and gets messages, metrics or errors."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from prometheus_client.core import Metric
from starlette.types import Message

from server.ray.exchange import ForwardedRequest, Taken


class Replicas(Protocol):
    """All of them."""

    def answer(self, request: ForwardedRequest, session: str) -> AsyncGenerator[Taken | Message]:
        """What a replica that the session belongs to says. Raises UnavailableError, also in the middle.

        Whoever stops reading before the end has the replica stop, too.
        """
        ...

    async def metrics(self) -> Sequence[tuple[str, Sequence[Metric]]]:
        """Of those that answer: a name, and what it says. Raises UnavailableError if none does."""
        ...
