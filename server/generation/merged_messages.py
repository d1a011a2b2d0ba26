"""Conversations for templates that want one system message, and then each role in its turn."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

Message = Mapping[str, Any]
_SYSTEM = ("system", "developer")
_SPEAKERS = ("user", "assistant")


def one_system_message(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with those of the system, wherever they are, merged into one at the beginning."""
    system = [message for message in messages if message["role"] in _SYSTEM]
    others = [message for message in messages if message["role"] not in _SYSTEM]
    return [_merged(system), *others] if system else others


def one_turn_each(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with those of the user, and of the assistant, that follow each other merged into one."""
    turns: list[Message] = []
    for role, group in groupby(messages, key=lambda message: message["role"]):
        same = list(group)
        turns += [_merged(same)] if role in _SPEAKERS else same
    return turns


def _merged(messages: Sequence[Message]) -> Message:
    """One message with all that these have; of parts that cannot be joined, the last one's."""
    whole: dict[str, Any] = {key: value for message in messages for key, value in message.items()}
    whole["role"] = messages[0]["role"]
    for key in ("content", "reasoning_content"):
        if key in whole:
            whole[key] = "\n\n".join(message[key] for message in messages if message.get(key))
    if "tool_calls" in whole:
        whole["tool_calls"] = [call for message in messages for call in message.get("tool_calls", ())]
    return whole
