"""Conversations that are longer than the context."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from server.generation.request import Conversation, Message

_SYSTEM = ("system", "developer")


def without_oldest(conversation: Conversation, fits: Callable[[Conversation], bool]) -> Conversation:
    """The conversation without as many of its oldest messages as it takes to fit; the shortest one if none does.

    What is left begins with a message of the user, so that no result is without its call, after those of the system.
    Longer ones must not fit where shorter ones do not.
    """
    starts = [index for index, message in enumerate(conversation.messages) if message["role"] == "user"]
    shorter = [conversation, *(replace(conversation, messages=_from(conversation.messages, at)) for at in starts[1:])]
    low, high = 0, len(shorter) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(shorter[middle]) else (middle + 1, high)
    return shorter[low]


def _from(messages: Sequence[Message], start: int) -> Sequence[Message]:
    return [message for index, message in enumerate(messages) if index >= start or message["role"] in _SYSTEM]
