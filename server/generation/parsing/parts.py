"""What a parser finds in a model's output, piece by piece, in the order of the output."""

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
    """If the format gives calls ids of their own."""


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """The next piece of the arguments of the call that began last. All pieces together are one JSON object."""

    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """The call is complete. A call without it was cut off by the end of the output."""


Part = Content | Reasoning | CallBegin | CallArguments | CallEnd
