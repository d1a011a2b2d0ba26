"""What chat completions and completions tell alike: the head of an answer, its usage, the frames of its stream.

Answers and chunks are written as plain JSON, since a chunk is written for every token; what they consist of stands in
the models of objects.py, against which the tests hold all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from scheduler.interface import BeamScore
from server.api.generation_api import Answering
from server.api.openai.errors import DONE, error_frames
from server.errors import ApiError
from server.generation.events import OutputToken, Usage
from server.generation.notices import as_warnings
from server.http.ascii_json import ascii_json


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """What the chunks of a stream say about usage."""

    at_end: bool = False
    """A last chunk without choices brings the usage; it is null in the others."""
    in_every_chunk: bool = False


class OpenAIAnswer:
    """The part of an Answer that does not depend on which of the two it is."""

    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"

    def __init__(self, answering: Answering, usage: StreamUsage, **constants: object) -> None:
        """`constants` are further properties that all answers and chunks have."""
        self.run = answering.run
        self.tokenizer = answering.tokenizer
        plan = answering.run.plan
        self._head: dict[str, Any] = {
            "id": plan.id,
            "created": answering.created,
            "model": plan.model,
            "system_fingerprint": answering.fingerprint,
            "seed": plan.seed,
            **({} if plan.verification == "match" else {"verification": plan.verification}),
            **constants,
        }
        self._warnings = as_warnings(plan.notices)
        self._usage = usage
        self._frame_head = b"data: " + ascii_json(self._head)[:-1] + b',"choices":['
        self._frame_tail = b'],"usage":null}\n\n' if usage.at_end else b"]}\n\n"
        self._is_first = True
        self._usage_told = self.run.usage

    def body(self, choices: Iterable[dict[str, Any]], **extra: object) -> bytes:
        """A whole answer. Each choice is encoded by itself: no call keeps other threads waiting for long.

        If `choices` is an iterator, no more than one of them is in memory in a larger form than its JSON.
        """
        rest = {"usage": make_usage(self.run.usage), **extra, **self._warnings}
        encoded = b",".join(msgspec.json.encode(choice) for choice in choices)
        head, tail = msgspec.json.encode(self._head)[:-1], msgspec.json.encode(rest)[1:]
        return b"".join((head, b',"choices":[', encoded, b"],", tail))

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """The frame of a chunk with what the last event brought this choice."""
        choice_json = ascii_json(choice)
        if self._is_first or self._usage.in_every_chunk:
            self._usage_told = self.run.usage
            return self._rare_chunk(choice_json, {})
        return b"".join((self._frame_head, choice_json, self._frame_tail))

    def chunk_before(self, choice: bytes, extra: Mapping[str, Any]) -> bytes:
        """The frame of a chunk with this choice, as ASCII JSON, that is sent before anything the last event brought."""
        cached = self.run.usage.cached_tokens
        self._usage_told = msgspec.structs.replace(self._usage_told, cached_tokens=cached)
        return self._rare_chunk(choice, extra)

    def _rare_chunk(self, choice: bytes, extra: Mapping[str, Any]) -> bytes:
        usage: dict[str, Any] = {"usage": None} if self._usage.at_end else {}
        if self._usage.in_every_chunk:
            usage = {"usage": make_usage(self._usage_told)}
        first = self._warnings if self._is_first else {}
        self._is_first = False
        rest = ascii_json({**usage, **extra, **first})[1:-1]
        return b"".join((self._frame_head, choice, b"]", rest and b"," + rest, b"}\n\n"))

    def end(self) -> bytes:
        """The last frames of a stream."""
        if not self._usage.at_end:
            return DONE
        return self._frame({"choices": [], "usage": make_usage(self.run.usage)}) + DONE

    def failure(self, error: ApiError) -> bytes:
        """The last frames of a stream that an error ends."""
        return error_frames(error)

    def _frame(self, rest: Mapping[str, Any]) -> bytes:
        return b"data: " + ascii_json({**self._head, **rest}) + b"\n\n"


def tokens_of(tokens: Sequence[OutputToken], *, ids: bool, sources: bool) -> dict[str, Any]:
    """What a choice tells of its tokens by themselves: their ids, and where they came from."""
    told: dict[str, Any] = {"token_ids": [token.id for token in tokens]} if ids else {}
    if sources:
        told["token_sources"] = [f"draft:{token.draft_method}" if token.draft_method else "drawn" for token in tokens]
    return told


def make_usage(usage: Usage) -> dict[str, Any]:
    """A Usage of objects.py."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_written_tokens,
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.accepted_drafts,
            "rejected_prediction_tokens": usage.rejected_drafts,
        },
    }


def score_of(beam: BeamScore | None) -> dict[str, Any]:
    """The properties of a choice that beam search found."""
    return {} if beam is None else {"score": beam.score, "cumulative_logprob": beam.cumulative_logprob}
