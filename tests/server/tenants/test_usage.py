"""Usage of keys by day and model: private, stored, and counted in the metrics."""

import asyncio
from datetime import date, timedelta
from hashlib import sha256
from pathlib import Path

import pytest
from fastapi import FastAPI

from server.storage.storage import NotStoredError, Storage
from server.storage.usage import KEPT_DAYS, UsageKey, UsageTable, Used
from server.tenants.accounts import today
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, error_of
from tests.server.tenants.keys import bearer, of_tenant
from tests.waiting import until


async def usage_of(app: FastAPI, name: str, **query: str) -> list[dict]:
    async with of_tenant(app, name) as client:
        response = await client.get("/v1/usage", params=query)
        assert response.status_code == 200, response.text
        return response.json()["data"]


async def test_each_key_sees_what_it_has_used_and_no_other(make_with_keys, engine: FakeEngine) -> None:
    app, total = make_with_keys({"ann": {}, "bob": {"metrics": True}}), {"prompt_tokens": 0, "completion_tokens": 0}
    engine.num_cached = 1
    async with of_tenant(app, "ann") as client:
        for body in (completion(n=2), completion(prompt=["x", "yy"]), completion(stream=True)):
            response = await client.post(COMPLETIONS, json={**body, **({"stream_options": {"include_usage": True}}
                                                                       if body.get("stream") else {})})  # fmt: skip
            assert response.status_code == 200
            if not body.get("stream"):
                for name in total:
                    total[name] += response.json()["usage"][name]
            else:
                total["prompt_tokens"] += 2
                total["completion_tokens"] += 5
        await client.post(CHAT, json=chat(wrong=1))
    (day,) = await usage_of(app, "ann")
    assert day == {
        "object": "usage",
        "date": today(),
        "model": "tiny",
        "num_model_requests": 3,
        "input_tokens": total["prompt_tokens"],
        "input_cached_tokens": 4,
        "output_tokens": total["completion_tokens"],
    }
    assert await usage_of(app, "bob") == []
    async with of_tenant(app, "bob") as client:
        metrics = (await client.get("/metrics")).text
    assert (
        f'samewise:tenant_tokens_total{{kind="completion",model_name="tiny",tenant="ann"}} {day["output_tokens"]}'
        in metrics
    )
    assert 'samewise:tenant_requests_total{model_name="tiny",tenant="ann"} 3.0' in metrics
    assert "-key" not in metrics
    async with of_tenant(app, "ann") as client:
        metrics = (await client.get("/metrics")).text
    assert 'samewise:request_success_total{finished_reason="length",model_name="tiny"} 5.0' in metrics
    assert 'tenant="' not in metrics


async def test_no_hash_of_a_key_is_told(make_app, tmp_path: Path) -> None:
    """By one, keys that can be guessed are found; not even its beginning is shown to those who may see all."""
    (tmp_path / "keys").write_text("first-key\n")
    app, keys = make_app(api_key="main-key", api_keys_file=tmp_path / "keys"), ("first-key", "main-key")
    async with client_of(app) as client:
        for key in keys:
            client.headers["authorization"] = f"Bearer {key}"
            assert (await client.post(COMPLETIONS, json=completion())).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert 'samewise:tenant_requests_total{model_name="tiny",tenant=""} 2.0' in metrics
    assert not any(sha256(key.encode()).hexdigest()[:8] in metrics for key in keys)


async def test_metrics_need_a_key_unless_the_operator_says_otherwise(make_app, make_with_keys) -> None:
    app = make_with_keys({"ann": {}})
    async with client_of(app) as client:
        assert "Bearer" in error_of(await client.get("/metrics"), 401)["message"]
        assert (await client.get("/metrics", headers=bearer("bob"))).status_code == 401
        assert (await client.get("/health")).status_code == 200
    opened = make_app(api_key="main-key", open_metrics=True)
    async with client_of(opened) as client:
        assert (await client.post(COMPLETIONS, json=completion(), headers=bearer("main"))).status_code == 200
        assert (await client.get("/load")).json() == {"server_load": 0}
        without, of_all = [(await client.get("/metrics", headers=sent)).text for sent in ({}, bearer("main"))]
    assert ("samewise:num_requests_running{" in without, 'tenant="' in without, 'tenant="' in of_all) == (
        True,
        False,
        True,
    )


