"""The live table: its numbers against the observations themselves, and what it does when there are none."""

import asyncio
import os
import pty
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import StringIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typer.testing import CliRunner, Result

from server.cli.live_table import watching
from server.cli.live_table.table import screen_of
from server.cli.main import app
from server.client.load import Load, Quantile, quantile, together
from server.client.snapshot import NoMetricsError, Snapshot, Source, parse
from server.client.window import Window
from server.ray.replica_metrics import merged
from server.telemetry.families import exposition
from tests.cli.fake_openai import running

BOUNDS = (0.01, 0.1, 1.0, 10.0)
TTFT = "time_to_first_token_seconds"
M = Source("m")


class Metrics:
    """Those of a server, made by Prometheus's own library."""

    def __init__(self, prefix: str = "samewise", engines: tuple[str, ...] = ("0",), started: float = 1.0) -> None:
        self._registry = CollectorRegistry()
        self._prefix = prefix
        self._known: dict[str, Counter | Gauge | Histogram] = {}
        self._engines = engines
        Gauge("process_start_time_seconds", "x", registry=self._registry).set(started)
        for engine in engines:
            self.gauge("num_requests_running", 0, engine=engine)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self._metric(Gauge, name, labels).set(value)

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        self._metric(Counter, name, labels).inc(value)

    def observe(self, name: str, *values: float, bounds: tuple[float, ...] = BOUNDS) -> None:
        for value in values:
            self._metric(Histogram, name, {}, buckets=bounds).observe(value)

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def collect(self) -> list[Metric]:
        return list(self._registry.collect())

    def snapshot(self, at: float) -> Snapshot:
        return parse(self.text(), at)

    def _metric(self, kind, name, labels, **options):
        labels = {"model_name": "m", "engine": self._engines[0], **labels}
        if name not in self._known:
            full = f"{self._prefix}:{name}"
            self._known[name] = kind(full, "x", list(labels), registry=self._registry, **options)
        return self._known[name].labels(**labels)


def load_of(*snapshots: Snapshot, seconds: float = 100.0) -> Load:
    window = Window(seconds)
    for snapshot in snapshots:
        window.add(snapshot)
    samples = snapshots[-1].sources[M]
    return Load(samples.gauges, samples.counters, window.rates(M))


# -- rates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["samewise", "vllm"])
def test_rates_are_of_the_window_alone(prefix: str) -> None:
    metrics, snapshots = Metrics(prefix), []
    for second, tokens in enumerate((1000, 10, 20, 60)):
        metrics.count("generation_tokens", tokens)
        snapshots.append(metrics.snapshot(float(second)))
    assert load_of(*snapshots).rate("generation_tokens_total") == 90 / 3
    assert load_of(*snapshots, seconds=2.0).rate("generation_tokens_total") == 80 / 2
    assert load_of(*snapshots, seconds=0.5).rate("generation_tokens_total") == 60
    assert load_of(snapshots[0]).rate("generation_tokens_total") is None


@pytest.mark.parametrize("seed", range(5))
def test_restarts_lose_nothing_and_are_never_negative(seed: int) -> None:
    """A server that says when it began is followed exactly; one that does not, as far as can be known."""
    rng = random.Random(seed)
    window, gained = Window(1e9), 0
    metrics, started = Metrics(started=0.0), 0.0
    for second in range(40):
        if rng.random() < 0.3:
            started += 1.0
            metrics = Metrics(started=started)
        tokens = rng.randrange(50)
        metrics.count("generation_tokens", tokens)
        metrics.observe(TTFT, *(rng.random() for _ in range(tokens)))
        gained += tokens if second else 0
        window.add(metrics.snapshot(float(second)))
    rates = window.rates(M)
    assert rates is not None
    assert rates["generation_tokens_total", ()] == pytest.approx(gained / 39)
    assert rates[f"{TTFT}_count", ()] == pytest.approx(gained / 39)
    assert min(rates.values()) >= 0


