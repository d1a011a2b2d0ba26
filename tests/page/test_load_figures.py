"""Figures of the server view, and that unknown numbers are not shown."""

import pytest

from server.client.load import Load, combined, loads_of
from server.client.metrics import Window, lines_about, parse
from server.page.load.figures import (
    NAMES,
    cache_bar,
    chart,
    latency_figures,
    long_time,
    queue_figures,
    rate_figures,
    scale_of,
    server_figures,
    speculation_table,
)
from server.page.load.history import SECONDS, Throughput
from tests.page.metrics import Metrics


def samewise(metrics: Metrics) -> Metrics:
    """With what the view looks at."""
    metrics.gauge("num_requests_running", 3)
    metrics.gauge("num_requests_waiting", 2)
    for state, blocks in (("held", 10), ("cached", 30), ("free", 60)):
        metrics.gauge("kv_cache_blocks", blocks, state=state)
    metrics.count("prompt_tokens", 1000)
    metrics.count("generation_tokens", 500)
    metrics.count("num_preemptions", 0)
    metrics.observe("time_to_first_token_seconds", 0.05, 0.05)
    return metrics


def load_of(*texts: str) -> Load:
    """The load from readings ten seconds apart."""
    window = Window(1000.0)
    for at, text in enumerate(texts):
        window.add(parse(text, 10.0 * at))
    return combined(list(loads_of(window).values()))


def test_what_is_told_is_shown() -> None:
    metrics = samewise(Metrics())
    before = metrics.text()
    metrics.count("generation_tokens", 250)
    metrics.observe("time_to_first_token_seconds", 0.05)
    load = load_of(before, metrics.text())
    assert server_figures(load, "m", "1.2", 3700) == {
        "State": "up",
        "Model": "m",
        "Version": "1.2",
        "Uptime": "1 h 1 min",
    }
    assert queue_figures(load) == {
        "Running choices": "3",
        "Waiting choices": "2",
        "Preemptions": "0",
    }
    assert rate_figures(load) == {"Tokens/s in": "0", "Tokens/s out": "25"}
    assert latency_figures(load) == {"First token, p50": "55 ms", "First token, p95": "95 ms"}


def test_what_is_not_told_is_left_out_and_what_did_not_happen_is_no_zero() -> None:
    nothing = load_of(Metrics().text())
    assert rate_figures(nothing) == latency_figures(nothing) == {}
    assert cache_bar(nothing, None) is None
    assert speculation_table(nothing) is None
    assert server_figures(nothing, "m", "", None) == {"State": "up", "Model": "m"}
    assert set(latency_figures(load_of(samewise(Metrics()).text())).values()) == {"–"}


def test_the_cache_is_in_tokens_where_their_number_is_known() -> None:
    load = load_of(samewise(Metrics()).text())
    of_tokens, of_blocks = cache_bar(load, 16), cache_bar(load, None)
    assert of_tokens is not None
    assert of_blocks is not None
    assert of_tokens.summary == "KV cache, in tokens: held 160, cached 480, free 960"
    assert of_blocks.summary == "KV cache, in blocks: held 10, cached 30, free 60"
    assert [part.percent for part in of_tokens.parts] == [10.0, 30.0, 60.0]


def test_another_server_tells_a_share_of_the_cache() -> None:
    metrics = Metrics("vllm")
    metrics.gauge("kv_cache_usage_perc", 0.25)
    found = cache_bar(load_of(metrics.text()), None)
    assert found is not None
    assert found.summary == "KV cache: used 25%, free 75%"


def test_methods_of_speculation_stay_when_they_rest() -> None:
    metrics = Metrics()
    for name, tokens in (("drafts", 10), ("draft_tokens", 40), ("accepted_tokens", 10)):
        metrics.count(f"spec_decode_num_{name}", tokens, method="ngram")
    before = metrics.text()
    for name, tokens in (("drafts", 10), ("draft_tokens", 40), ("accepted_tokens", 20)):
        metrics.count(f"spec_decode_num_{name}", tokens, method="ngram")
    working, resting = (speculation_table(load_of(*texts)) for texts in ((before, metrics.text()), (before, before)))
    assert working is not None
    assert resting is not None
    assert working.rows == [["ngram", "50%", "3.00"]]
    assert resting.rows == [["ngram", "–", "–"]]


@pytest.mark.parametrize("prefix", ["samewise", "vllm"])
def test_the_lines_that_are_read_are_enough(prefix: str) -> None:
    metrics = samewise(Metrics(prefix))
    metrics.count("tenant_tokens", 5, tenant="ann", kind="prompt")
    metrics.observe("e2e_request_latency_seconds", 1.0)
    text = metrics.text()
    lines = "".join(lines_about(NAMES).findall(text))
    assert "tenant" not in lines
    assert "e2e" not in lines
    whole, part = load_of(text), load_of(lines)
    for figures in (queue_figures, rate_figures, latency_figures):
        assert figures(whole) == figures(part)
    assert [samples.started for samples in parse(lines, 0.0).sources.values()] == [1.0]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-1, "0 s"), (59, "59 s"), (60, "1 min"), (7300, "2 h 1 min"), (200_000, "2 d 7 h")]
)
def test_long_times(seconds: float, shown: str) -> None:
    assert long_time(seconds) == shown


@pytest.mark.parametrize(("highest", "top"), [(0, 1), (1, 1), (1.5, 2), (3, 5), (7, 10), (10.5, 20), (640, 1000)])
def test_scales_end_at_round_numbers(highest: float, top: float) -> None:
    assert scale_of(highest) == top


def test_a_chart_is_as_high_as_its_highest_column() -> None:
    found = chart("Tokens", [("a", "in", 30, [1.0, 30.0]), ("b", "out", 2, [60.0, 2.0])])
    assert found.top == 100
    assert found.summary == "Tokens, the last minute. Now: in 30, out 2.0"


def test_throughput_is_of_a_minute() -> None:
    throughput = Throughput()
    throughput.add(load_of(Metrics().text()))
    assert throughput.chart() is None
    metrics = samewise(Metrics())
    before = metrics.text()
    metrics.count("generation_tokens", 70)
    throughput.add(load_of(before, metrics.text()))
    found = throughput.chart()
    assert found is not None
    assert [(one.now, one.values[-1]) for one in found.series] == [("0", 0), ("7.0", 7)]
    assert {len(one.values) for one in found.series} == {SECONDS}
