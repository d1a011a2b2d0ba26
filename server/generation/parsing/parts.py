"""Parts of a model's output: text, reasoning and calls, and the functions that make parts of text."""

from collections.abc import Callable, Iterable, Sequence

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text of the thinking before it."""

    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    """The model calls a tool."""

    name: str
    id: str | None = None
    """The call's id, in formats that have one."""


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """The next piece of the arguments of the call that began last. All pieces together are one JSON object."""

    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """The call is complete. A call without it was cut off by the end of the output."""


Part = Content | Reasoning | CallBegin | CallArguments | CallEnd


Emit = Callable[[str], Iterable[Part]]
"""Makes parts of a piece of text; none, if it is kept until more is known."""


class Kept:
    """Keeps a piece of text, instead of passing it on."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def __call__(self, text: str) -> Iterable[Part]:
        """Implements Emit."""
        self._pieces.append(text)
        return ()

    @property
    def text(self) -> str:
        """The text that was kept."""
        return "".join(self._pieces)


def nowhere(_: str) -> Iterable[Part]:
    """Drops a piece of text; implements Emit."""
    return ()


def content(text: str) -> Sequence[Part]:
    """Text of the answer, as a reader emits it."""
    return (Content(text),)


def arguments(text: str) -> Sequence[Part]:
    """Arguments of a call, as a reader emits them."""
    return (CallArguments(text),)


def reasoning(text: str) -> Sequence[Part]:
    """Text of the reasoning, as a reader emits it."""
    return (Reasoning(text),)