async def test_what_ended_early_is_counted_by_what_was_computed(make_with_keys, engine: FakeEngine) -> None:
    app = make_with_keys({"ann": {}})
    engine.fail_after, engine.failure = 2, RuntimeError("broken")
    async with of_tenant(app, "ann") as client:
        assert (await client.post(COMPLETIONS, json=completion())).status_code == 500
    (day,) = await usage_of(app, "ann")
    assert (day["num_model_requests"], day["output_tokens"]) == (1, 2)


async def test_usage_is_kept_and_told_by_day(make_with_keys, tmp_path: Path) -> None:
    app = make_with_keys({"ann": {}}, data_dir=tmp_path)
    days = [(date.today() - timedelta(days=back)).isoformat() for back in (3, 2, 1)]
    used = {UsageKey("ann", model, day): Used(1, 10, 2, 5) for day in days for model in ("b", "a")}
    storage: Storage = app.state.services.storage
    for _ in range(2):
        await storage.on(UsageTable, lambda table: table.add(used))
    found = await usage_of(app, "ann", start_date=days[0], end_date=days[1])
    assert [(one["date"], one["model"]) for one in found] == [(day, model) for day in days[:2] for model in "ab"]
    assert {(one["num_model_requests"], one["input_tokens"], one["output_tokens"]) for one in found} == {(2, 20, 10)}
    async with of_tenant(app, "ann") as client:
        error = error_of(await client.get("/v1/usage", params={"start_date": "soon"}))
        assert error["param"] == "start_date"
        error = error_of(await client.get("/v1/usage", params={"start_date": days[2], "end_date": days[0]}))
        assert error["param"] == "start_date"
        error = error_of(await client.get("/v1/usage", params={"since": days[2]}))
        assert (error["param"], error["code"]) == ("since", "unknown_parameter")


async def test_old_days_are_dropped(make_with_keys) -> None:
    storage: Storage = make_with_keys({"ann": {}}).state.services.storage
    last = date(2026, 6, 1)
    for back in (KEPT_DAYS + 1, KEPT_DAYS, 0):
        day = (last - timedelta(days=back)).isoformat()
        await storage.on(UsageTable, lambda table, day=day: table.add({UsageKey("ann", "m", day): Used(1)}))
    found = await storage.on(UsageTable, lambda table: table.of_client("ann", "0000-01-01", "9999-12-31"))
    assert len(found) == 2


async def test_usage_that_cannot_be_written_is_written_later(
    make_with_keys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.tenants.accounts.RETRY_AFTER_S", 0.01)
    app = make_with_keys({"ann": {}})
    storage: Storage = app.state.services.storage
    on_table, failures = storage.on, []

    async def broken(table, work):
        if len(failures) < 2:
            failures.append(work)
            raise NotStoredError("The disk is full.")
        return await on_table(table, work)

    monkeypatch.setattr(storage, "on", broken)
    async with of_tenant(app, "ann") as client:
        for _ in range(2):
            assert (await client.post(COMPLETIONS, json=completion())).status_code == 200
    await until(lambda: len(failures) == 2)  # a question would be the next to fail
    async with asyncio.timeout(20):
        while not (days := await usage_of(app, "ann")):  # which waits for a while itself
            pass
    assert [day["num_model_requests"] for day in days] == [2]
    assert "usage is not stored yet, and will be retried: The disk is full." in caplog.text


async def test_what_ends_within_a_moment_is_written_together_and_at_once_when_it_is_asked_for(
    make_with_keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.tenants.accounts._PAUSE_S", 3600)
    app = make_with_keys({"ann": {}})
    added, add = [], UsageTable.add
    monkeypatch.setattr(UsageTable, "add", lambda table, used: (added.append(used), add(table, used)))
    async with of_tenant(app, "ann") as client:
        for _ in range(5):
            assert (await client.post(COMPLETIONS, json=completion())).status_code == 200
    assert added == []
    (day,) = await usage_of(app, "ann")
    assert (day["num_model_requests"], len(added)) == (5, 1)


async def test_without_keys_usage_is_everyone_s(client, engine: FakeEngine) -> None:
    await client.post(COMPLETIONS, json=completion())
    found = (await client.get("/v1/usage")).json()["data"]
    assert [one["num_model_requests"] for one in found] == [1]
