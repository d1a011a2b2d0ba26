"""What completions and chat completions share: the envelope of an answer, its usage, and the frames of its stream."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from scheduler.interface import BeamScore
from server.api.answer_object import WARNINGS, AnswerObject, doc
from server.api.dialect import AnswerContext
from server.api.fields.openai import SamplingFields
from server.api.openai.errors import DONE, error_frames
from server.errors import ApiError
from server.generation.events import OutputToken
from server.generation.events import Usage as Counts
from server.generation.notices import Notice
from server.http.event_stream import ascii_json

FINISH_REASON = (
    "`stop`: a stop string, a stop token or the model's own end; `length`: the most tokens, or the context's end."
)
OUTPUT_IDS = "Extension: with return_token_ids, the tokens of the answer, otherwise null."
PROMPT_IDS = "Extension: with return_token_ids, the tokens of the prompt, otherwise null."
PROMPT_LOGPROBS = (
    "Extension: with prompt_logprobs, null for the first token, then, for each, its own and the most probable ones, by "
    "their ids. Otherwise null."
)
CACHE_WRITTEN = "Added to the prefix cache, where the same prompt would find them."

StopReason = Annotated[
    str | int | UnsetType | None,
    doc("Extension: the stop string or stop token; null after the model's own end and where the length ran out."),
]
Score = Annotated[float | UnsetType, doc("Extension, of beam search: what the choice was ranked by.")]
CumulativeLogprob = Annotated[float | UnsetType, doc("Extension, of beam search, after bans and penalties.")]
Verification = Annotated[
    Literal["rejection", "typical"] | UnsetType,
    doc(
        "Extension, where the request asked for one of these: the answer is not the one that it would be "
        "without speculation. After `rejection` it is of the same distribution, after `typical` of another."
    ),
]
TokenSources = Annotated[
    Sequence[str] | UnsetType,
    doc(
        "Extension, with return_token_sources: for each token of the output, in the order of `token_ids`, `drawn` or "
        "`draft:METHOD`."
    ),
]


class PromptTokensDetails(AnswerObject):
    """Of the prompt's tokens."""

    cached_tokens: Annotated[int, doc("Found in the prefix cache.")]
    cache_write_tokens: Annotated[int, doc(CACHE_WRITTEN)]
    audio_tokens: Annotated[int, doc("Always 0.")] = 0


class CompletionTokensDetails(AnswerObject):
    """Of the completion's tokens."""

    reasoning_tokens: Annotated[int, doc("Up to the last of the reasoning.")] = 0
    audio_tokens: Annotated[int, doc("Always 0.")] = 0
    accepted_prediction_tokens: Annotated[int, doc("Draft tokens of any method that became output.")] = 0
    rejected_prediction_tokens: Annotated[int, doc("Draft tokens that were verified in vain.")] = 0


class Usage(AnswerObject):
    """Tokens that a request took."""

    prompt_tokens: Annotated[int, doc("Each prompt counts once, however many choices it has.")]
    completion_tokens: Annotated[int, doc("Of all choices, those included that `best_of` leaves out.")]
    total_tokens: Annotated[int, doc("Both.")]
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


StreamUsage = Annotated[
    Usage | UnsetType | None,
    doc(
        "In a stream, with `stream_options`: of the whole request in the last chunk and null before, or so far in "
        "every one."
    ),
]


class Envelope(AnswerObject):
    """What completions, chat completions and their chunks begin with."""

    id: Annotated[str, doc("That no other answer has; all chunks of a stream have the same.")]
    created: Annotated[int, doc("Unix time in seconds.")]
    model: Annotated[str, doc("Name of the served model.")]
    system_fingerprint: Annotated[str, doc("Changes whenever the answer to the same request may.")]
    seed: Annotated[int, doc("Extension: the request's seed, or the one that was drawn for it.")]
    verification: Verification = UNSET
    warnings: Annotated[Sequence[Notice] | UnsetType, doc(f"{WARNINGS} Of a stream, in its first chunk.")] = UNSET


_Maker = Callable[..., Envelope]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIOptions:
    """The fields of a request that say what its answer reports."""

    prompt_logprobs: int | None
    return_token_ids: bool
    return_token_sources: bool
    tokens_as_ids: bool
    """Whether logprobs name tokens by their ids."""
    include_usage: bool
    """Whether the last chunk of a stream has no choices and the usage, which is null in the others."""
    continuous_usage: bool
    """Whether every chunk has the usage so far."""


def openai_options(body: SamplingFields) -> dict[str, Any]:
    """The body's fields of OpenAIOptions."""
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
        """A whole answer. Each choice is encoded by itself: no call keeps other threads waiting for long.

        If `choices` is an iterator, no more than one of them is in memory in a larger form than its JSON.
        """
        answer = self._whole(usage=usage_of(self.run.usage), **extra)
        before, after = _around_choices(msgspec.json.encode(answer))
        return b"".join((before, b",".join(msgspec.json.encode(choice) for choice in choices), after))

    def chunk(self, choice: AnswerObject) -> bytes:
        """The frame of a chunk with what the last event brought this choice."""
        choice_json = ascii_json(choice)
        if self._is_first or self._reported.continuous_usage:
            self._usage_sent = self.run.usage
            return self._rare_chunk(choice_json)
        before, after = self._usual
        return b"".join((b"data: ", before, choice_json, after, b"\n\n"))

    def chunk_before(self, choice: bytes, **extra: object) -> bytes:
        """The frame of a chunk with this choice, as ASCII JSON, that is sent before anything the last event brought."""
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
        """The last frames of a stream that an error ends."""
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
    """An answer's JSON before and after the choices, which it has none of. In strings, quotes have backslashes."""
    before, after = answer.split(b'"choices":[]', 1)
    return before + b'"choices":[', b"]" + after


def usage_of(counts: Counts) -> Usage:
    """The usage of a request."""
    return Usage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        total_tokens=counts.prompt_tokens + counts.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=counts.cached_tokens, cache_write_tokens=counts.cache_written_tokens
        ),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=counts.reasoning_tokens,
            accepted_prediction_tokens=counts.accepted_drafts,
            rejected_prediction_tokens=counts.rejected_drafts,
        ),
    )


def score_of(beam: BeamScore | None) -> dict[str, Any]:
    """The properties of a choice that beam search found."""
    return {} if beam is None else {"score": beam.score, "cumulative_logprob": beam.cumulative_logprob}
