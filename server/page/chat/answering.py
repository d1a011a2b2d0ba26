"""One answer on its way from the server into a turn."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from server.client.openai_answers import Choice, Chunk, ToolCall
from server.page.api import Api, ApiError
from server.page.conversation import Turn

PATH = "/chat/completions"
_SEEDS = 1 << 31
_MOST_CALLS = 1024


def new_seed() -> int:
    """Any that servers take."""
    return secrets.randbelow(_SEEDS)


def with_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with a seed, a new one where they have none: so every answer can be had again."""
    return {"seed": new_seed(), **settings}


def body_of(turn: Turn, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The request that an answer comes of; the same again for the same answer. `messages` are those before it."""
    body = {**(turn.request or {}), "messages": list(messages), "stream": True}
    body["stream_options"] = {"include_usage": True}
    if turn.prefix is not None:
        body["messages"].append({"role": "assistant", "content": turn.prefix})
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


class Answering:
    """Fills a turn with what the server streams."""

    def __init__(self, api: Api, turn: Turn, messages: Sequence[Mapping[str, Any]]) -> None:
        """`turn.request` has the fields of the request, `messages` those before it."""
        self._api = api
        self._turn = turn
        self._messages = messages

    async def run(self, key: str, on_text: Callable[[str, str], None]) -> None:
        """Returns at the end of the answer; `on_text` gets each piece of it, and each of reasoning.

        Raises ApiError; what came until then is kept. Cancelling it ends the request.
        """
        body = body_of(self._turn, self._messages)
        started = time.monotonic()
        try:
            async with self._api.stream(PATH, body, key) as chunks:
                async for chunk in chunks:
                    self._note(chunk)
                    for choice in chunk.choices:
                        if choice.index == 0:
                            self._add(choice, started, on_text)
        finally:
            self._turn.seconds = time.monotonic() - started

    def _note(self, chunk: Chunk) -> None:
        turn = self._turn
        turn.request_id = chunk.id or turn.request_id
        turn.fingerprint = chunk.system_fingerprint or turn.fingerprint
        turn.notices += [f"{one.path}: {one.reason}" for one in chunk.warnings]
        if chunk.usage is not None:
            turn.prompt_tokens = chunk.usage.prompt_tokens
            turn.cached_tokens = chunk.usage.cached_tokens
            turn.completion_tokens = chunk.usage.completion_tokens

    def _add(self, choice: Choice, started: float, on_text: Callable[[str, str], None]) -> None:
        turn, delta = self._turn, choice.delta
        text, thought = delta.text, delta.thought
        if turn.first_token_s is None and (text or thought or delta.tool_calls):
            turn.first_token_s = time.monotonic() - started
        turn.content += text
        turn.reasoning += thought
        for part in delta.tool_calls or ():
            add_call(turn.tool_calls, part)
        turn.finish_reason = choice.finish_reason or turn.finish_reason
        if text or thought or delta.tool_calls:
            on_text(text, thought)


def add_call(calls: list[dict[str, Any]], part: ToolCall) -> None:
    """Add a part to the calls so far. Parts of one call come one after the other. Raises ApiError for a wild index."""
    if not 0 <= part.index < _MOST_CALLS:
        raise ApiError(f"The server sent a call with the index {part.index}.")
    while len(calls) <= part.index:
        calls.append({})
    call = calls[part.index]
    call["id"] = part.id or call.get("id", "")
    call["type"] = part.type or call.get("type", "function")
    for name, piece in (("function", part.function), ("custom", part.custom)):
        if piece is not None:
            known = call.setdefault(name, {})
            for field, value in msgspec.to_builtins(piece).items():
                if value is not None:
                    known[field] = known.get(field, "") + value
