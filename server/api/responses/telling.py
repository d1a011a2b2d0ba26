"""A response as its client sees it: the object, and the numbered events of its stream."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server.api.responses.output import Output, OutputForm, Told
from server.errors import ApiError, InvalidRequestError, RateLimitError
from server.generation.events import ChoiceEnd, Event, Usage
from server.generation.notices import Notice, as_warnings
from server.text.tokenizer import Tokenizer

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Head:
    """What a response is from its beginning on. Plain data."""

    fields: Mapping[str, Any]
    """What the object says of the request."""
    form: OutputForm
    generates: bool
    """Whether there is to be any output."""


class Telling:
    """Tells of one response, event after event."""

    def __init__(self, head: Head, tokenizer: Tokenizer) -> None:
        self.output = Output(head.fields["id"], head.form, tokenizer)
        self.status: Status = "queued" if head.fields["background"] else "in_progress"
        self.has_begun = False
        self._head = head.fields
        self._generates = head.generates
        self._has_started = False
        self._is_cut = False
        self._error: Mapping[str, str] | None = None
        self._completed_at: int | None = None
        self._usage: Mapping[str, Any] | None = None
        self._number = 0
        self._late: list[Notice] = []

    @property
    def late_notices(self) -> Sequence[Notice]:
        """Warnings that its beginning did not have."""
        return self._late

    def response(self) -> dict[str, Any]:
        """The object as it is now."""
        return {
            **self._head,
            "status": self.status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "output": list(self.output.items),
            "usage": self._usage,
        }

    def begin(self) -> Iterator[Told]:
        """The first events, if they were not told yet."""
        if self.has_begun:
            return
        self.has_begun = True
        yield self._with_response("response.created")
        if self.status == "queued":
            yield self._with_response("response.queued")

    def start(self) -> Iterator[Told]:
        """The model works on it, if that was not told yet."""
        yield from self.begin()
        if not self._has_started:
            self._has_started = True
            self.status = "in_progress"
            yield self._with_response("response.in_progress")

    def add(self, event: Event) -> Iterator[Told]:
        """What the model did next."""
        yield from self.start()
        if isinstance(event, ChoiceEnd) and self._generates:
            self._is_cut = event.reason == "length"
            yield from self._numbered(self.output.end_all(is_cut=self._is_cut))
        elif not isinstance(event, ChoiceEnd):
            yield from self._numbered(self.output.add(event))

    def end(self, usage: Usage) -> Iterator[Told]:
        """All is there."""
        self._usage = make_usage(usage)
        if not self._is_cut:
            self._completed_at = int(time.time())
        yield from self._ended("incomplete" if self._is_cut else "completed")

    def fail(self, error: ApiError) -> Iterator[Told]:
        """It came to nothing."""
        self._error = failure_of(error)
        yield from self._ended("failed")

    def cancel(self) -> Iterator[Told]:
        """Nobody wants the rest."""
        yield from self._ended("cancelled")

    def lose(self, error: ApiError) -> None:
        """What has ended is lost after all: there is no more than the error."""
        self._error = {"code": "server_error", "message": error.message}
        self.status = "failed"
        self._completed_at = None
        self.output.items.clear()

    def warn(self, *notices: Notice) -> None:
        """Have the object say more than it did at its beginning."""
        self._late += notices
        warnings = [*self._head.get("warnings", ()), *as_warnings(notices).get("warnings", ())]
        self._head = {**self._head, "warnings": warnings}

    def end_anew(self) -> Told:
        """The last event once more, after the response has changed."""
        self._number -= 1
        return self._with_response(f"response.{self.status}")

    def _ended(self, status: Status) -> Iterator[Told]:
        yield from self.start()
        yield from self._numbered(self.output.end("incomplete"))
        self.status = status
        yield self._with_response(f"response.{status}")

    def _with_response(self, kind: str) -> Told:
        (event,) = self._numbered([{"type": kind, "response": self.response()}])
        return event

    def _numbered(self, events: Iterable[Told]) -> Iterator[Told]:
        for event in events:
            yield {"type": event["type"], "sequence_number": self._number, **event}
            self._number += 1


def failure_of(error: ApiError) -> Mapping[str, str]:
    """A ResponseFailure of objects.py."""
    kinds = ((RateLimitError, "rate_limit_exceeded"), (InvalidRequestError, "invalid_prompt"))
    code = next((code for kind, code in kinds if isinstance(error, kind)), "server_error")
    return {"code": code, "message": error.message}


def make_usage(usage: Usage) -> dict[str, Any]:
    """A ResponseUsage of objects.py."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_written_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_drafts,
            "rejected_prediction_tokens": usage.rejected_drafts,
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