def test_a_histogram_begins_again_as_a_whole() -> None:
    """An engine that restarts within the same server: one bucket holds more than before, all are new."""
    before, after = Metrics(), Metrics()
    before.observe(TTFT, 0.05, 5.0, 5.0)
    after.observe(TTFT, 0.05, 0.05)
    load = load_of(before.snapshot(0.0), after.snapshot(1.0))
    assert load.rate(f"{TTFT}_count") == 2
    assert load.quantile(TTFT, 0.99) == Quantile(pytest.approx(0.01 + 0.09 * 0.99))


def test_a_new_label_counts_from_when_it_is_seen() -> None:
    metrics = Metrics()
    metrics.count("tenant_tokens", 5, tenant="ann", kind="prompt")
    snapshots = [metrics.snapshot(0.0)]
    for second in (1.0, 2.0):
        metrics.count("tenant_tokens", 6, tenant="bob", kind="completion")
        metrics.count("tenant_tokens", 1, tenant="ann", kind="prompt")
        metrics.count("tenant_tokens", 100, tenant="ann", kind="cached")
        snapshots.append(metrics.snapshot(second))
    assert load_of(*snapshots).tenants == (("bob", 3.0), ("ann", 1.0))


# -- quantiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_quantiles_are_those_of_the_values_between_two_readings(share: float) -> None:
    metrics = Metrics()
    metrics.observe(TTFT, *[9.0] * 500)
    before = metrics.snapshot(0.0)
    values = np.concatenate([np.linspace(0.1, 1.0, 901), np.linspace(0.01, 0.1, 91)])  # even within each bucket
    metrics.observe(TTFT, *values)
    found = load_of(before, metrics.snapshot(7.0)).quantile(TTFT, share)
    assert found is not None
    assert found.seconds == pytest.approx(np.quantile(values, share), rel=0.01)


