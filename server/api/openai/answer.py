"""Answers of completions and chat completions: the shared envelope, the usage, and the frames of a stream."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from scheduler.interface import BeamScore
from server.api.answer_object import WARNINGS, AnswerObject, TemplateDate, doc
from server.api.dialect import AnswerContext
from server.api.fields.openai import SamplingFields
from server.api.openai.errors import DONE, error_frames
from server.errors import ApiError
from server.generation.events import OutputToken
from server.generation.events import Usage as Counts
from server.generation.notices import Notice
from server.http.event_stream import ascii_json

FINISH_REASON = (
    "`stop`: a stop string, a stop token or the end-of-sequence token; `length`: the token limit or the context's end."
)
OUTPUT_IDS = "Extension: ids of the answer's tokens, with return_token_ids; otherwise null."
PROMPT_IDS = "Extension: ids of the prompt's tokens, with return_token_ids; otherwise null."
PROMPT_LOGPROBS = (
    "Extension: with prompt_logprobs, an entry for each prompt token: null for the first, then the logprobs of the "
    "token and of the most probable ones, by id. Otherwise null."
)
CACHE_WRITTEN = "Prompt tokens that were added to the prefix cache."

StopReason = Annotated[
    str | int | UnsetType | None,
    doc("Extension: the stop string or stop token; null after the end-of-sequence token or at the length limit."),
]
Score = Annotated[float | UnsetType, doc("Extension: the score of the choice in beam search.")]
CumulativeLogprob = Annotated[
    float | UnsetType, doc("Extension: the sum of logprobs in beam search, after bans and penalties.")
]
Verification = Annotated[
    Literal["rejection", "typical"] | UnsetType,
    doc(
        "Extension, if the request chose it: the answer may differ from the one without speculation. With `rejection`, "
        "it has the same distribution; with `typical`, another one."
    ),
]
TokenSources = Annotated[
    Sequence[str] | UnsetType,
    doc(
        "Extension, with return_token_sources: the source of each output token, in the order of `token_ids`: `drawn` "
        "or `draft:METHOD`."
    ),
]


class PromptTokensDetails(AnswerObject):
    """Counts of certain prompt tokens."""

    cached_tokens: Annotated[int, doc("Prompt tokens that were found in the prefix cache.")]
    cache_write_tokens: Annotated[int, doc(CACHE_WRITTEN)]
    image_tokens: Annotated[int, doc("Prompt tokens at the places of images, without the text around them.")]
    text_tokens: Annotated[int, doc("All other prompt tokens.")]
    audio_tokens: Annotated[int, doc("Always 0.")] = 0


class CompletionTokensDetails(AnswerObject):
    """Counts of certain output tokens."""

    reasoning_tokens: Annotated[int, doc("Tokens up to the end of the reasoning.")] = 0
    audio_tokens: Annotated[int, doc("Always 0.")] = 0
    accepted_prediction_tokens: Annotated[int, doc("Draft tokens of any method that became output.")] = 0
    rejected_prediction_tokens: Annotated[int, doc("Draft tokens that were rejected.")] = 0


class Usage(AnswerObject):
    """Token counts of a request."""

    prompt_tokens: Annotated[int, doc("Tokens of all prompts; a prompt counts once for all of its choices.")]
    completion_tokens: Annotated[int, doc("Tokens of all choices, including choices that `best_of` discards.")]
    total_tokens: Annotated[int, doc("Sum of both.")]
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


StreamUsage = Annotated[
    Usage | UnsetType | None,
    doc(
        "In a stream, with `stream_options`: the usage of the whole request in the last chunk and null before it, or "
        "the usage so far in every chunk."
    ),
]


class Envelope(AnswerObject):
    """The properties with which completions, chat completions and their chunks begin."""

    id: Annotated[str, doc("Unique id of the answer; all chunks of a stream have the same.")]
    created: Annotated[int, doc("Unix time in seconds.")]
    model: Annotated[str, doc("Name of the served model.")]
    system_fingerprint: Annotated[str, doc("Identifies the model, settings and version that answers depend on.")]
    seed: Annotated[int, doc("Extension: the request's seed, or the drawn one.")]
    template_date: TemplateDate = UNSET
    verification: Verification = UNSET
    warnings: Annotated[Sequence[Notice] | UnsetType, doc(f"{WARNINGS} In a stream, only the first chunk has it.")] = (
        UNSET
    )


_Maker = Callable[..., Envelope]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIOptions:
    """Request fields that decide what the answer reports."""

    prompt_logprobs: int | None
    return_token_ids: bool
    return_token_sources: bool
    tokens_as_ids: bool
    """Whether logprobs name tokens by their ids."""
    include_usage: bool
    """Whether the last chunk of a stream has the usage and no choices; the usage is null in the other chunks."""
    continuous_usage: bool
    """Whether every chunk has the usage so far."""


def openai_options(body: SamplingFields) -> dict[str, Any]:
    """The arguments of OpenAIOptions for a body."""
    return {
        "prompt_logprobs": body.prompt_logprobs,
        "return_token_ids": bool(body.return_token_ids),
        "return_token_sources": bool(body.return_token_sources),
        "tokens_as_ids": bool(body.return_tokens_as_token_ids),
        "include_usage": body.include_usage,
        "continuous_usage": body.continuous_usage,
    }


class OpenAIAnswer:
    """The part of an Answer that completions and chat completions share."""

    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"

    def __init__(self, answering: AnswerContext, options: OpenAIOptions, whole: _Maker, chunk: _Maker) -> None:
        """`whole` and `chunk` are the classes of an answer and of a chunk of its stream."""
        self.run = answering.run
        self.tokenizer = answering.tokenizer
        self._reported = options
        plan = answering.run.plan
        envelope: dict[str, Any] = {
            "id": plan.id,
            "created": answering.created,
            "model": plan.model,
            "system_fingerprint": answering.fingerprint,
            "seed": plan.seed,
            "template_date": plan.template_date or UNSET,
            "verification": UNSET if plan.verification == "match" else plan.verification,
            "choices": (),
        }
        self._whole = partial(whole, warnings=plan.notices or UNSET, **envelope)
        self._chunk = partial(chunk, **envelope)
        self._no_usage = None if options.include_usage else UNSET
        self._usual = _around_choices(ascii_json(self._chunk(usage=self._no_usage)))
        self._is_first = True
        self._usage_sent = self.run.usage

    def body(self, choices: Iterable[AnswerObject], **extra: object) -> bytes:
        """Encode a whole answer. Choices are encoded one by one, so that no call blocks other threads for long.

        If `choices` is an iterator, at most one choice is in memory in a larger form than its JSON.
        """
        answer = self._whole(usage=usage_of(self.run.usage), **extra)
        before, after = _around_choices(msgspec.json.encode(answer))
        return b"".join((before, b",".join(msgspec.json.encode(choice) for choice in choices), after))

    def chunk(self, choice: AnswerObject) -> bytes:
        """The frame of a chunk with the last event's addition to a choice."""
        choice_json = ascii_json(choice)
        if self._is_first or self._reported.continuous_usage:
            self._usage_sent = self.run.usage
            return self._rare_chunk(choice_json)
        before, after = self._usual
        return b"".join((b"data: ", before, choice_json, after, b"\n\n"))

    def chunk_before(self, choice: bytes, **extra: object) -> bytes:
        """The frame of a chunk with this choice, as ASCII JSON, sent before the last event's addition."""
        cached = self.run.usage.cached_tokens
        self._usage_sent = msgspec.structs.replace(self._usage_sent, cached_tokens=cached)
        return self._rare_chunk(choice, **extra)

    def _rare_chunk(self, choice: bytes, **extra: object) -> bytes:
        usage = usage_of(self._usage_sent) if self._reported.continuous_usage else self._no_usage
        warnings = (self.run.plan.notices or UNSET) if self._is_first else UNSET
        self._is_first = False
        before, after = _around_choices(ascii_json(self._chunk(usage=usage, warnings=warnings, **extra)))
        return b"".join((b"data: ", before, choice, after, b"\n\n"))

    def end(self) -> bytes:
        """The last frames of a stream."""
        if not self._reported.include_usage:
            return DONE
        return b"data: " + ascii_json(self._chunk(usage=usage_of(self.run.usage))) + b"\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        """The last frames of a stream that fails."""
        return error_frames(error)

    def tokens_of(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        """The properties of a choice that report its tokens: their ids, and where they came from."""
        reported: dict[str, Any] = {}
        if self._reported.return_token_ids:
            reported["token_ids"] = [token.id for token in tokens]
        if self._reported.return_token_sources:
            sources = [f"draft:{token.draft_method}" if token.draft_method else "drawn" for token in tokens]
            reported["token_sources"] = sources
        return reported


def _around_choices(answer: bytes) -> tuple[bytes, bytes]:
    """Split an answer's JSON at its empty choices. Strings cannot contain the separator: their quotes are escaped."""
    before, after = answer.split(b'"choices":[]', 1)
    return before + b'"choices":[', b"]" + after


def usage_of(counts: Counts) -> Usage:
    """The usage of a request."""
    return Usage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        total_tokens=counts.prompt_tokens + counts.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=counts.cached_tokens,
            cache_write_tokens=counts.cache_written_tokens,
            image_tokens=counts.image_tokens,
            text_tokens=counts.prompt_tokens - counts.image_tokens,
        ),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=counts.reasoning_tokens,
            accepted_prediction_tokens=counts.accepted_drafts,
            rejected_prediction_tokens=counts.rejected_drafts,
        ),
    )


def score_of(beam: BeamScore | None) -> dict[str, Any]:
    """The extra properties of a choice that beam search found."""
    return {} if beam is None else {"score": beam.score, "cumulative_logprob": beam.cumulative_logprob}
