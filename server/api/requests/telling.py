"""A timeline as an object of the API."""

from collections.abc import Iterable
from typing import Literal

from scheduler.history import ChoiceHistory, MethodDrafts
from server.api.requests.objects import ChoiceRecord, ChoiceTimes, DraftCounts, RequestObject, RequestTimes
from server.telemetry.timeline import ChoiceTimeline, RequestTimeline


def object_of(timeline: RequestTimeline) -> RequestObject:
    """What is told of it."""
    work = timeline.work
    return RequestObject(
        id=timeline.request_id,
        answer_id=timeline.answer_id,
        state="ended" if timeline.has_ended else "running",
        endpoint=timeline.endpoint,
        model=timeline.model,
        started_at=round(timeline.started_unix, 3),
        status=timeline.status,
        error=timeline.error,
        input_tokens=timeline.prompt_tokens,
        cached_tokens=timeline.cached_tokens,
        output_tokens=timeline.output_tokens,
        time_to_first_token_ms=_ms_or_none(timeline.time_to_first_token_s),
        times_ms=_times_of(timeline),
        steps=None if work is None else work.steps,
        prefill_chunks=None if work is None else work.prefill_steps,
        preemptions=None if work is None else work.preemptions,
        waited_again_ms=None if work is None else _ms(work.waited_again_s),
        drafts=[] if work is None else _drafts_of(work.drafts),
        restarts=_unix(timeline.restarts, timeline),
        num_choices=timeline.num_choices,
        choices=[_choice_of(choice, timeline) for choice in timeline.choices],
    )


def _times_of(timeline: RequestTimeline) -> RequestTimes:
    work = timeline.work
    return RequestTimes(
        before=None if work is None else _ms(work.arrived_at - timeline.started_at),
        queue=None if work is None else _ms(work.queue_s),
        prefill=None if work is None else _ms_or_none(work.prefill_s),
        decode=None if work is None else _ms_or_none(work.decode_s),
        after=None if work is None else _ms(timeline.as_of - work.ended_at),
        total=_ms(timeline.as_of - timeline.started_at),
    )


def _choice_of(choice: ChoiceTimeline, timeline: RequestTimeline) -> ChoiceRecord:
    history = choice.history
    return ChoiceRecord(
        prompt=choice.prompt,
        index=choice.choice,
        state=_state_of(choice, timeline),
        finish_reason=choice.finish_reason,
        times_ms=None if history is None else _choice_times_of(history),
        cached_tokens=None if history is None else history.cached_tokens,
        output_tokens=None if history is None else history.output_tokens,
        steps=None if history is None else history.steps,
        prefill_chunks=None if history is None else history.prefill_steps,
        preemptions=None if history is None else history.preemptions,
        waited_again_ms=None if history is None else _ms(history.waited_again_s),
        drafts=[] if history is None else _drafts_of(history.drafts),
        restarts=_unix(choice.restarts, timeline),
    )


def _state_of(
    choice: ChoiceTimeline, timeline: RequestTimeline
) -> Literal["waiting", "prefill", "decode", "ended", "unknown"]:
    history = choice.history
    if timeline.has_ended or choice.finish_reason is not None:
        return "ended"
    if history is None:
        return "unknown"
    if history.has_ended:
        return "ended"
    if history.is_waiting:
        return "waiting"
    return "prefill" if history.first_token_at is None else "decode"


def _choice_times_of(history: ChoiceHistory) -> ChoiceTimes:
    return ChoiceTimes(
        queue=_ms(history.queue_s), prefill=_ms_or_none(history.prefill_s), decode=_ms_or_none(history.decode_s)
    )


def _drafts_of(drafts: Iterable[MethodDrafts]) -> list[DraftCounts]:
    return [
        DraftCounts(method=one.method, accepted_tokens=one.accepted, rejected_tokens=one.rejected) for one in drafts
    ]


def _unix(times: Iterable[float], timeline: RequestTimeline) -> list[float]:
    return [round(timeline.unix(at), 3) for at in times]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _ms_or_none(seconds: float | None) -> float | None:
    return None if seconds is None else _ms(seconds)