@given(st.lists(st.floats(0, 20), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_bucket_of_the_value(values: list[float], share: float) -> None:
    buckets = [(bound, float(sum(value <= bound for value in values))) for bound in (*BOUNDS, float("inf"))]
    exact = sorted(values)[int(np.ceil(share * len(values) - 1e-9)) - 1]
    found = quantile(buckets, share)
    assert found is not None
    if exact > BOUNDS[-1]:
        assert found == Quantile(BOUNDS[-1], is_less=True)
    else:
        upper = min(bound for bound in BOUNDS if exact <= bound)
        lower = max((bound for bound in (0.0, *BOUNDS) if bound < upper), default=0.0)
        assert lower <= found.seconds <= upper * (1 + 1e-9)


def test_no_quantile_of_nothing() -> None:
    metrics = Metrics()
    metrics.observe(TTFT, 1.0)
    assert load_of(metrics.snapshot(0.0), metrics.snapshot(1.0)).quantile(TTFT, 0.5) is None
    assert quantile([], 0.5) is None


# -- replicas on Ray ---------------------------------------------------------------------------------------------------


def page(at: float, **replicas: Metrics) -> Snapshot:
    """As the front before them writes it."""
    collected = merged((name, metrics.collect()) for name, metrics in replicas.items())
    return parse(exposition(collected, of_tenants=True).decode(), at)


def replica(started: float, tokens: float) -> Metrics:
    metrics = Metrics(started=started)
    metrics.gauge("kv_cache_usage_perc", started / 10)
    metrics.count("generation_tokens", tokens)
    return metrics


def test_each_replica_has_its_own_numbers() -> None:
    a, b, c = replicas = [replica(started, 1e9) for started in (1.0, 2.0, 3.0)]
    window = Window(100.0)
    window.add(page(0.0, a=a, b=b, c=c))
    for metrics, tokens in zip(replicas, (10, 20, 30), strict=True):
        metrics.count("generation_tokens", tokens)
    last = page(2.0, c=c, a=a, b=b)
    window.add(last)
    found = {source.replica: (samples.started, window.rates(source)) for source, samples in last.sources.items()}
    assert {name: started for name, (started, _) in found.items()} == {"a": 1.0, "b": 2.0, "c": 3.0}
    generated = {name: rates and rates["generation_tokens_total", ()] for name, (_, rates) in found.items()}
    assert generated == {"a": 5.0, "b": 10.0, "c": 15.0}
    loads = {source: Load(samples.gauges, samples.counters) for source, samples in last.sources.items()}
    assert [load.kv_usage for load in loads.values()] == [0.3, 0.1, 0.2]
    assert together(list(loads.values())).kv_usage == pytest.approx(0.2)


def test_replicas_come_and_go_without_a_jump() -> None:
    """One that was there before, or is there for the first time, brings what it counted while it was watched."""
    a, b = replica(1.0, 1e9), replica(2.0, 1e9)
    window = Window(100.0)
    for second, here in enumerate([{"a": a}, {"a": a, "b": b}, {"b": b}, {"b": b, "a": a}, {"a": a, "b": b}]):
        for metrics in (a, b):
            metrics.count("generation_tokens", 8)
        window.add(page(float(second), **here))
    for name in "ab":
        rates = window.rates(Source("m", name))
        assert rates is not None
        assert rates["generation_tokens_total", ()] == 8
    window.add(page(5.0, a=a, b=replica(3.0, 24)))  # another process, which has counted all of it since
    rates = window.rates(Source("m", "b"))
    assert rates is not None
    assert rates["generation_tokens_total", ()] == (3 * 8 + 24) / 4


def test_each_replica_is_a_row() -> None:
    console = Console(width=100, record=True, file=StringIO(), highlight=False)
    sources = page(0.0, left=replica(1.0, 0), right=replica(2.0, 0)).sources
    loads = {source: Load(samples.gauges, samples.counters) for source, samples in sources.items()}
    console.print(screen_of({"host:8000": loads}, [], 1.0))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[0] == ["m", "host:8000"]
    assert [line[:3] + line[4:5] for line in lines[4:7]] == [
        ["left", "up", "0", "10%"],
        ["right", "up", "0", "20%"],
        ["total", "up", "0", "15%"],
    ]


# -- several engines and servers ---------------------------------------------------------------------------------------


def test_the_engines_of_a_vllm_server_are_one_row() -> None:
    metrics = Metrics("vllm", engines=("0", "1"))
    metrics.gauge("num_requests_running", 3, engine="1")
    for engine, usage in (("0", 0.25), ("1", 0.75)):
        metrics.gauge("kv_cache_usage_perc", usage, engine=engine)
        metrics.gauge("engine_sleep_state", 1, engine=engine, sleep_state="awake")
    snapshots = []
    for second in (0.0, 1.0):
        for name, count in (("drafts", 10), ("draft_tokens", 40), ("accepted_tokens", 15)):
            metrics.count(f"spec_decode_num_{name}", count, engine="1")
        snapshots.append(metrics.snapshot(second))
    load = load_of(*snapshots)
    assert (load.state, load.running, load.kv_usage) == ("up", 3, 0.5)
    assert load.restarts is None
    (speculation,) = load.speculation
    assert (speculation.method, speculation.acceptance, speculation.tokens_per_step) == ("", 15 / 40, 2.5)


def test_the_total_adds_up() -> None:
    loads, values = [], (np.linspace(0.01, 0.1, 400), np.linspace(0.1, 1.0, 100))
    for usage, of_server in zip((0.2, 0.6), values, strict=True):
        before, metrics = Metrics(started=0.0).snapshot(0.0), Metrics()
        metrics.gauge("num_requests_running", 2)
        metrics.gauge("kv_cache_usage_perc", usage)
        metrics.gauge("engine_state", 1, state="ready")
        metrics.gauge("num_background_running", 7)
        metrics.gauge("num_requests_waiting", 3)
        metrics.gauge("num_requests_waiting_by_reason", 6, reason="background")
        metrics.observe(TTFT, *of_server)
        metrics.observe("e2e_request_latency_seconds", 1.0, bounds=(usage, 5.0))
        loads.append(load_of(before, metrics.snapshot(2.0)))
    total = together(loads)
    assert (total.state, total.running, total.waiting, total.kv_usage) == ("ready", 18, 6, pytest.approx(0.4))
    assert total.rate(f"{TTFT}_count") == 250
    found = total.quantile(TTFT, 0.9)
    assert found is not None
    assert found.seconds == pytest.approx(np.quantile(np.concatenate(values), 0.9), rel=0.02)
    assert loads[0].quantile("e2e_request_latency_seconds", 0.5) is not None
    assert total.quantile("e2e_request_latency_seconds", 0.5) is None  # the buckets do not fit each other


def test_a_server_that_has_just_come_back_does_not_hide_the_others() -> None:
    known = Load({}, {}, {("generation_tokens_total", ()): 5.0})
    assert together([known, Load()]).rate("generation_tokens_total") == 5.0
    assert together([Load(), Load()]).rates is None


# -- what is no metrics ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html><body>Welcome</body></html>",
        '{"error": "no"}',
        "python_info 1\n",
        "# TYPE\n# HELP a\na{b 1\n",
        "samewise:num_requests_running{model_name=\n",
        "\x00\x01\x02 3",
    ],
)
def test_garbage_is_told_as_such(text: str) -> None:
    with pytest.raises(NoMetricsError):
        parse(text, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm:num_requests_running 1\n", "begin with vllm: have no label model_name"),
        (Metrics("vllm").text() + Metrics("samewise").text(), "of several servers (samewise:, vllm:)"),
    ],
)
def test_what_cannot_be_told_apart_is_said(text: str, message: str) -> None:
    with pytest.raises(NoMetricsError, match=re.escape(message)):
        parse(text, 0.0)


