"""A streamed answer, and the helpers that describe it in words for all views. No I/O."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from server.client.openai_answers import Alternative, Choice, Chunk, TokenLogprob, ToolCall
from server.page.api import ApiError

STOPPED = "stopped"
"""Finish reason of an answer that the user stopped; servers never send it."""
ENDINGS = {
    "stop": "ended by itself",
    "length": "cut off at the token limit",
    "content_filter": "cut off by the server's content filter",
    STOPPED: "stopped",
}
"""Text for the user by finish reason."""
_MOST_CALLS = 1024
_SPELLED_BYTES = re.compile(r"bytes:(?:\\x[0-9a-f]{2})+")


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The part of an answer received so far."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = []
    finish_reason: str | None = None
    problem: str | None = None
    """Error that prevented the answer or cut it short."""
    notices: list[str] = []
    """Fields of the request that the server ignored or changed."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    """Seconds from the request to the first token."""
    fingerprint: str | None = None
    request_id: str | None = None

    def note(self, chunk: Chunk) -> None:
        """Copy a chunk's id, fingerprint, warnings and usage."""
        self.request_id = chunk.id or self.request_id
        self.fingerprint = chunk.system_fingerprint or self.fingerprint
        self.notices += [f"{one.path}: {one.reason}" for one in chunk.warnings]
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens
            self.cached_tokens = chunk.usage.cached_tokens
            self.completion_tokens = chunk.usage.completion_tokens

    def add(self, choice: Choice, at_s: float) -> None:
        """Append a piece received `at_s` seconds after the request. Raises ApiError for an invalid tool call index."""
        delta = choice.delta
        if self.first_token_s is None and (delta.text or delta.thought or delta.tool_calls):
            self.first_token_s = at_s
        self.content += delta.text
        self.reasoning += delta.thought
        for part in delta.tool_calls or ():
            _add_call(self.tool_calls, part)
        self.finish_reason = choice.finish_reason or self.finish_reason


class MeasuredAnswer(Answer, kw_only=True):
    """An answer with log-probabilities, scores and timing."""

    tokens: list[TokenLogprob] = []
    """Empty unless log-probabilities were requested."""
    last_token_s: float | None = None
    score: float | None = None
    cumulative_logprob: float | None = None

    def add(self, choice: Choice, at_s: float) -> None:
        super().add(choice, at_s)
        if choice.delta.text or choice.delta.thought:
            self.last_token_s = at_s
        if choice.logprobs is not None:
            self.tokens += choice.logprobs.content or ()
        self.completion_tokens = max(self.completion_tokens + len(choice.token_ids or ()), len(self.tokens))
        if choice.score is not None:
            self.score = choice.score
        if choice.cumulative_logprob is not None:
            self.cumulative_logprob = choice.cumulative_logprob

    @property
    def ending(self) -> str:
        """Text for the finish reason; empty while the answer is streamed."""
        return ENDINGS.get(self.finish_reason or "", self.finish_reason or "")

    @property
    def facts(self) -> str:
        """All measurements in one line."""
        found = timing(self.completion_tokens, self.first_token_s, self.last_token_s)
        if self.ending:
            found.append(self.ending)
        if self.tokens:
            mean = sum(token.logprob for token in self.tokens) / len(self.tokens)
            found.append(f"mean log-probability {number(mean)}")
        return " · ".join(found)


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common prefix of two sequences."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def token_bytes(token: Alternative) -> bytes:
    r"""A token's bytes, also from servers that write them into the text, as in `bytes:\xe2\x80`."""
    if token.bytes is not None:
        return bytes(token.bytes)
    if _SPELLED_BYTES.fullmatch(token.token):
        return bytes.fromhex(token.token.removeprefix("bytes:").replace("\\x", ""))
    return token.token.encode()


def timing(num_tokens: int, first_token_s: float | None, last_token_s: float | None) -> list[str]:
    """Token count, speed and time to first token, as far as known. Both times are measured from the request."""
    facts = [count(num_tokens, "token")] if num_tokens else []
    if first_token_s is not None and last_token_s is not None:
        writing_s = last_token_s - first_token_s
        if num_tokens > 1 and writing_s > 0:
            facts.append(f"{(num_tokens - 1) / writing_s:.0f} tokens/s")
        facts.append(f"first token after {1000 * first_token_s:.0f} ms")
    return facts


def count(number: int, name: str) -> str:
    """A number with its noun, as in "1 token" or "2 tokens"."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def number(value: float) -> str:
    """Three decimals, with a Unicode minus sign."""
    return f"{value:.3f}".replace("-", "−")


def _add_call(calls: list[dict[str, Any]], part: ToolCall) -> None:
    if not 0 <= part.index < _MOST_CALLS:
        raise ApiError(f"The server sent a tool call with the invalid index {part.index}.")
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
