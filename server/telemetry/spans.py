"""The spans of a request in a trace: what they are called and what they tell.

    chat tiny                     from the request to the end of its answer
      prepare                     reading it, template, tokens, grammar, and the way to the engine
      queue / prefill / decode    of each choice, by what the engine tells
      respond                     the rest: the way back, and the client's reading

Names are those of OpenTelemetry's conventions for generative AI; `gen_ai.latency.*` and `gen_ai.request.id` are vLLM's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from scheduler.history import ChoiceHistory
from server.telemetry.timeline import ChoiceTimeline, EngineWork, RequestTimeline

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
Attributes = Mapping[str, str | int | float | tuple[str, ...]]
_Perhaps = Mapping[str, str | int | float | tuple[str, ...] | None]
"""None is left out."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's time, on the clock of its timeline."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)


def name_of(timeline: RequestTimeline) -> str:
    """Of the request's own span."""
    return f"{_operation(timeline)} {timeline.model}"


def attributes_of(timeline: RequestTimeline, tenant: str) -> Attributes:
    """Of the request's own span; `tenant` is empty for one without a name."""
    return _given({**_of_request(timeline), "samewise.tenant": tenant or None, **_of_work(timeline.work)})


def phases_of(timeline: RequestTimeline) -> Iterator[Phase]:
    """Those that the request came to, choice by choice."""
    if timeline.work is not None:
        yield Phase("prepare", timeline.started_at, timeline.work.arrived_at)
    for choice in timeline.choices:
        if choice.history is not None:
            yield from _phases_of_choice(choice, choice.history)
    if timeline.work is not None:
        yield Phase("respond", timeline.work.ended_at, timeline.as_of)


def _phases_of_choice(choice: ChoiceTimeline, history: ChoiceHistory) -> Iterator[Phase]:
    whose = {"samewise.prompt": choice.prompt, "samewise.choice": choice.choice}
    admitted_at, first_token_at, ended_at = history.admitted_at, history.first_token_at, history.as_of
    yield Phase("queue", history.arrived_at, ended_at if admitted_at is None else admitted_at, whose)
    if admitted_at is None:
        return
    counts = {
        "samewise.prompt_tokens": history.prompt_tokens,
        "samewise.cached_tokens": history.cached_tokens,
        "samewise.prefill_steps": history.prefill_steps,
    }
    prefilled_at = ended_at if first_token_at is None else first_token_at
    yield Phase("prefill", admitted_at, prefilled_at, {**whose, **counts})
    if first_token_at is None:
        return
    told = {
        "samewise.output_tokens": history.output_tokens,
        "samewise.steps": history.steps,
        "samewise.preemptions": history.preemptions,
        "samewise.waited_again_s": history.waited_again_s,
        "samewise.finish_reason": choice.finish_reason,
        **{f"samewise.drafts.{one.method}.accepted": one.accepted for one in history.drafts},
        **{f"samewise.drafts.{one.method}.rejected": one.rejected for one in history.drafts},
    }
    yield Phase("decode", first_token_at, ended_at, _given({**whose, **told}))


def _operation(timeline: RequestTimeline) -> str:
    return _OPERATIONS.get(timeline.endpoint, timeline.endpoint.rpartition("/")[2])


def _of_request(timeline: RequestTimeline) -> _Perhaps:
    reasons = tuple(choice.finish_reason for choice in timeline.choices if choice.finish_reason is not None)
    return {
        "gen_ai.operation.name": _operation(timeline),
        "gen_ai.provider.name": "samewise",
        "gen_ai.request.model": timeline.model,
        "gen_ai.response.model": timeline.model,
        "gen_ai.request.id": timeline.request_id,
        "gen_ai.response.id": timeline.answer_id or None,
        "gen_ai.response.finish_reasons": reasons or None,
        "gen_ai.request.max_tokens": timeline.max_tokens or None,
        "gen_ai.request.choice.count": timeline.num_choices,
        "gen_ai.usage.input_tokens": timeline.prompt_tokens,
        "gen_ai.usage.output_tokens": timeline.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": timeline.cached_tokens,
        "gen_ai.latency.e2e": timeline.as_of - timeline.started_at,
        "gen_ai.latency.time_to_first_token": timeline.time_to_first_token_s,
        "samewise.background": timeline.is_background,
        "samewise.restarts": len(timeline.restarts),
        "http.request.method": "POST",
        "url.path": timeline.endpoint,
        "http.response.status_code": timeline.status,
        "error.type": timeline.error,
    }


def _of_work(work: EngineWork | None) -> _Perhaps:
    if work is None:
        return {}
    return {
        "gen_ai.latency.time_in_queue": work.queue_s,
        "gen_ai.latency.time_in_model_prefill": work.prefill_s,
        "gen_ai.latency.time_in_model_decode": work.decode_s,
        "gen_ai.latency.time_in_model_inference": work.inference_s,
    }


def _given(attributes: _Perhaps) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}
