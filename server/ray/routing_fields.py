"""What routing and refusing need of a request's body. All else is skipped, so that a body costs little.

A body of megabytes that is decoded as a whole makes millions of objects, and all streams wait meanwhile.
"""

import msgspec
from msgspec import Raw

SHORT_BYTES = 64 << 10
"""Values up to this size are decoded; longer ones are only looked at from outside."""
_ABSENT = Raw()


class RoutingFields(msgspec.Struct, gc=False, frozen=True):
    """Fields of a body, as they are written; those that it does not have are empty."""

    system: Raw = _ABSENT
    instructions: Raw = _ABSENT
    tools: Raw = _ABSENT
    messages: Raw = _ABSENT
    input: Raw = _ABSENT
    prompt: Raw = _ABSENT
    input_prefix: Raw = _ABSENT
    cache_salt: Raw = _ABSENT
    previous_response_id: Raw = _ABSENT
    conversation: Raw = _ABSENT
    background: Raw = _ABSENT
    store: Raw = _ABSENT

    def value_of(self, name: str) -> object:
        """The value of a field, as `decoded` has it."""
        return decoded(getattr(self, name))


def read_fields(content: bytes) -> RoutingFields | None:
    """None if the body is no JSON object, as far as that shows, which the replica says better."""
    try:
        return msgspec.json.decode(content, type=RoutingFields)
    except (ValueError, RecursionError):
        return None


def decoded(written: Raw) -> object:
    """The value, or itself if it is long. None of nothing, and of what is no JSON after all: the replica says that."""
    if len(written) > SHORT_BYTES:
        return written
    try:
        return msgspec.json.decode(written) if written else None
    except (ValueError, RecursionError):
        return None
