"""OpenTelemetry traces: one span for each request, with child spans for the phases of its choices."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from scheduler.interface import ChoiceHistory
from server import __version__
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
"""Attributes before None values are dropped."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's time, on the clock of its timeline."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)


def name_of(timeline: RequestTimeline) -> str:
    """Name of the request's own span."""
    return f"{_operation(timeline)} {timeline.model}"


def attributes_of(timeline: RequestTimeline, tenant: str) -> Attributes:
    """Attributes of the request's own span; `tenant` is empty for a client without a name."""
    return _given({**_of_request(timeline), "samewise.tenant": tenant or None, **_of_work(timeline.work)})


def phases_of(timeline: RequestTimeline) -> Iterator[Phase]:
    """The phases that the request reached, choice by choice."""
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
    decoded = {
        "samewise.output_tokens": history.output_tokens,
        "samewise.steps": history.steps,
        "samewise.preemptions": history.preemptions,
        "samewise.waited_again_s": history.waited_again_s,
        "samewise.finish_reason": choice.finish_reason,
        **{f"samewise.drafts.{one.method}.accepted": one.accepted for one in history.drafts},
        **{f"samewise.drafts.{one.method}.rejected": one.rejected for one in history.drafts},
    }
    yield Phase("decode", first_token_at, ended_at, _given({**whose, **decoded}))


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


_EXPORT_TIMEOUT_S = 5.0
"""Timeout for one export to the collector."""
_CLOSE_S = 3.0
"""Longest wait for the collector at shutdown."""
_MOST_WAITING: Final = 1000
"""Ended requests that may wait for their spans to be made."""
_SCOPE = InstrumentationScope("samewise", __version__)
_OK = Status()
_logger = logging.getLogger("samewise.traces")


class Traces:
    """Sends the spans of ended requests to a collector, from its own threads.

    Further settings are OpenTelemetry's variables: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and so on.
    """

    def __init__(self, endpoint: str, label_of: Callable[[str], str]) -> None:
        """`endpoint` is the full URL for OTLP over HTTP; `label_of` maps a client's name to its label in traces."""
        self._label_of = label_of
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT_S))
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer(_SCOPE.name, _SCOPE.version)
        self._propagator = TraceContextTextMapPropagator()
        self._waiting: SimpleQueue[RequestTimeline | None] = SimpleQueue()
        """Requests for the thread; None ends it."""
        self._has_dropped = False
        self._thread = threading.Thread(target=self._send_all, name="samewise-traces", daemon=True)
        self._thread.start()

    def observe(self, timeline: RequestTimeline) -> None:
        """Queue an ended request for the thread. If too many are queued, its spans are dropped."""
        if self._waiting.qsize() < _MOST_WAITING:
            self._waiting.put(timeline)
        elif not self._has_dropped:
            self._has_dropped = True
            _logger.warning("Requests end faster than their spans can be made, so some are missing from the traces.")

    def close(self) -> None:
        """Send the remaining spans, within a few seconds."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _logger.warning("The trace collector did not accept the last spans within %g s: dropped.", _CLOSE_S)

    def _send_all(self) -> None:
        while (timeline := self._waiting.get()) is not None:
            try:
                self._send(timeline)
            except Exception:  # the requests behind it are still sent
                _logger.exception("failed to send the spans of a request", extra={"request_id": timeline.request_id})
        self._provider.shutdown()

    def _send(self, timeline: RequestTimeline) -> None:
        span = self._tracer.start_span(
            name_of(timeline),
            context=self._propagator.extract(timeline.trace_context),
            kind=SpanKind.SERVER,
            start_time=_ns(timeline, timeline.started_at),
        )
        if span.is_recording():
            span.set_attributes(attributes_of(timeline, self._label_of(timeline.client)))
            if timeline.error is not None:
                span.set_status(Status(StatusCode.ERROR, timeline.error))
            for at in timeline.restarts:
                span.add_event("engine restarted", timestamp=_ns(timeline, at))
            for phase in phases_of(timeline):
                self._processor.on_end(self._child(span.get_span_context(), phase, timeline))
        span.end(_ns(timeline, timeline.as_of))

    def _child(self, parent: SpanContext, phase: Phase, timeline: RequestTimeline) -> ReadableSpan:
        """A finished span, sampled if its parent is. Building it directly takes a quarter of a tracer's time."""
        span_id = self._provider.id_generator.generate_span_id()
        return ReadableSpan(
            phase.name,
            SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state),
            parent,
            self._provider.resource,
            phase.attributes,
            status=_OK,
            start_time=_ns(timeline, phase.start),
            end_time=_ns(timeline, phase.end),
            instrumentation_scope=_SCOPE,
        )


def _resource() -> Resource:
    """The spans' resource: OpenTelemetry's variables over our defaults."""
    said = Resource.create()
    own = {SERVICE_VERSION: __version__}
    if str(said.attributes[SERVICE_NAME]).startswith("unknown_service"):
        own[SERVICE_NAME] = "samewise"
    return said.merge(Resource(own))


def _ns(timeline: RequestTimeline, at: float) -> int:
    return int(timeline.unix(at) * 1e9)
