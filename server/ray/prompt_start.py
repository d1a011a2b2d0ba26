"""Which requests belong together: those whose prompts begin alike find each other's keys and values in the cache."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

START_BYTES = 1024
"""So much of a prompt decides. A prefix that is longer is kept where it is; a shorter one, of some hundred tokens, is
soon in the cache of every replica, and what comes after it decides."""
_BEFORE = ("system", "instructions", "tools")
"""What chat templates put before the conversation, as the APIs call it."""
_CONVERSATION = ("messages", "input", "prompt")


def session_of(body: Mapping[str, Any], key: str = "") -> str:
    """The same for bodies whose prompts begin alike, have the same `cache_salt`, and come with the same key.

    Empty for a body in which there is no prompt. A conversation counts up to what the user says first, so that it stays
    where it began, however short that was. Nothing of the prompt can be read from it.
    """
    start = b"\n".join(msgspec.json.encode(part, order="sorted") for part in _parts(body))
    if not start:
        return ""
    hashed = hashlib.blake2b(start[:START_BYTES], digest_size=16)
    hashed.update(msgspec.json.encode([body.get("cache_salt"), key]))
    return hashed.hexdigest()


def _parts(body: Mapping[str, Any]) -> Iterator[object]:
    yield from (body[name] for name in _BEFORE if body.get(name))
    conversation = next((body[name] for name in _CONVERSATION if body.get(name)), None)
    if not isinstance(conversation, list):
        if conversation is not None:
            yield conversation
    elif isinstance(conversation[0], dict):
        yield from _up_to_user(conversation)
    else:
        yield conversation if isinstance(conversation[0], int) else conversation[0]  # tokens; or the first of several


def _up_to_user(messages: Sequence[object]) -> Iterator[object]:
    for message in messages:
        yield message
        if isinstance(message, dict) and message.get("role") == "user":
            return
