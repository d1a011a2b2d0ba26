"""The models of a server, and whether they are loaded. No I/O."""

from collections.abc import Mapping
from typing import Any

import msgspec


class ModelCard(msgspec.Struct, frozen=True):
    """A model in a server's list."""

    id: str
    root: str | None = None
    """The first of its names; None if the server does not tell."""
    status: Any = None
    """Whether it is loaded, in the form of llama.cpp's router; servers with one model have none."""

    @property
    def _status(self) -> Mapping[str, Any]:
        return self.status if isinstance(self.status, dict) else {}

    @property
    def is_loaded(self) -> bool:
        """Whether it answers without being loaded first, as far as the server tells."""
        return str(self._status.get("value", "loaded")) == "loaded"

    @property
    def is_unloaded(self) -> bool:
        """Whether it could be loaded now."""
        return str(self._status.get("value")) == "unloaded"

    @property
    def state(self) -> str:
        """In a few words; empty if it is loaded."""
        if self.is_loaded:
            return ""
        if not self.is_unloaded:
            progress = self._status.get("progress")
            return f"loading {100 * progress:.0f} %" if isinstance(progress, int | float) else "loading"
        if self._status.get("waiting"):
            return "waiting"
        return "failed" if self._status.get("failed") else "not loaded"

    @property
    def label(self) -> str:
        """Its name and state."""
        return f"{self.id} · {self.state}" if self.state else self.id

    @property
    def advice(self) -> str:
        """A sentence about its state for somebody who wants to ask it; empty if it is loaded."""
        if self.is_loaded:
            return ""
        if not self.is_unloaded:
            return f"{self.id} is {self.state}."
        if self._status.get("waiting"):
            return f"{self.id} waits to be loaded."
        if not self._status.get("failed"):
            return f"{self.id} is not loaded. Your next message loads it."
        return f"{self.id} could not be loaded: {self._status.get('error') or 'the server does not say why.'}"


class ModelCards(msgspec.Struct):
    """The answer of /v1/models."""

    data: list[ModelCard] | None = None


def are_several(cards: list[ModelCard]) -> bool:
    """Whether these are not only names of one model."""
    return len({card.root or card.id for card in cards}) > 1