@pytest.mark.parametrize("label", ['le="x",', 'le="nan",', 'le="-Inf",', ""])
def test_a_bucket_without_a_bound_is_not_known(label: str) -> None:
    metrics, snapshots = Metrics(), []
    for second in (0.0, 1.0):
        metrics.observe(TTFT, 0.05)
        name = f"samewise:{TTFT}_bucket"
        snapshots.append(parse(f'{metrics.text()}# TYPE b histogram\n{name}{{{label}model_name="m"}} 9\n', second))
    assert load_of(*snapshots).quantile(TTFT, 0.5) == Quantile(pytest.approx(0.055))


@given(st.integers(0, 2000), st.text(max_size=6))
def test_damaged_metrics_are_read_or_refused(place: int, inserted: str) -> None:
    text = DAMAGED.text()
    with suppress(NoMetricsError):
        snapshot = parse(text[:place] + inserted + text[place + 3 :], 0.0)
        for source, samples in snapshot.sources.items():
            Load(rates=samples.counters).quantile(TTFT, 0.5)
            assert source.model


DAMAGED = Metrics()
DAMAGED.observe(TTFT, 0.5)
DAMAGED.gauge("kv_cache_usage_perc", float("nan"))


def test_what_is_no_number_is_not_known() -> None:
    assert load_of(DAMAGED.snapshot(0.0)).kv_usage is None


# -- the table ---------------------------------------------------------------------------------------------------------


