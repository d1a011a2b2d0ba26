"""What a server says of its fields, by /v1/capabilities. No I/O in here."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Support = Literal["honoured", "hint", "no_effect", "refused"]


class Schema(msgspec.Struct, frozen=True, rename="camel"):
    """What is looked at of a JSON schema."""

    type: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: float | None = None
    exclusive_maximum: float | None = None
    enum: tuple[str | int | float | bool | None, ...] = ()
    items: Any = None
    any_of: tuple["Schema", ...] = ()

    @property
    def alternatives(self) -> list["Schema"]:
        """All that is possible, beside null."""
        return [one for one in self.any_of or (self,) if one.type != "null"]

    @property
    def lower(self) -> float | None:
        return self.exclusive_minimum if self.minimum is None else self.minimum

    @property
    def upper(self) -> float | None:
        return self.exclusive_maximum if self.maximum is None else self.maximum


class Described(msgspec.Struct, frozen=True):
    """One field of a request."""

    support: Support = "refused"
    description: str | None = None
    default: Any = None
    values: Schema = Schema()
    excludes: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether the server does something with it."""
        return self.support in ("honoured", "hint")


Fields = Mapping[str, Described]
"""By name."""


class Capabilities(msgspec.Struct, frozen=True):
    """What a server can do."""

    endpoints: dict[str, dict[str, Described]]
    """The fields of requests by path."""
    logprobs: str = ""
    """Whether they are `raw` or `processed`."""
