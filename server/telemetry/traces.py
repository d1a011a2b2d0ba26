"""OpenTelemetry traces: a span for each request, and within it where its time went.

    chat tiny                     from the request to the end of its answer
      prepare                     reading it, template, tokens, grammar, and the way to the engine
      queue / prefill / decode    of each choice, by what the engine tells
      respond                     the rest: the way back, and the client's reading

Names are those of OpenTelemetry's conventions for generative AI; `gen_ai.latency.*` and `gen_ai.request.id` are vLLM's.
The only module that imports OpenTelemetry.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server import __version__
from server.telemetry.timeline import ChoiceTimeline, RequestTimeline

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_EXPORT_TIMEOUT_S = 5.0
"""For a collector that does not answer: a server that stops waits as long."""
Attributes = Mapping[str, str | int | float | tuple[str, ...] | None]


class Traces:
    """Sends the spans of requests that have ended to a collector, from a thread of its own.

    What else can be set, OpenTelemetry's own variables say: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and so on.
    """

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is the whole URL, of OTLP over HTTP."""
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("samewise", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def observe(self, timeline: RequestTimeline) -> None:
        """See Observer."""
        operation = _OPERATIONS.get(timeline.endpoint, timeline.endpoint.rpartition("/")[2])
        span = self._tracer.start_span(
            f"{operation} {timeline.model}",
            context=self._propagator.extract(timeline.trace_context),
            kind=SpanKind.SERVER,
            start_time=_unix_ns(timeline, timeline.started_at),
        )
        if span.is_recording():
            span.set_attributes(_given({"gen_ai.operation.name": operation, **_attributes(timeline)}))
            if timeline.error is not None:
                span.set_status(Status(StatusCode.ERROR, timeline.error))
            for at in timeline.restarts:
                span.add_event("engine restarted", timestamp=_unix_ns(timeline, at))
            parent = set_span_in_context(span)
            for phase in _phases(timeline):
                start, attributes = _unix_ns(timeline, phase.start), _given(phase.attributes)
                child = self._tracer.start_span(phase.name, parent, attributes=attributes, start_time=start)
                child.end(_unix_ns(timeline, phase.end))
        span.end(_unix_ns(timeline, timeline.as_of))

    def close(self) -> None:
        """Send what is left. Takes as long as the collector does, a few seconds at most."""
        self._provider.shutdown()


def _resource() -> Resource:
    """What the spans are of: what OpenTelemetry's variables say, above what is so by default."""
    said = Resource.create()
    own = {SERVICE_VERSION: __version__}
    if str(said.attributes[SERVICE_NAME]).startswith("unknown_service"):
        own[SERVICE_NAME] = "samewise"
    return said.merge(Resource(own))


@dataclass(frozen=True, slots=True)
class _Phase:
    """A part of a request's time, on the clock of its timeline."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)


def _phases(timeline: RequestTimeline) -> Iterator[_Phase]:
    if timeline.work is not None:
        yield _Phase("prepare", timeline.started_at, timeline.work.arrived_at)
    for choice in timeline.choices:
        yield from _phases_of(choice)
    if timeline.work is not None:
        yield _Phase("respond", timeline.work.ended_at, timeline.as_of)


def _phases_of(choice: ChoiceTimeline) -> Iterator[_Phase]:
    history = choice.history
    if history is None:
        return
    whose = {"samewise.prompt": choice.prompt, "samewise.choice": choice.choice}
    admitted_at = history.arrived_at + history.queue_s
    yield _Phase("queue", history.arrived_at, admitted_at, whose)
    if history.admitted_at is None:
        return
    counts = {
        "samewise.prompt_tokens": history.prompt_tokens,
        "samewise.cached_tokens": history.cached_tokens,
        "samewise.prefill_steps": history.prefill_steps,
    }
    prefilled_at = admitted_at + history.prefill_s
    yield _Phase("prefill", admitted_at, prefilled_at, {**whose, **counts})
    if history.first_token_at is None:
        return
    counts = {
        "samewise.output_tokens": history.output_tokens,
        "samewise.steps": history.steps,
        "samewise.preemptions": history.preemptions,
        **{f"samewise.drafts.{one.method}.accepted": one.accepted for one in history.drafts},
        **{f"samewise.drafts.{one.method}.rejected": one.rejected for one in history.drafts},
    }
    waited = {"samewise.waited_again_s": history.waited_again_s}
    yield _Phase(
        "decode",
        prefilled_at,
        history.as_of,
        {**whose, **counts, **waited, "samewise.finish_reason": choice.finish_reason},
    )


def _attributes(timeline: RequestTimeline) -> Attributes:
    """Of the request itself; None is left out."""
    reasons = tuple(choice.finish_reason for choice in timeline.choices if choice.finish_reason is not None)
    work = timeline.work
    return {
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
        "gen_ai.latency.time_in_queue": None if work is None else work.queue_s,
        "gen_ai.latency.time_in_model_prefill": None if work is None else work.prefill_s,
        "gen_ai.latency.time_in_model_decode": None if work is None else work.decode_s,
        "gen_ai.latency.time_in_model_inference": None if work is None else work.prefill_s + work.decode_s,
        "samewise.tenant": timeline.client or None,
        "samewise.restarts": len(timeline.restarts),
        "http.request.method": "POST",
        "url.path": timeline.endpoint,
        "http.response.status_code": timeline.status,
        "error.type": timeline.error,
    }


def _given(attributes: Attributes) -> dict[str, str | int | float | tuple[str, ...]]:
    return {name: value for name, value in attributes.items() if value is not None}


def _unix_ns(timeline: RequestTimeline, at: float) -> int:
    return int((timeline.started_unix + (at - timeline.started_at)) * 1e9)