def busy(prefix: str = "samewise") -> tuple[Snapshot, Snapshot]:
    """The widest numbers that are likely."""
    before, metrics = Metrics(prefix, started=0.0).snapshot(0.0), Metrics(prefix)
    for name, value in (("running", 1024), ("waiting", 9999)):
        metrics.gauge(f"num_requests_{name}", value)
    metrics.gauge("kv_cache_usage_perc", 1.0)
    metrics.gauge("engine_state", 1, state="restarting")
    for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"):
        metrics.count(name, 99_999)
    metrics.count("num_preemptions", 123456)
    metrics.count("engine_restarts", 7)
    metrics.observe("request_prompt_tokens", *[1.0] * 999)
    metrics.observe(TTFT, *[0.995] * 9)
    metrics.observe("inter_token_latency_seconds", 0.0005)
    metrics.observe("e2e_request_latency_seconds", 500.0, bounds=(160.0,))
    for name, value in (("drafts", 4), ("emitted_tokens", 10), ("draft_tokens", 8), ("accepted_tokens", 6)):
        metrics.count(f"spec_decode_num_{name}", value, method="suffix")
    for index in range(7):
        metrics.count("tenant_tokens", 100 - index, tenant=f"team-{index}", kind="completion")
    metrics.count("learning_publications", 3)
    metrics.gauge("learning_tokens_per_step", 1.25, heads="first")
    metrics.gauge("learning_tokens_per_step", 1.75, heads="current")
    return before, metrics.snapshot(1.0)


def shown(width: int, *servers: str) -> list[str]:
    console = Console(width=width, record=True, file=StringIO(), highlight=False)
    load = load_of(*busy())
    console.print(screen_of({server: {M: load} for server in servers}, ["gone: [red]"], 1.0))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_number_is_cut_off(width: int) -> None:
    lines = shown(width, "10.0.0.1:8000", "a-long-name.of-a-service.example.com:8000")
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for number in ("restarting", "1024", "9999", "100%", "99999", "200k", "999", ">160 s", "123k", "550 ms", "75%"):
        assert number in text, number
    for detail in ("2.50", "team-4", "2 more", "1.25", "1.75", "10.0.0.1:8000", "gone: [red]"):
        assert detail in text, detail
    assert "team-5" not in text
    assert len([line for line in lines if line.startswith("total")]) == (1 if width == 200 else 2)


def test_one_server_needs_no_name_and_no_total() -> None:
    lines = shown(80, "10.0.0.1:8000")
    assert lines[0].split() == ["m", "10.0.0.1:8000"]
    assert "10.0.0.1" not in "\n".join(lines[1:])
    assert "total" not in "\n".join(lines)


# -- the command -------------------------------------------------------------------------------------------------------


@dataclass
class FakeServer:
    """Answers /metrics with what is set, and counts a token for each reading."""

    metrics: Metrics | None = field(default_factory=Metrics)
    status: int = 200
    text: str = ""
    keys: list[str | None] = field(default_factory=list)
    read_twice: threading.Event = field(default_factory=threading.Event)

    async def answer(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        if len(self.keys) >= 2:
            self.read_twice.set()
        if self.metrics is None:
            return Response(self.text, self.status)
        self.metrics.count("generation_tokens")
        return Response(self.metrics.text())


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@contextmanager
def serving(server: FakeServer) -> Iterator[str]:
    with running(Starlette(routes=[Route("/metrics", server.answer)])) as address:
        yield address.removesuffix("/v1")


def top(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["top", "--window", "0.1", *arguments])


@pytest.mark.parametrize("path", ["", "/v1", "/metrics", "/"])
def test_one_table_where_nobody_watches(server: FakeServer, path: str) -> None:
    with serving(server) as url:
        result = top(url + path, "--api-key", "k")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"m  {url.removeprefix('http://')}\n")
    assert server.keys == ["Bearer k"] * 2
    assert re.search(r"\d", result.stdout.splitlines()[4])


