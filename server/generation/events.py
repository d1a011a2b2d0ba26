"""What happens to the choices of a request, for whichever API tells of it."""

from typing import Literal

import msgspec

from model_runner.contract import TokenLogprobs
from scheduler.interface import BeamScore

FinishedBy = Literal["stop", "length", "tool_calls"]


class OutputToken(msgspec.Struct, frozen=True):
    """A token of the answer."""

    id: int
    offset: int
    """Characters of the text before it."""
    logprobs: TokenLogprobs | None
    draft_method: str = ""
    """Of speculation, that guessed it; empty where the model's step found it."""


class TextDelta(msgspec.Struct, frozen=True):
    """The next piece of a choice's text, and the tokens that are complete with it, if tokens are to be reported.

    The pieces of a choice together hold all of its text, and each of its tokens once.
    """

    choice: int
    """Its number among all choices of the answer: those of the first prompt, then those of the second."""
    text: str
    tokens: tuple[OutputToken, ...] = ()
    is_last: bool = False
    """Whether the choice's end is the next event."""


class ReasoningDelta(msgspec.Struct, frozen=True):
    """The next piece of what the model thinks before it answers."""

    choice: int
    text: str
    tokens: tuple[OutputToken, ...] = ()


class ToolCallBegin(msgspec.Struct, frozen=True):
    """A call of a tool begins."""

    choice: int
    call: int
    """Its number among the choice's calls."""
    id: str
    name: str
    is_custom: bool = False
    """Whether free text follows in place of arguments."""
    tokens: tuple[OutputToken, ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True):
    """The next piece of a call's arguments, or of its text."""

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
    """Of what beam search found."""


Delta = TextDelta | ReasoningDelta | ToolCallBegin | ToolCallDelta
Event = Delta | ChoiceEnd


class Usage(msgspec.Struct, frozen=True):
    """Tokens that a request took so far. Each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompts, those that were found in the prefix cache."""
    cache_written_tokens: int
    """Of the prompts, those that were added to it."""
    accepted_drafts: int
    rejected_drafts: int
    reasoning_tokens: int = 0
    """Of the completions."""
