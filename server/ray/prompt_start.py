"""Which requests belong together: those whose prompts begin alike find each other's keys and values in the cache."""

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Raw

from server.ray.routing_fields import RoutingFields, decoded

START_BYTES = 1024
"""So much of a prompt decides. A prefix that is longer is kept where it is; a shorter one, of some hundred tokens, is
soon in the cache of every replica, and what comes after it decides."""
_BEFORE = ("system", "instructions", "tools")
"""What chat templates put before the conversation, as the APIs call it."""
_CONVERSATION = ("messages", "input", "input_prefix", "prompt")
_NUM_FIRST = 16
"""Messages of a long conversation that are looked at."""
_First = msgspec.defstruct(
    "_First", [(f"item_{number}", Raw, Raw()) for number in range(_NUM_FIRST)], array_like=True, gc=False
)
"""The first items of an array, however many there are."""


def session_of(fields: RoutingFields, key: str = "") -> str:
    """The same for bodies whose prompts begin alike, have the same `cache_salt`, and come with the same key.

    Empty for a body in which there is no prompt. A conversation counts up to what the user says first, so that it stays
    where it began, however short that was. What is long counts as it is written, all else as what it means. Nothing of
    the prompt can be read from it.
    """
    try:
        start = b"\n".join(_canonical(part) for part in _parts(fields))
    except RecursionError:  # far too deep for the replica, too
        return ""
    if not start:
        return ""
    hashed = hashlib.blake2b(start[:START_BYTES], digest_size=16)
    hashed.update(msgspec.json.encode([fields.value_of("cache_salt"), key]))
    return hashed.hexdigest()


def _canonical(part: object) -> bytes:
    """The beginning at least: the same for the same value, unless that is a long one."""
    return bytes(memoryview(part)[:START_BYTES]) if isinstance(part, Raw) else msgspec.json.encode(part, order="sorted")


def _parts(fields: RoutingFields) -> Iterator[object]:
    yield from filter(None, map(fields.value_of, _BEFORE))
    conversation = next(filter(None, (_first_of(fields.value_of(name)) for name in _CONVERSATION)), None)
    if not isinstance(conversation, list):
        if conversation is not None:
            yield conversation
    elif isinstance(conversation[0], dict):
        yield from _up_to_user(conversation)
    else:
        yield _text_or_tokens(conversation)


def _first_of(conversation: object) -> object:
    """Of a long array of anything but tokens, the first items; all else as it is."""
    if not isinstance(conversation, Raw) or bytes(memoryview(conversation)[:1]) != b"[":
        return conversation
    items = msgspec.structs.astuple(msgspec.json.decode(conversation, type=_First))
    first = [decoded(item) for item in items if item]
    return conversation if first and isinstance(first[0], int) else first


def _text_or_tokens(prompts: Sequence[object]) -> object:
    """Of the first of several prompts; an array of numbers is one prompt."""
    return prompts if isinstance(prompts[0], int) else prompts[0]


def _up_to_user(messages: Sequence[object]) -> Iterator[object]:
    for message in messages:
        yield message
        if isinstance(message, dict) and message.get("role") == "user":
            return