def test_a_server_that_is_away_is_told_beside_the_others(server: FakeServer) -> None:
    with serving(server) as url:
        result = top(url, url, "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "up" in result.stdout
    assert result.stderr == "error: no server answers at http://127.0.0.1:9/metrics (ConnectError)\n"


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (
            401,
            '{"error": {"message": "Incorrect API key."}}',
            "wants another key (--api-key or SAMEWISE_API_KEY): Incor",
        ),
        (404, "no such page", "HTTP 404: no such page"),
        (200, "<html>", "/metrics: this is not the text format of Prometheus"),
        (200, "python_info 1\n", "/metrics: there are no metrics of a server of language models"),
        (503, "Starting", "HTTP 503: Starting"),
    ],
)
def test_what_is_no_server_of_ours_is_said_in_a_line(server: FakeServer, status: int, text: str, message: str) -> None:
    server.metrics, server.status, server.text = None, status, text
    with serving(server) as url:
        result = top(url)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_passwords_are_sent_and_not_shown(server: FakeServer) -> None:
    with serving(server) as url:
        address = url.removeprefix("http://")
        result = top(f"http://user:secret@{address}")
        assert result.stdout.startswith(f"m  {address}\n")
        assert server.keys == ["Basic dXNlcjpzZWNyZXQ="] * 2
        server.metrics, server.status = None, 404
        failed = [top(f"http://user:secret@{address}"), top("user:secret@127.0.0.1:9"), top("http://user:secret@a:x")]
    assert [one.exit_code for one in failed] == [1, 1, 2]
    assert "secret" not in "".join(one.stdout + one.stderr for one in [result, *failed])


@pytest.mark.parametrize("url", ["ftp://host", "http://host:99999", "http://[::1"])
def test_no_address(url: str) -> None:
    result = top(url)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {url}")


class Spectator(StringIO):
    """A terminal on which `expected` texts are awaited one after the other; each time, the server goes on."""

    def __init__(self, expected: list[str], go_on: Callable[[int], None]) -> None:
        super().__init__()
        self._expected = expected
        self._go_on = go_on
        self.num_seen = 0
        self.has_seen_all = asyncio.Event()

    def write(self, text: str) -> int:
        assert not re.search(r" -\d", text), "a negative rate"
        written = super().write(text)
        if not self.has_seen_all.is_set() and re.search(self._expected[self.num_seen], self.getvalue()):
            self.truncate(0)
            self.num_seen += 1
            self._go_on(self.num_seen)
            if self.num_seen == len(self._expected):
                self.has_seen_all.set()
        return written


async def test_it_waits_for_a_server_and_follows_it(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away at the start, there, replaced by one that counts from 0, away again, and back."""
    monkeypatch.setattr(watching, "INTERVAL_S", 0.01)
    life = [None, Metrics(), Metrics(started=2.0), None, Metrics(started=3.0)]
    expected = ["HTTP 503: away; trying again", *[r" up .* \d+"] * 2, "HTTP 503: away; trying again", r" up .* \d+"]
    life[1].count("generation_tokens", 1e9)  # type: ignore[union-attr]

    def go_on(num_seen: int) -> None:
        server.metrics = life[min(num_seen, len(life) - 1)]

    server.metrics, server.status, server.text = None, 503, "away"
    spectator = Spectator(expected, go_on)
    with serving(server) as url:
        console = Console(file=spectator, force_terminal=True, width=100, color_system=None)
        table = asyncio.create_task(watching.watch(console, [url], None, 0.001))
        await spectator.has_seen_all.wait()
        table.cancel()
        with pytest.raises(asyncio.CancelledError):
            await table


def test_ctrl_c_ends_it_quietly(server: FakeServer) -> None:
    terminal, child = pty.openpty()
    with serving(server) as url:
        # What a shell runs in the background, as these tests perhaps, ignores SIGINT, and so would what it starts.
        heeding = (
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import server.cli.main as cli"
        )
        command = [sys.executable, "-c", f"{heeding}; cli.main()", "top", url]
        process = subprocess.Popen(command, stdin=child, stdout=child, stderr=subprocess.PIPE)
        os.close(child)
        assert server.read_twice.wait(60)
        process.send_signal(signal.SIGINT)
        reader = threading.Thread(target=drain, args=(terminal,))  # or it would wait for room
        reader.start()
        _, errors = process.communicate(timeout=60)
        reader.join()
    assert (process.returncode, errors) == (0, b"")


def drain(terminal: int) -> None:
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:
        os.close(terminal)
