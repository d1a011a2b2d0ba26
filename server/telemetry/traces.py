"""OpenTelemetry traces: a span for each request, and within it where its time went. The only module that imports it."""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server import __version__
from server.telemetry.spans import Phase, attributes_of, name_of, phases_of
from server.telemetry.timeline import RequestTimeline

_EXPORT_TIMEOUT_S = 5.0
"""For a collector that does not answer."""
_CLOSE_S = 3.0
"""That a server which ends waits for the collector, in all."""
_MOST_WAITING: Final = 1000
"""Requests that have ended and whose spans are still to be made."""
_SCOPE = InstrumentationScope("samewise", __version__)
_OK = Status()
_logger = logging.getLogger("samewise.traces")


class Traces:
    """Sends the spans of requests that have ended to a collector, from threads of its own.

    What else can be set, OpenTelemetry's own variables say: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and so on.
    """

    def __init__(self, endpoint: str, label_of: Callable[[str], str]) -> None:
        """`endpoint` is the whole URL, of OTLP over HTTP; `label_of` gives what a client of this name is called."""
        self._label_of = label_of
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT_S))
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer(_SCOPE.name, _SCOPE.version)
        self._propagator = TraceContextTextMapPropagator()
        self._waiting: SimpleQueue[RequestTimeline | None] = SimpleQueue()
        """None ends the thread."""
        self._has_dropped = False
        self._thread = threading.Thread(target=self._send_all, name="samewise-traces", daemon=True)
        self._thread.start()

    def observe(self, timeline: RequestTimeline) -> None:
        """See Observer. Spans are made elsewhere; if too many are waiting for that, this one's are dropped."""
        if self._waiting.qsize() < _MOST_WAITING:
            self._waiting.put(timeline)
        elif not self._has_dropped:
            self._has_dropped = True
            _logger.warning("Requests end faster than their spans are made: some are left out of the traces.")

    def close(self) -> None:
        """Send what is left, as far as the collector takes it within a few seconds."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _logger.warning("The collector of traces did not take the last spans within %g s: dropped.", _CLOSE_S)

    def _send_all(self) -> None:
        while (timeline := self._waiting.get()) is not None:
            try:
                self._send(timeline)
            except Exception:  # those behind it are sent all the same
                _logger.exception("no spans of a request", extra={"request_id": timeline.request_id})
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
        """Made in one piece, as it has ended and is sampled if its parent is: a quarter of what a tracer takes."""
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
    """What the spans are of: what OpenTelemetry's variables say, above what is so by default."""
    said = Resource.create()
    own = {SERVICE_VERSION: __version__}
    if str(said.attributes[SERVICE_NAME]).startswith("unknown_service"):
        own[SERVICE_NAME] = "samewise"
    return said.merge(Resource(own))


def _ns(timeline: RequestTimeline, at: float) -> int:
    return int(timeline.unix(at) * 1e9)
