"""Rates, quantiles and sums of what servers' metrics said, against the observations themselves."""

import random
import re
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.client.load import Load, Quantile, combined, quantile
from server.client.metrics import NoMetricsError, Snapshot, Source, Window, parse
from server.ray.front import merged
from server.telemetry.metrics import exposition
from tests.page.metrics import BOUNDS, Metrics

TTFT = "time_to_first_token_seconds"
M = Source("m")
DAMAGED = Metrics()


def load_of(*snapshots: Snapshot, seconds: float = 100.0) -> Load:
    window = Window(seconds)
    for snapshot in snapshots:
        window.add(snapshot)
    samples = snapshots[-1].sources[M]
    return Load(samples.gauges, samples.counters, window.rates(M))


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
    assert load_of(*snapshots).rate("tenant_tokens_total") == 3.0 + 1.0 + 50.0


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
    assert combined(list(loads.values())).kv_usage == pytest.approx(0.2)


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
    total = combined(loads)
    assert (total.state, total.running, total.waiting, total.kv_usage) == ("ready", 18, 6, pytest.approx(0.4))
    assert total.rate(f"{TTFT}_count") == 250
    found = total.quantile(TTFT, 0.9)
    assert found is not None
    assert found.seconds == pytest.approx(np.quantile(np.concatenate(values), 0.9), rel=0.02)
    assert loads[0].quantile("e2e_request_latency_seconds", 0.5) is not None
    assert total.quantile("e2e_request_latency_seconds", 0.5) is None  # the buckets do not fit each other


def test_a_server_that_has_just_come_back_does_not_hide_the_others() -> None:
    known = Load({}, {}, {("generation_tokens_total", ()): 5.0})
    assert combined([known, Load()]).rate("generation_tokens_total") == 5.0
    assert combined([Load(), Load()]).rates is None


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
        ("vllm:num_requests_running 1\n", "with the prefix vllm: have no label model_name"),
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


def test_what_is_no_number_is_not_known() -> None:
    assert load_of(DAMAGED.snapshot(0.0)).kv_usage is None
