"""Parts of a model's output: text, reasoning and calls, and functions that make parts from text."""

from collections.abc import Callable, Iterable, Sequence

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text of the reasoning before the answer."""

    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    """Start of a tool call."""

    name: str
    id: str | None = None
    """The call's id, in formats that have one."""


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """The next piece of the last call's arguments. Concatenated, the pieces are one JSON object."""

    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """The call is complete. A call without this was cut off by the end of the output."""


Part = Content | Reasoning | CallBegin | CallArguments | CallEnd


Emit = Callable[[str], Iterable[Part]]
"""Makes parts from a piece of text; none while the piece is held back."""


class Kept:
    """Collects text instead of emitting it. Implements Emit."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def __call__(self, text: str) -> Iterable[Part]:
        self._pieces.append(text)
        return ()

    @property
    def text(self) -> str:
        """The collected text."""
        return "".join(self._pieces)


def nowhere(_: str) -> Iterable[Part]:
    """Drops a piece of text. Implements Emit."""
    return ()


def content(text: str) -> Sequence[Part]:
    """Text of the answer. Implements Emit."""
    return (Content(text),)


def arguments(text: str) -> Sequence[Part]:
    """Arguments of a call. Implements Emit."""
    return (CallArguments(text),)


def reasoning(text: str) -> Sequence[Part]:
    """Text of the reasoning. Implements Emit."""
    return (Reasoning(text),)
