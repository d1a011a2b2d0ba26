"""What the page looks at of a streamed answer; all else is skipped without being parsed."""

from typing import Any

import msgspec


class Alternative(msgspec.Struct):
    """A token that might have been, or was."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(Alternative):
    """A token of an answer, with the most probable ones in its place, best first."""

    top_logprobs: list[Alternative] = []


class Logprobs(msgspec.Struct):
    """Of the tokens of a chunk."""

    content: list[TokenLogprob] | None = None


class Function(msgspec.Struct):
    """A part of a call."""

    name: str | None = None
    arguments: str | None = None


class Custom(msgspec.Struct):
    """A part of a call of a tool that takes text."""

    name: str | None = None
    input: str | None = None


class ToolCall(msgspec.Struct):
    """A part of a call; parts of the same one have the same index."""

    index: int = 0
    id: str | None = None
    type: str | None = None
    function: Function | None = None
    custom: Custom | None = None


class Delta(msgspec.Struct):
    """What a chunk adds to a message."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def text(self) -> str:
        """Of the answer, or of the refusal in its place."""
        return self.content or self.refusal or ""

    @property
    def thought(self) -> str:
        """By whichever name the server has for it."""
        return self.reasoning_content or self.reasoning or ""


class Choice(msgspec.Struct):
    """What a chunk adds to a choice."""

    index: int = 0
    delta: Delta = msgspec.field(default_factory=Delta)
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None
    token_sources: list[str] | None = None
    score: float | None = None
    cumulative_logprob: float | None = None


class PromptDetails(msgspec.Struct):
    """Of a prompt's tokens."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class Notice(msgspec.Struct):
    """What of the request was left out or changed."""

    path: str = ""
    reason: str = ""


class Chunk(msgspec.Struct):
    """A piece of a streamed chat completion."""

    id: str = ""
    model: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    system_fingerprint: str | None = None
    seed: int | None = None
    warnings: list[Notice] = []
    error: Any = None
