"""Events of a request's choices, independent of the API that reports them."""

from typing import Literal

import msgspec

from model_runner.contract import TokenLogprobs
from scheduler.interface import BeamScore

FinishedBy = Literal["stop", "length", "tool_calls"]


class OutputToken(msgspec.Struct, frozen=True):
    """A token of the answer."""

    id: int
    offset: int
    """Characters of the choice's text before this token."""
    logprobs: TokenLogprobs | None
    draft_method: str = ""
    """The speculation method that drafted the token; empty if the model's own step found it."""


class TextDelta(msgspec.Struct, frozen=True):
    """The next piece of a choice's text, with the tokens that it completes if tokens are reported.

    Concatenated, the pieces are the choice's text; together they have each of its tokens once.
    """

    choice: int
    """Index among all choices of the answer: the first prompt's choices come first, then the second's."""
    text: str
    tokens: tuple[OutputToken, ...] = ()
    is_last: bool = False
    """Whether the next event is the choice's end."""


class ReasoningDelta(msgspec.Struct, frozen=True):
    """The next piece of the model's reasoning."""

    choice: int
    text: str
    tokens: tuple[OutputToken, ...] = ()


class ToolCallBegin(msgspec.Struct, frozen=True):
    """Start of a tool call."""

    choice: int
    call: int
    """Index among the choice's calls."""
    id: str
    name: str
    is_custom: bool = False
    """Whether free text follows instead of JSON arguments."""
    tokens: tuple[OutputToken, ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True):
    """The next piece of a call's arguments, or of a custom call's text."""

    choice: int
    call: int
    text: str
    is_custom: bool = False
    tokens: tuple[OutputToken, ...] = ()


class ChoiceEnd(msgspec.Struct, frozen=True):
    """The end of a choice."""

    choice: int
    reason: FinishedBy
    stop_reason: str | int | None = None
    """The stop string, or the token among the request's `stop_token_ids`, that ended the choice."""
    beam: BeamScore | None = None
    """Score of the sequence; None without beam search."""


Delta = TextDelta | ReasoningDelta | ToolCallBegin | ToolCallDelta
Event = Delta | ChoiceEnd


class Usage(msgspec.Struct, frozen=True):
    """Tokens that a request has used so far. Each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    cache_written_tokens: int
    """Prompt tokens added to the prefix cache."""
    accepted_drafts: int
    rejected_drafts: int
    reasoning_tokens: int = 0
    """Part of `completion_tokens`."""
    image_tokens: int = 0
    """Part of `prompt_tokens`: those at the places of images."""
