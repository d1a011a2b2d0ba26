"""Traces, as a collector gets them: each request is a span, and the spans within it say where its time went."""

import asyncio
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import Tracer

from server.engine.client import RequestFailedError
from server.logs import configure_logging
from server.telemetry.timeline import RequestTimeline
from server.telemetry.traces import Traces
from tests.engine_process.conftest import collect, request
from tests.engine_process.fake_engine import RAISE
from tests.server.helpers import COMPLETIONS, completion
from tests.server.requests.conftest import Serve
from tests.server.requests.test_explaining import LONG, ended, posted
from tests.server.tenants.keys import bearer, write_keys
from tests.server.test_timelines import Scene, history

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["prepare", "queue", "prefill", "decode", "respond"]


class Collector:
    """Takes traces as OTLP over HTTP and keeps their spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                collector.paths.add(self.path)
                for one in sent.resource_spans:
                    collector.resources.append(values(one.resource.attributes))
                    collector.spans += [span for scope in one.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def tree(self) -> list[tuple[Any, list[Any]]]:
        """Spans without a parent among them, and their children in the order of time."""
        ids = {span.span_id for span in self.spans}
        roots = [span for span in self.spans if span.parent_span_id not in ids]
        by_start = sorted(self.spans, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))
        return [(root, [span for span in by_start if span.parent_span_id == root.span_id]) for root in roots]


def values(attributes: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        return [value(item) for item in one.array_value.values] if kind == "array_value" else getattr(one, kind)

    return {one.key: value(one.value) for one in attributes}


def timeline(name: str = "a", **fields: Any) -> RequestTimeline:
    """The timeline of a finished request."""
    scene = Scene()
    record, live, (prompt,) = scene.begin(name, **fields)
    live.close("stop")
    prompt.ended(0, history())
    record.answered()
    return scene.told[0]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


async def test_the_spans_of_a_request_are_its_time_and_what_is_told_of_it(
    with_model: Serve, collector: Collector
) -> None:
    async with with_model(chunk=16, otlp_traces_endpoint=collector.url) as (client, _):
        _, before = await posted(client, max_tokens=10, ignore_eos=True)
        _, one = await posted(client, max_tokens=10, ignore_eos=True)
    assert collector.paths == {"/v1/traces"}
    assert collector.resources[0]["service.name"] == "samewise"
    assert collector.resources[0]["deployment.environment.name"] == "test"
    assert len(collector.tree()) == 2
    (root, phases) = next(
        tree for tree in collector.tree() if values(tree[0].attributes)["gen_ai.request.id"] == one["id"]
    )
    assert (root.name, root.kind, root.status.code) == ("text_completion tiny", 2, 0)
    assert [phase.name for phase in phases] == PHASES
    edges = [root.start_time_unix_nano, *(phase.end_time_unix_nano for phase in phases)]
    assert edges == [*(phase.start_time_unix_nano for phase in phases), root.end_time_unix_nano], "without a gap"
    took = {phase.name: (phase.end_time_unix_nano - phase.start_time_unix_nano) / 1e6 for phase in phases}
    assert [took[name] for name in PHASES] == pytest.approx(
        [one["times_ms"][name] for name in ("before", "queue", "prefill", "decode", "after")], abs=0.01
    )
    said = values(root.attributes)
    assert said["gen_ai.response.id"] == one["answer_id"]
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (50, 10)
    assert said["gen_ai.usage.cache_read.input_tokens"] == one["cached_tokens"] == 48
    assert said["gen_ai.latency.time_in_model_prefill"] * 1000 == pytest.approx(one["times_ms"]["prefill"], abs=0.01)
    assert values(phases[2].attributes)["samewise.prefill_steps"] == one["prefill_chunks"] == 1
    assert values(phases[3].attributes)["samewise.steps"] == one["steps"] == 10
    assert before["prefill_chunks"] == 4
    assert "prompt" not in "".join(said)


async def test_traces_tell_names_that_were_given_and_nothing_else_of_a_key(
    with_scripted: Serve, collector: Collector, tmp_path: Path
) -> None:
    keys = {"api_key": "main-key", "api_keys_file": write_keys(tmp_path / "keys.yaml", ann={})}
    async with with_scripted(otlp_traces_endpoint=collector.url, **keys) as (client, _):
        for name in ("main", "ann"):
            assert (await client.post(COMPLETIONS, json=completion(), headers=bearer(name))).status_code == 200
    told = [values(root.attributes) for root, _ in collector.tree()]
    assert sorted(one.get("samewise.tenant", "") for one in told) == ["", "ann"]
    assert not any(sha256(key).hexdigest()[:8] in str(told) for key in (b"main-key", b"ann-key"))


async def test_the_trace_of_the_client_goes_on_unless_it_is_not_sampled(
    with_scripted: Serve, collector: Collector
) -> None:
    async with with_scripted(otlp_traces_endpoint=collector.url) as (client, _):
        for flags, context in (("01", {"tracestate": "vendor=1"}), ("00", {})):
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", **context}
            assert (await client.post(COMPLETIONS, json=completion(n=2), headers=headers)).status_code == 200
        assert (await client.post(COMPLETIONS, json=completion(), headers={"traceparent": "junk"})).status_code == 200
    (first, children), (second, _) = sorted(collector.tree(), key=lambda tree: tree[0].start_time_unix_nano)
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert first.trace_state == "vendor=1"
    assert {child.trace_id.hex() for child in children} == {TRACE}
    choices = [values(child.attributes).get("samewise.choice") for child in children]
    assert sorted(choice for choice in choices if choice is not None) == [0, 0, 0, 1, 1, 1]
    assert second.trace_id.hex() != TRACE
    assert second.parent_span_id == b""


async def test_failures_are_in_the_trace(with_scripted: Serve, collector: Collector) -> None:
    async with with_scripted(request_timeout_s=0.05, otlp_traces_endpoint=collector.url) as (client, _):
        response = await client.post(COMPLETIONS, json=completion(prompt=[1], max_tokens=LONG, ignore_eos=True))
        assert response.status_code == 504
        await ended(client, response.headers["x-request-id"])
    ((root, children),) = collector.tree()
    assert (root.status.code, root.status.message) == (2, "RequestTimeoutError")
    assert values(root.attributes)["error.type"] == "RequestTimeoutError"
    assert values(root.attributes)["http.response.status_code"] == 504
    assert values(children[3].attributes)["samewise.finish_reason"] == "timeout"


async def test_restarts_are_in_the_trace(with_scripted: Serve, collector: Collector) -> None:
    async with with_scripted(otlp_traces_endpoint=collector.url) as (client, engine):
        poison = asyncio.create_task(collect(engine, request("poison", RAISE)))
        response = await client.post(COMPLETIONS, json=completion(prompt=[1, 2], max_tokens=60, ignore_eos=True))
        with pytest.raises(RequestFailedError):
            await poison
        one = await ended(client, response.headers["x-request-id"])
    ((root, _),) = collector.tree()
    assert [event.name for event in root.events] == ["engine restarted"] * len(one["restarts"])
    assert [event.time_unix_nano / 1e9 for event in root.events] == pytest.approx(one["restarts"], abs=1e-3)
    assert values(root.attributes)["samewise.restarts"] == len(one["restarts"]) >= 1


async def test_a_collector_that_is_away_holds_nobody_up(
    with_scripted: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.telemetry.traces._EXPORT_TIMEOUT_S", 0.2)
    async with asyncio.timeout(30), with_scripted(otlp_traces_endpoint="http://127.0.0.1:1") as (client, _):
        assert (await client.post(COMPLETIONS, json=completion())).status_code == 200
    assert "Failed to export" in caplog.text


def test_who_ends_a_request_does_not_make_its_spans(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.telemetry.traces._MOST_WAITING", 3)
    monkeypatch.setattr("server.telemetry.traces._CLOSE_S", 30.0)
    makes, may_go_on, make = threading.Event(), threading.Event(), Tracer.start_span

    def slowly(*args: Any, **fields: Any) -> Any:
        makes.set()
        assert may_go_on.wait(30)
        return make(*args, **fields)

    monkeypatch.setattr(Tracer, "start_span", slowly)
    traces = Traces(collector.url, str)
    traces.observe(timeline("first"))
    assert makes.wait(30)
    for index in range(5):
        traces.observe(timeline(f"r{index}"))
    may_go_on.set()
    traces.close()
    sent = [values(root.attributes)["gen_ai.request.id"] for root, _ in collector.tree()]
    assert sent == ["first", "r0", "r1", "r2"]
    assert len([line for line in caplog.records if "missing from the traces" in line.message]) == 1


def test_a_request_whose_spans_cannot_be_made_is_left_out_alone(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = Tracer.start_span
    broken = iter([True])

    def fails_once(*args: Any, **fields: Any) -> Any:
        if next(broken, False):
            raise ValueError("broken")
        return make(*args, **fields)

    monkeypatch.setattr(Tracer, "start_span", fails_once)
    traces = Traces(collector.url, str)
    for name in ("bad", "good"):
        traces.observe(timeline(name))
    traces.close()
    assert [values(root.attributes)["gen_ai.request.id"] for root, _ in collector.tree()] == ["good"]
    assert [line.request_id for line in caplog.records if line.exc_info] == ["bad"]


def test_a_collector_that_never_answers_does_not_keep_a_server_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.telemetry.traces._CLOSE_S", 0.2)
    monkeypatch.setattr("server.telemetry.traces._EXPORT_TIMEOUT_S", 3600.0)  # a batch takes as long to fail
    with socket.create_server(("127.0.0.1", 0)) as silent:
        traces = Traces(f"http://127.0.0.1:{silent.getsockname()[1]}", str)
        for index in range(200):  # for several batches of spans
            traces.observe(timeline(f"r{index}"))
        traces.close()
    assert "did not accept the last spans" in caplog.text


def test_spans_tell_what_ran_in_the_background(collector: Collector) -> None:
    traces = Traces(collector.url, str)
    for is_background in (False, True):
        traces.observe(timeline(is_background=is_background))
    traces.close()
    assert [values(root.attributes)["samewise.background"] for root, _ in collector.tree()] == [False, True]


def test_a_trace_state_that_cannot_be_read_is_not_logged(
    collector: Collector, capfd: pytest.CaptureFixture[str]
) -> None:
    before = logging.getLogger("opentelemetry.trace.span").level
    root = logging.getLogger()
    kept, level = list(root.handlers), root.level
    try:
        configure_logging("text", "info")
        traces = Traces(collector.url, str)
        parent = f"00-{TRACE}-{PARENT}-01"
        traces.observe(timeline(trace_context={"traceparent": parent, "tracestate": "my secret junk"}))
        traces.close()
    finally:
        root.handlers[:] = kept
        root.setLevel(level)
        logging.getLogger("opentelemetry.trace.span").setLevel(before)
    assert collector.tree()[0][0].trace_id.hex() == TRACE
    assert "secret" not in capfd.readouterr().err


async def test_a_trace_state_in_several_headers_is_one(
    with_scripted: Serve, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    async with with_scripted(otlp_traces_endpoint=collector.url) as (client, _):
        for states in ((b"a=1", b"b=2"), (b"a=1\x1b[31m",), (b"a=\xff",), (b"a=" + b"x" * 511,)):
            headers = [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())]
            headers += [(b"tracestate", state) for state in states]
            assert (await client.post(COMPLETIONS, json=completion(), headers=headers)).status_code == 200
    roots = sorted((root for root, _ in collector.tree()), key=lambda root: root.start_time_unix_nano)
    assert [root.trace_state for root in roots] == ["a=1,b=2", "", "", ""]
    assert not [line for line in caplog.records if line.name == "opentelemetry.trace.span"], "it has not seen them"


async def test_phases_that_were_not_there_have_no_span(with_model: Serve, collector: Collector) -> None:
    async with with_model(otlp_traces_endpoint=collector.url) as (client, _):
        response = await client.post("/v1/embeddings", json={"model": "tiny", "input": [5, 6]})
        assert response.status_code == 200
        metrics = (await client.get("/metrics")).text
    ((root, phases),) = collector.tree()
    assert [phase.name for phase in phases] == ["prepare", "queue", "prefill", "respond"]
    assert "gen_ai.latency.time_in_model_decode" not in values(root.attributes)
    for phase, count in (("queue", 1), ("prefill", 1), ("decode", 0), ("inference", 1)):
        assert f'request_{phase}_time_seconds_count{{model_name="tiny"}} {float(count)}' in metrics


def test_without_traces_nothing_of_opentelemetry_is_imported() -> None:
    """FastAPI itself brings the API of it along, but neither the SDK nor an exporter."""
    for imported, brings_it in (("server.app", 0), ("server.telemetry.traces", 1)):
        check = f"import sys, {imported}; sys.exit(any('opentelemetry.sdk' in one for one in sys.modules))"
        assert subprocess.run([sys.executable, "-c", check], check=False).returncode == brings_it
