"""The metrics that others read: their names, and what they count."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from model_runner.contract import Failure
from scheduler.interface import STEP_TOKENS, EngineStats
from server.engine.client import EngineState
from server.telemetry.metrics import Metrics, exposition
from server.telemetry.recent_requests import RecentRequests
from server.telemetry.request_trace import RequestTrace
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion

OF_VLLM = {
    "gauge": [
        *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
        *("kv_cache_usage_perc", "cache_config_info"),
    ],
    "counter": [
        *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "request_success"),
        *("prompt_tokens", "prompt_tokens_cached", "prompt_tokens_by_source", "generation_tokens"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        "spec_decode_num_accepted_tokens_per_pos",
    ],
    "histogram": [
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_inference_time_seconds", "request_time_per_output_token_seconds", "iteration_tokens_total"),
        *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
        *("request_params_n", "request_params_max_tokens", "request_prefill_kv_computed_tokens"),
    ],
}
"""Metrics that vLLM's dashboards and endpoint pickers for vLLM read."""


def samples_of(text: str) -> dict[tuple[str, ...], float]:
    """Samples by name and values of the labels, except the model's name."""
    return {
        (sample.name, *(value for label, value in sorted(sample.labels.items()) if label != "model_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def read(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    return samples_of((await client.get("/metrics")).text)


async def test_what_is_made_for_vllm_finds_its_metrics(make_app: Callable[..., FastAPI]):
    async with client_of(make_app(metrics_prefix="vllm")) as client:
        families = list(text_string_to_metric_families((await client.get("/metrics")).text))
    types = {family.name: family.type for family in families}
    for kind, names in OF_VLLM.items():
        assert {types.get(f"vllm:{name}") for name in names} == {kind}
    assert not [name for name in types if name.startswith("samewise")]
    (cache,) = next(family for family in families if family.name == "vllm:cache_config_info").samples
    labels = {"model_name": "tiny", "block_size": "16", "num_gpu_blocks": "64", "kv_cache_size_tokens": "1024"}
    assert labels.items() <= cache.labels.items()
    assert cache.value == 1


async def test_nothing_is_told_of_a_cache_that_is_not_yet_there(client: httpx.AsyncClient, engine: FakeEngine):
    engine.state = EngineState.STARTING
    assert not [name for name, *_ in await read(client) if "cache_config" in name]


async def test_prompt_tokens_by_source_add_up(client: httpx.AsyncClient, engine: FakeEngine):
    engine.num_cached = 2
    await client.post(CHAT, json=chat(n=2))
    await client.post(COMPLETIONS, json=completion(prompt=["abcd", "efg"]))
    seen = await read(client)
    total = sum(len(request.prompt) for request in engine.requests)
    assert seen["samewise:prompt_tokens_total",] == total
    assert seen["samewise:prompt_tokens_cached_total",] == 3 * 2
    assert seen["samewise:prompt_tokens_by_source_total", "local_cache_hit"] == 3 * 2
    assert seen["samewise:prompt_tokens_by_source_total", "local_compute"] == total - 3 * 2
    assert seen["samewise:request_prefill_kv_computed_tokens_sum",] == total - 3 * 2


async def test_a_prompt_that_failed_came_from_nowhere(client: httpx.AsyncClient, engine: FakeEngine):
    engine.fail_after, engine.error_output = 0, Failure("internal_error", "broken")
    assert (await client.post(CHAT, json=chat())).is_error
    assert (await read(client))["samewise:request_prefill_kv_computed_tokens_count",] == 0


async def test_the_longest_choice_of_each_request(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = lambda request, choice: list(b"the end") if choice else list(b"end the")
    await client.post(COMPLETIONS, json=completion(n=2, max_tokens=7, stop="the"))
    seen = await read(client)
    assert seen["samewise:request_generation_tokens_sum",] == 3 + 7
    assert seen["samewise:request_max_num_generation_tokens_sum",] == 7
    assert seen["samewise:request_max_num_generation_tokens_count",] == 1


async def test_lines_of_batches_are_no_load(client: httpx.AsyncClient, engine: FakeEngine):
    """Metrics for autoscalers and routers exclude batches, which delay no other requests."""
    engine.stats = EngineStats(num_running=9, num_waiting=5, num_background_running=7, num_background_waiting=4)
    engine.num_held, engine.num_background_held = 8, 6
    seen = await read(client)
    by_reason = {key[1]: value for key, value in seen.items() if key[0].endswith("_waiting_by_reason")}
    assert by_reason == {"capacity": 5 - 4, "background": 4 + 6, "deferred": 8 - 6}
    assert seen["samewise:num_requests_waiting",] == 1 + 2
    assert seen["samewise:num_requests_held",] == 2
    assert seen["samewise:num_requests_running",] == 9 - 7
    assert seen["samewise:num_background_running",] == 7


async def test_steps_by_how_much_they_compute(client: httpx.AsyncClient, engine: FakeEngine):
    by_tokens = (5, *[0] * (len(STEP_TOKENS) - 1), 2)
    engine.stats = EngineStats(steps=7, scheduled_tokens=40005, steps_by_tokens=by_tokens)
    seen = await read(client)
    name = "samewise:iteration_tokens_total"
    assert [seen[f"{name}_bucket", bound] for bound in ("1.0", "16384.0", "+Inf")] == [5, 5, 7]
    assert (seen[f"{name}_sum",], seen[f"{name}_count",]) == (40005, 7)


def measured(*, is_background: bool = False, arrivals: dict[tuple[int, int], list[tuple[int, float]]]) -> Any:
    """The metrics after the choices of two prompts got tokens: how many, and when."""
    engine = FakeEngine()
    metrics = Metrics(engine, "m", "samewise")
    trace = RecentRequests(engine, "m", metrics).begin(RequestTrace("r", is_background=is_background))
    for choice, tokens in arrivals.items():
        for count, now in tokens:
            trace.tokens(choice, count, now)
    for prompt in (0, 1):
        counts = [sum(count for count, _ in tokens) for choice, tokens in arrivals.items() if choice[0] == prompt]
        trace.prompt_end(prompt, counts)
    return samples_of(exposition(metrics.collect(), of_tenants=True).decode())


ARRIVALS = {
    (0, 0): [(1, 100.0), (1, 100.5), (2, 101.5)],  # 1.5 s for the three tokens after the first
    (0, 1): [(2, 100.0), (1, 104.0)],  # 4 s for two
    (1, 0): [(1, 102.0)],  # has nothing after the first
}


def test_the_time_per_output_token_is_the_mean_of_each_choice():
    seen = measured(arrivals=ARRIVALS)
    name = "samewise:request_time_per_output_token_seconds"
    assert seen[f"{name}_sum",] == pytest.approx(0.5 + 2.0)
    assert [seen[f"{name}_bucket", bound] for bound in ("0.4", "0.5", "1.0", "2.5", "+Inf")] == [0, 1, 1, 2, 2]
    assert seen["samewise:inter_token_latency_seconds_sum",] == pytest.approx(1.5 + 4.0)
    assert seen["samewise:inter_token_latency_seconds_count",] == 1 + 2 + 1


def test_nobody_waits_for_what_runs_in_the_background():
    seen = measured(is_background=True, arrivals=ARRIVALS)
    counts = {name: value for (name, *_), value in seen.items() if name.endswith("_seconds_count")}
    assert set(counts.values()) == {0}
    assert seen["samewise:generation_tokens_total",] == 8


def test_the_phases_of_requests():
    metrics = Metrics(FakeEngine(), "m", "samewise")
    for queue, prefill, decode in ((0.0, 0.25, 2.0), (4.0, 0.75, 0.0)):
        metrics.observe_phases(queue, prefill, decode)
    seen = samples_of(exposition(metrics.collect(), of_tenants=True).decode())
    sums = [seen[f"samewise:request_{name}_time_seconds_sum",] for name in ("queue", "prefill", "decode", "inference")]
    assert sums == pytest.approx([4.0, 1.0, 2.0, 3.0])
    assert seen["samewise:request_queue_time_seconds_bucket", "0.001"] == 1
    assert seen["samewise:request_inference_time_seconds_bucket", "1.0"] == 1
    assert seen["samewise:request_inference_time_seconds_count",] == 2
