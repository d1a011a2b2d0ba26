"""Readiness, descriptions and metrics of a server with several models, and its batches."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from model_runner.runner_interface import ImageStats, SpeculationStats
from scheduler.interface import STEP_TOKENS, EngineStats
from server.engine.client import EngineState
from server.models.total_stats import at_rest, total
from tests.server.helpers import CHAT, chat, client_of, error_of
from tests.server.models.hosting import Hosting
from tests.server.tenants.keys import bearer, write_keys

Make = Callable[..., Hosting]
READY = "/ready"


async def test_models_that_are_loaded_at_the_start_make_the_server_ready(hosting: Make):
    several = hosting({"a": {"is_loaded_at_start": True}, "b": {"is_loaded_at_start": True}, "c": {}})
    several.sources["b"].may_load.clear()
    several.sources["c"].unplannable = "its files are broken"
    for one in several.app.state.services.models:
        await one.fingerprint.wait_known()
    async with several.running() as client:
        await several.settled("a", "loaded")
        await several.settled("b", "loading")
        assert "`b` is starting" in error_of(await client.get(READY), 503, "server_error")["message"]
        several.sources["b"].may_load.set()
        await several.settled("b", "loaded")
        assert (await client.get(READY)).status_code == 200, "a model on demand that has failed does not count"
        assert (await client.get(READY, params={"model": "a"})).status_code == 200
        error = error_of(await client.get(READY, params={"model": "c"}), 503, "server_error")
        assert error["code"] == "model_unavailable"
        assert "`c` is not available" in error["message"]
        error_of(await client.get(READY, params={"model": "d"}), 404)
        await several.models["b"].unload(grace_s=0)
        assert (await client.get(READY)).status_code == 200, "it can be loaded again"
        error_of(await client.get(READY, params={"model": "b"}), 503, "server_error")
        several.sources["a"].engines[0].die("it crashed for good")
        await several.until(lambda: several.models["a"].failure is not None)
        assert "`a` is not available" in error_of(await client.get(READY), 503, "server_error")["message"]
        assert (await client.get("/health")).status_code == 200


async def test_readiness_of_one_model_needs_a_key_where_there_are_keys(hosting: Make, tmp_path: Path):
    several = hosting(api_keys_file=write_keys(tmp_path / "keys.yaml", anna={}))
    for one in several.app.state.services.models:
        await one.fingerprint.wait_known()
    async with several.running() as client:
        await several.settled("a", "loaded")
        assert (await client.get(READY)).status_code == 200
        assert (await client.get(READY, params={"model": "a"})).status_code == 401
        assert (await client.get(READY, params={"model": "a"}, headers=bearer("anna"))).status_code == 200


@pytest.mark.parametrize("path", ["/v1/capabilities", "/props", "/slots"])
async def test_descriptions_outlive_their_model(hosting: Make, path: str):
    several = hosting()
    several.sources["b"].length = 128
    async with several.running() as client:
        ask = httpx.QueryParams({"model": "b"})
        never = (await client.get(path, params=ask)).json()["error"]
        assert "POST /v1/models/load" in never["message"]
        await client.post("/v1/models/load", json={"model": "b"})
        loaded = await client.get(path, params=ask)
        assert loaded.status_code == 200
        assert "128" in loaded.text
        await client.post("/v1/models/unload", json={"model": "b"})
        assert (await client.get(path, params=ask)).text.replace(
            '"is_sleeping":true', '"is_sleeping":false'
        ) == loaded.text


async def test_requests_and_steps_of_one_model(hosting: Make):
    several = hosting()
    async with several.running() as client:
        for name in ("a", "b", "bee"):
            assert (await client.post(CHAT, json=chat(model=name))).status_code == 200
        of_b = (await client.get("/v1/requests", params={"model": "b"})).json()["data"]
        assert [one["model"] for one in of_b] == ["b", "b"]
        assert len((await client.get("/v1/requests")).json()["data"]) == 3
        steps = (await client.get("/v1/steps", params={"model": "c"})).json()
        assert (steps["data"], steps["kv_cache"]) == ([], None)
        assert (await client.get("/tokenizer_info", params={"model": "c"})).json()["model_max_length"] == 256


async def test_texts_become_tokens_without_a_load(hosting: Make):
    several = hosting()
    messages = chat()["messages"]
    bodies = {"/tokenize": {"prompt": "hi"}, "/detokenize": {"tokens": [5, 6]},
              "/apply-template": {"messages": messages}, "/v1/messages/count_tokens": {"messages": messages},
              "/v1/responses/input_tokens": {"input": "hi"}, "/tokenize?": {"messages": messages},
              "/detokenize?": {"tokens": [319]}, "/detokenize?2": {"tokens": [320]}}  # fmt: skip
    async with several.running() as client:
        await several.until(lambda: several.models["b"].num_bytes is not None)

        async def answers() -> list[tuple[int, str]]:
            posted = [await client.post(path, json=body | {"model": "b"}) for path, body in bodies.items()]
            return [(one.status_code, one.text) for one in posted]

        before = await answers()
        assert [status for status, _ in before] == [200] * 7 + [400]
        assert not several.sources["b"].engines
        await client.post("/v1/models/load", json={"model": "b"})
        assert await answers() == before
        await client.post("/v1/models/unload", json={"model": "b"})
        assert await answers() == before
        assert len(several.sources["b"].engines) == 1


async def metrics_of(client: httpx.AsyncClient) -> dict[str, float]:
    """Values by name, model and other labels."""
    text = (await client.get("/metrics")).text
    families = list(text_string_to_metric_families(text))
    assert len({one.name for one in families}) == len(families), "each family stands once"
    samples = [sample for one in families for sample in one.samples]
    keys = [" ".join([one.name, *map(str, one.labels.values())]) for one in samples]
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, [one.value for one in samples], strict=True))


async def test_metrics_of_all_models(hosting: Make):
    several = hosting()
    async with several.running() as client:
        await several.settled("a", "loaded")
        assert (await metrics_of(client))["samewise:model_budget_bytes"] == 2
        await client.post(CHAT, json=chat(model="b"))
        first = several.sources["b"].engines[0]
        first.stats = EngineStats(
            num_running=2, steps=7, prefix_queries=5, steps_by_tokens=(1,) * (len(STEP_TOKENS) + 1)
        )
        before = await metrics_of(client)
        assert before["samewise:model_reserved_bytes b"] == 1
        assert before["samewise:engine_state b ready"] == before["samewise:engine_state c unloaded"] == 1
        await client.post(CHAT, json=chat(model="c"))  # in the place of a
        await client.post("/v1/models/unload", json={"model": "b"})
        gone = await metrics_of(client)
        assert gone["samewise:model_unloads_total a room"] == gone["samewise:model_unloads_total b operator"] == 1
        assert gone["samewise:model_reserved_bytes b"] == gone["samewise:num_requests_running b"] == 0
        await client.post(CHAT, json=chat(model="b"))
        several.sources["b"].engines[1].stats = EngineStats(steps=3)
        again = await metrics_of(client)
        assert again["samewise:model_loads_total b"] == 2
        assert again["samewise:engine_steps_total b"] == 10
        assert again["samewise:generation_tokens_total b"] == 2 * before["samewise:generation_tokens_total b"]
        fallen = [name for name in before if name.partition(" ")[0].endswith(("_total", "_bucket", "_count"))
                  and again[name] < before[name]]  # fmt: skip
        assert not fallen


def test_counters_go_on_and_the_rest_begins_again():
    suffix = SpeculationStats("suffix", 3, (2, 1), (3, 2), 3, 6, 0.5, 0.25)
    first = EngineStats(num_running=4, steps=5, speculation=(suffix,), images=ImageStats(encoded=2, cached_bytes=9))
    rest = at_rest(first)
    assert (rest.num_running, rest.steps, rest.images) == (0, 5, ImageStats(encoded=2))
    longer = replace(suffix, accepted_by_depth=(1, 1, 1), verified_by_depth=(1, 1, 1))
    both = total(rest, EngineStats(num_running=1, steps=2, speculation=(longer, replace(suffix, method="lookahead"))))
    assert (both.num_running, both.steps, both.images) == (1, 7, ImageStats(encoded=2))
    assert [one.method for one in both.speculation] == ["suffix", "lookahead"]
    assert both.speculation[0].accepted_by_depth == (3, 2, 1)
    assert both.speculation[0].drafted == 6


async def test_lines_of_a_batch_go_to_models_that_are_loaded(hosting: Make, tmp_path: Path):
    """A batch never makes others go: its lines of b wait, and its other lines do not wait for them."""
    several = hosting(room=1, data_dir=tmp_path)
    names = ["b", "a", "b", "nobody", "a"]
    lines = [{"custom_id": str(number), "method": "POST", "url": CHAT, "body": chat(model=name, max_tokens=2)}
             for number, name in enumerate(names)]  # fmt: skip
    services = several.app.state.services
    async with several.running(), client_of(several.app) as client:
        await several.settled("a", "loaded")
        file = {"file": "\n".join(map(json.dumps, lines)).encode()}
        file_id = (await client.post("/v1/files", data={"purpose": "batch"}, files=file)).json()["id"]
        batch = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        job = (await client.post("/v1/batches", json=batch)).json()["id"]
        await several.until(lambda: len(several.models["b"].waiters) == 2)
        while len(several.sources["a"].engines[0].requests) < 2 or several.models["a"].num_uses:
            await services.storage.run(lambda rows: None)
        assert several.models["a"].state is EngineState.READY
        assert not several.sources["b"].engines
        await client.post("/v1/models/unload", json={"model": "a"})
        while services.jobs.get(job, "") is not None:
            await services.storage.run(lambda rows: None)
        counts = (await client.get(f"/v1/batches/{job}")).json()["request_counts"]
        assert counts == {"total": 5, "completed": 4, "failed": 1}
        assert len(several.sources["b"].engines[0].requests) == 2
