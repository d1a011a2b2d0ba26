"""Batches from their file to their files, by the official client and step by step."""

import asyncio
import codecs
import json
import logging
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai import OpenAI

from scheduler.interface import BACKGROUND
from server.api.batches import lines
from server.api.batches.lines import check_lines
from server.api.batches.objects import OPEN, BatchObject
from server.engine.client import QueueFullError
from server.http.loopback import Loopback
from server.storage.batches import Batch, BatchTable
from server.storage.storage import NotStoredError
from tests.server.constraints.schemas import BOMB
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, error_of, serving
from tests.server.tenants.keys import of_tenant, write_keys
from tests.waiting import until

EMBEDDINGS = "/v1/embeddings"


def written(bodies: Sequence[Any], url: str = COMPLETIONS) -> bytes:
    """A file of these requests."""
    lines = [{"custom_id": f"line {n}", "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def read(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines()]


class Batches:
    """A client's batches."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def upload(self, content: bytes) -> str:
        response = await self.client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
        assert response.status_code == 200, response.text
        return response.json()["id"]

    async def create(self, content: bytes, endpoint: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
        body = {"input_file_id": await self.upload(content), "endpoint": endpoint, "completion_window": "24h", **fields}
        response = await self.client.post("/v1/batches", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def get(self, batch_id: str) -> dict[str, Any]:
        return (await self.client.get(f"/v1/batches/{batch_id}")).json()

    async def when(self, batch_id: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """As it is once this holds."""
        async with asyncio.timeout(20):
            while not holds(batch := await self.get(batch_id)):  # noqa: ASYNC110  (what is asked for sends no event)
                await asyncio.sleep(0.002)
            return batch

    async def ended(self, batch_id: str) -> dict[str, Any]:
        """As it is in the end."""
        return await self.when(batch_id, lambda batch: batch["status"] not in OPEN)

    async def content(self, file_id: str | None) -> list[dict[str, Any]]:
        return [] if file_id is None else read((await self.client.get(f"/v1/files/{file_id}/content")).content)


@pytest.fixture
def make_batches(make_app: Callable[..., FastAPI], tmp_path: Path) -> Callable[..., FastAPI]:
    return lambda **settings: make_app(data_dir=tmp_path / "data", **settings)


def test_a_batch_through_the_official_client(make_batches: Callable[..., FastAPI], engine: FakeEngine) -> None:
    """Each answer equals the same request's answer alone."""
    bodies = [chat(messages=[{"role": "user", "content": f"number {n}"}], seed=n) for n in range(30)]
    bodies[7] = chat(temperature=9)
    with serving(make_batches()) as address, OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        file = client.files.create(file=("in.jsonl", written(bodies, CHAT)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
        )
        assert batch.status in ("validating", "in_progress", "finalizing", "completed")
        while batch.status not in ("completed", "failed"):
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 30, "completed": 29, "failed": 1}
        assert (batch.metadata, batch.errors) == ({"a": "b"}, None)
        assert batch.in_progress_at
        assert batch.finalizing_at
        assert batch.completed_at
        assert batch.expires_at == batch.created_at + 86400
        assert [one.id for one in client.batches.list()] == [batch.id]
        answers = read(client.files.content(batch.output_file_id or "").content)
        errors = read(client.files.content(batch.error_file_id or "").content)
        assert [answer["custom_id"] for answer in answers] == [f"line {n}" for n in range(30) if n != 7]
        for answer in answers:
            body = bodies[int(answer["custom_id"].split()[1])]
            alone = client.chat.completions.create(**body).to_dict()
            assert answer["response"]["body"]["choices"] == alone["choices"]
            assert answer["response"]["body"]["usage"] == alone["usage"]
            assert (answer["response"]["status_code"], answer["error"]) == (200, None)
        (error,) = errors
        assert (error["custom_id"], error["response"]["status_code"]) == ("line 7", 400)
        assert error["response"]["body"]["error"]["param"] == "temperature"
        assert len({answer["id"] for answer in answers} | {error["id"]}) == 30
    tiers = {request.tier for request in engine.requests}
    assert tiers == {0, BACKGROUND}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [(EMBEDDINGS, {"model": "tiny", "input": "x"}), ("/v1/responses", {"model": "tiny", "input": "x"})],
)
async def test_other_endpoints(make_batches: Callable[..., FastAPI], endpoint: str, body: Any) -> None:
    async with client_of(make_batches()) as client:
        batches = Batches(client)
        batch = await batches.ended((await batches.create(codecs.BOM_UTF8 + written([body], endpoint), endpoint))["id"])
        (answer,) = await batches.content(batch["output_file_id"])
        alone = (await client.post(endpoint, json=body)).json()
        made = answer["response"]["body"]
        assert made["object"] == alone["object"]
        assert (made.get("data"), made["usage"]) == (alone.get("data"), alone["usage"])


WRONG = {
    "no JSON": (b"{", "invalid_json_line", 1),
    "no object": (b"5\n", "invalid_line", 1),
    "no id": (b'{"method":"POST","url":"/v1/completions","body":{}}\n', "invalid_line", 1),
    "an empty id": (
        b'{"custom_id":"","method":"POST","url":"/v1/completions","body":{}}',
        "missing_required_parameter",
        1,
    ),
    "another method": (b'{"custom_id":"a","method":"GET","url":"/v1/completions","body":{}}', "invalid_line", 1),
    "another field": (b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{},"x":1}', "invalid_line", 1),
    "another url": (written([completion()], CHAT), "mismatched_endpoint", 1),
    "the same id": (written([completion()]) * 2, "duplicate_custom_id", 2),
    "an empty line before": (b"\n\n{", "invalid_json_line", 3),
    "no UTF-8": (b'{"custom_id":"\xff"}', "invalid_json_line", 1),
    "nothing": (b"\n \n", "empty_file", None),
    "too many": (written([completion()] * 6), "too_many_lines", 6),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_file_with_a_wrong_line_is_not_run_and_the_line_is_named(
    make_batches: Callable[..., FastAPI], engine: FakeEngine, case: str
) -> None:
    content, code, line = WRONG[case]
    async with client_of(make_batches(max_batch_lines=5)) as client:
        batches = Batches(client)
        batch = await batches.ended((await batches.create(content))["id"])
    assert batch["status"] == "failed"
    assert batch["failed_at"]
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"]) == (code, line)
    assert error["message"].endswith(".")
    assert (batch["output_file_id"], batch["error_file_id"]) == (None, None)
    assert not engine.requests


async def test_requests_that_cannot_be_taken_say_why(make_batches: Callable[..., FastAPI], client: Any) -> None:
    made = {"endpoint": COMPLETIONS, "completion_window": "24h"}
    assert "--data-dir" in error_of(await client.post("/v1/batches", json={**made, "input_file_id": "x"}))["message"]
    async with client_of(make_batches()) as keeping:
        file_id = await Batches(keeping).upload(written([completion()]))
        wrong: list[tuple[dict[str, Any], str]] = [
            ({**made, "input_file_id": "file-none"}, "input_file_id"),
            ({**made}, "input_file_id"),
            ({**made, "input_file_id": file_id, "endpoint": "/v1/models"}, "endpoint"),
            ({**made, "input_file_id": file_id, "completion_window": "1h"}, "completion_window"),
            ({**made, "input_file_id": file_id, "output_expires_after": {"anchor": "created_at", "seconds": 1}},
             "output_expires_after.seconds"),
            ({**made, "input_file_id": file_id, "priority": 1}, "priority"),
        ]  # fmt: skip
        for body, param in wrong:
            assert error_of(await keeping.post("/v1/batches", json=body))["param"] == param
        for path in ("/v1/batches/batch_none", "/v1/batches/batch_none/cancel"):
            response = await (keeping.post if path.endswith("cancel") else keeping.get)(path)
            assert error_of(response, 404)["code"] == "not_found"


async def test_a_stream_has_no_place_in_a_file(make_batches: Callable[..., FastAPI]) -> None:
    async with client_of(make_batches()) as client:
        batches = Batches(client)
        batch = await batches.ended((await batches.create(written([completion(stream=True), completion()])))["id"])
        (error,) = await batches.content(batch["error_file_id"])
        assert error["response"]["body"]["error"]["message"].startswith("Unsupported value: 'stream'")
        assert len(await batches.content(batch["output_file_id"])) == 1


async def test_a_line_that_is_too_large_is_named_and_never_held_as_a_whole(
    make_batches: Callable[..., FastAPI], tmp_path: Path
) -> None:
    small, large = written([completion()]), written([completion(prompt="a" * (8 << 20))])
    async with client_of(make_batches(max_body_mib=0.5)) as client:
        batches = Batches(client)
        (error,) = (await batches.ended((await batches.create(small + large))["id"]))["errors"]["data"]
    assert (error["code"], error["line"]) == ("line_too_large", 2)
    assert error["message"].endswith("at most 524288 bytes.")
    path = tmp_path / "lines"
    path.write_bytes(small + large + small.replace(b"line 0", b"line 1"))
    tracemalloc.start()
    checked = check_lines(path, COMPLETIONS, 10, 1 << 19)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert checked.num_lines == 3
    assert peak < 4 << 20


def test_of_a_file_with_too_many_lines_no_more_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty ones count: millions of them would keep a thread for minutes."""
    path = tmp_path / "lines"
    path.write_bytes(written([completion()]) + b"\n" * 1_000_000)
    read: list[int] = []
    texts = lines._texts

    def counted(*arguments: Any) -> Any:
        for place, text in texts(*arguments):
            read.append(place)
            yield place, text

    monkeypatch.setattr(lines, "_texts", counted)
    (error,) = check_lines(path, COMPLETIONS, 5, 1 << 20).errors
    assert (error.code, error.line) == ("too_many_lines", 6)
    assert read[-1] == 6


async def test_one_client_s_lines_take_no_places_of_another_s(make_batches: Callable[..., FastAPI]) -> None:
    """However many of them wait for an answer."""
    waiting, go_on = [], asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["state"]["record"].client == "many":
            waiting.append(scope)
            await go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    loopback = Loopback(app)
    many = [asyncio.create_task(loopback.post("/", b"{}", "many")) for _ in range(1_000)]
    await until(lambda: len(waiting) > 0)
    assert (await loopback.post("/", b"{}", "other")).status == 200
    assert len(waiting) < 100
    go_on.set()
    await asyncio.gather(*many)


async def test_a_line_that_ends_the_process_that_checks_it_is_an_error_and_the_others_are_answered(
    make_batches: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.api.body_worker._BASE_BYTES", 32 << 20)
    held = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BOMB, "strict": True}}}
    async with client_of(make_batches()) as client:
        batches = Batches(client)
        lines = written([chat(), chat(**held), chat()], CHAT)
        batch = await batches.ended((await batches.create(lines, CHAT))["id"])
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        (error,) = await batches.content(batch["error_file_id"])
    assert error["custom_id"] == "line 1"
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["code"] == "request_too_complex"


async def test_what_is_refused_for_now_is_tried_again(
    make_batches: Callable[..., FastAPI], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.api.batches.job.RETRY_AFTER_S", 0.01)
    monkeypatch.setattr("server.api.batches.job._LONGEST_WAIT_S", 0.01)
    engine.refuse = QueueFullError("full")
    async with client_of(make_batches()) as client:
        batches = Batches(client)
        made = await batches.create(written([completion()]))
        await until(lambda: len(engine.requests) > 3)
        engine.refuse = None
        batch = await batches.ended(made["id"])
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_cancelled_what_was_answered_is_kept(make_batches: Callable[..., FastAPI], engine: FakeEngine) -> None:
    engine.step_delay_s = 0.001
    bodies = [completion(max_tokens=1)] * 3 + [completion(max_tokens=200)] * 20
    async with client_of(make_batches()) as client:
        batches = Batches(client)
        made = await batches.create(written(bodies))
        await batches.when(made["id"], lambda batch: batch["request_counts"]["completed"] >= 3)
        response = await client.post(f"/v1/batches/{made['id']}/cancel")
        assert response.json()["status"] in ("cancelling", "finalizing", "cancelled")
        batch = await batches.ended(made["id"])
        assert batch["status"] == "cancelled"
        assert batch["cancelling_at"]
        assert batch["cancelled_at"]
        answers, errors = [await batches.content(batch[f"{name}_file_id"]) for name in ("output", "error")]
        assert len(answers) >= 3
        assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
        assert sorted(one["custom_id"] for one in [*answers, *errors]) == sorted(f"line {n}" for n in range(23))
        assert not engine.num_live
        error = error_of(await client.post(f"/v1/batches/{made['id']}/cancel"))
        assert error["message"] == "Cannot cancel a batch with status 'cancelled'."


async def test_when_the_time_is_over_the_rest_is_given_up(
    make_batches: Callable[..., FastAPI], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.api.batches.routes._DAY_S", 0)
    engine.first_delay_s = 60
    async with client_of(make_batches()) as client:
        batches = Batches(client)
        batch = await batches.ended((await batches.create(written([completion()] * 3)))["id"])
        errors = await batches.content(batch["error_file_id"])
    assert (batch["status"], batch["output_file_id"]) == ("expired", None)
    assert [error["error"]["code"] for error in errors] == ["batch_expired"] * 3


async def test_a_restart_goes_on_and_each_line_is_answered_once(
    make_batches: Callable[..., FastAPI], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server is gone in the middle, with nothing said: what is on disk is all that the second one knows."""
    engine.step_delay_s = 0.001
    bodies = [completion(max_tokens=2 + 40 * (n % 2), seed=n) for n in range(40)]
    first = make_batches()
    async with client_of(first) as client:
        batches = Batches(client)
        made = await batches.create(written(bodies))
        await batches.when(made["id"], lambda batch: batch["request_counts"]["completed"] >= 10)
        await first.state.services.jobs.close()
        done = (await batches.get(made["id"]))["request_counts"]["completed"]
    assert 10 <= done < 40
    first.state.services.storage.close()
    before = len(engine.requests)
    again = make_batches()
    async with again.router.lifespan_context(again), client_of(again) as client:
        batches = Batches(client)
        batch = await batches.ended(made["id"])
        answers = await batches.content(batch["output_file_id"])
        assert len(engine.requests) - before == 40 - done
        assert [answer["custom_id"] for answer in answers] == [f"line {n}" for n in range(40)]
        for answer, body in zip(answers, bodies, strict=True):
            alone = (await client.post(COMPLETIONS, json=body)).json()
            assert answer["response"]["body"]["choices"] == alone["choices"]


@pytest.mark.parametrize("moment", ["before the files", "between them and the end"])
async def test_an_end_that_was_cut_short_is_done_again(
    make_batches: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    async def cut(*_: Any) -> Any:
        raise asyncio.CancelledError  # as when the process ends

    first = make_batches()
    with monkeypatch.context() as patch:
        if moment == "before the files":
            patch.setattr("server.api.batches.job.write_outputs", cut)
        else:
            on_table = first.state.services.storage.on

            async def on(table: Any, work: Any) -> Any:
                return await cut() if "put" in work.__qualname__ and has_files() else await on_table(table, work)

            def has_files() -> bool:
                return len(list((first.state.services.settings.data_dir / "files").iterdir())) > 1

            patch.setattr(first.state.services.storage, "on", on)
        async with client_of(first) as client:
            batches = Batches(client)
            made = await batches.create(written([completion(), completion(temperature=9)]))
            await until(lambda: first.state.services.jobs.get(made["id"], "") is None)
            assert (await batches.get(made["id"]))["status"] == "finalizing"
    first.state.services.storage.close()
    again = make_batches()
    async with again.router.lifespan_context(again), client_of(again) as client:
        batches = Batches(client)
        batch = await batches.ended(made["id"])
        assert batch["status"] == "completed"
        assert len(await batches.content(batch["output_file_id"])) == 1
        assert len(await batches.content(batch["error_file_id"])) == 1
        listed = (await client.get("/v1/files")).json()["data"]
        assert sorted(file["purpose"] for file in listed) == ["batch", "batch_output", "batch_output"]


async def test_a_full_disk_holds_a_batch_up_and_says_so(
    make_batches: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.api.batches.results.RETRY_AFTER_S", 0.01)
    app = make_batches()
    storage = app.state.services.storage
    on_table, is_full = storage.on, asyncio.Event()
    is_full.set()

    async def on(table: Any, work: Any) -> Any:
        if is_full.is_set() and "add_results" in work.__code__.co_names:
            raise NotStoredError("The server's storage failed: database or disk is full.")
        return await on_table(table, work)

    monkeypatch.setattr(storage, "on", on)
    async with client_of(app) as client:
        batches = Batches(client)
        made = await batches.create(written([completion()] * 3))
        batch = await batches.when(made["id"], lambda batch: batch["errors"] is not None)
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("in_progress", "not_stored")
        assert "disk is full" in batch["errors"]["data"][0]["message"]
        is_full.clear()
        batch = await batches.ended(made["id"])
    assert (batch["status"], batch["errors"]) == ("completed", None)
    assert batch["request_counts"]["completed"] == 3
    assert len([line for line in caplog.messages if "waits for the storage" in line]) == 1


async def test_a_file_that_is_deleted_meanwhile_ends_the_batch_with_a_reason(
    make_batches: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_too_late(path: Path, *arguments: Any) -> Any:
        path.unlink()
        return check_lines(path, *arguments)

    monkeypatch.setattr("server.api.batches.job.check_lines", check_too_late)
    async with client_of(make_batches()) as client:
        batches = Batches(client)
        batch = await batches.ended((await batches.create(written([completion()])))["id"])
    assert batch["status"] == "failed"
    (error,) = batch["errors"]["data"]
    assert error["code"] == "input_file_not_found"


async def test_no_key_sees_or_ends_another_s_batch_and_usage_is_the_owner_s(make_with_keys, tmp_path: Path) -> None:
    app = make_with_keys({"ann": {"requests_per_minute": 4, "max_choices": 1}, "bob": {}}, data_dir=tmp_path / "data")
    async with of_tenant(app, "ann") as ann, of_tenant(app, "bob") as bob:
        batches = Batches(ann)
        made = await batches.create(written([completion()] * 8))
        batch = await batches.ended(made["id"])
        assert batch["request_counts"]["completed"] == 8, "limits of a minute are for those who wait"
        for path in (f"/v1/batches/{made['id']}", f"/v1/files/{batch['output_file_id']}",
                     f"/v1/files/{batch['output_file_id']}/content"):  # fmt: skip
            assert (await bob.get(path)).status_code == 404
        assert (await bob.post(f"/v1/batches/{made['id']}/cancel")).status_code == 404
        assert (await bob.get("/v1/batches")).json()["data"] == []
        body = {"input_file_id": made["input_file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        assert error_of(await bob.post("/v1/batches", json=body))["param"] == "input_file_id"
        usage = [(await one.get("/v1/usage")).json()["data"] for one in (ann, bob)]
        assert [[day["num_model_requests"] for day in days] for days in usage] == [[8], []]


async def test_lines_of_a_key_that_has_gone_end_with_an_error(
    make_with_keys, tmp_path: Path, engine: FakeEngine
) -> None:
    engine.step_delay_s = 0.001
    app = make_with_keys({"ann": {}, "bob": {}}, data_dir=tmp_path / "data")
    async with of_tenant(app, "ann") as client:
        batches = Batches(client)
        bodies = [completion(max_tokens=1)] * 3 + [completion(max_tokens=100)] * 20
        made = await batches.create(written(bodies))
        await batches.when(made["id"], lambda batch: batch["request_counts"]["completed"] >= 3)
        write_keys(tmp_path / "keys.yaml", bob={})
        app.state.services.accounts.keys.reload()
        assert (await client.get(f"/v1/batches/{made['id']}")).status_code == 401
        await until(lambda: app.state.services.jobs.get(made["id"], "ann") is None)
        write_keys(tmp_path / "keys.yaml", ann={})
        app.state.services.accounts.keys.reload()
        batch = await batches.get(made["id"])
        answers, errors = [await batches.content(batch[f"{name}_file_id"]) for name in ("output", "error")]
    assert batch["status"] == "completed"
    assert 3 <= len(answers) < 23
    assert len(answers) + len(errors) == 23
    assert {error["response"]["status_code"] for error in errors} == {401}


async def test_progress_is_in_the_log_and_lines_are_not(
    make_batches: Callable[..., FastAPI], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with client_of(make_batches()) as client:
        batches = Batches(client)
        made = await batches.create(written([completion()] * 50))
        await batches.ended(made["id"])
    told = [line for line in caplog.messages if "lines are done" in line]
    assert len(told) == 11
    assert told[-1] == f"batch {made['id']}: 50 of 50 lines are done"
    assert not [line for line in caplog.messages if line.startswith(f"POST {COMPLETIONS}")]


async def test_pages(make_batches: Callable[..., FastAPI]) -> None:
    async with client_of(make_batches()) as client:
        batches = Batches(client)
        made = [(await batches.create(written([completion()])))["id"] for _ in range(3)]
        for batch_id in made:
            await batches.ended(batch_id)
        first = (await client.get("/v1/batches", params={"limit": 2})).json()
        assert [one["id"] for one in first["data"]] == made[:0:-1]
        assert first["has_more"]
        rest = (await client.get("/v1/batches", params={"after": first["last_id"]})).json()
        assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([made[0]], False)


async def test_ended_batches_are_bounded_and_read_a_page_at_a_time(
    make_batches: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.storage.batches.MAX_ENDED", 5)
    app = make_batches()
    storage, decoded = app.state.services.storage, list[str]()
    loads = json.loads
    names = {f"batch_{client}{number}": client for number in range(8) for client in ("", "other")}
    async with client_of(app) as client:
        counts = {"total": 0, "completed": 0, "failed": 0}
        template = dict.fromkeys(BatchObject.__struct_fields__) | {
            "object": "batch", "endpoint": "/v1/completions", "input_file_id": "file-1", "completion_window": "24h",
            "status": "failed", "request_counts": counts, "created_at": 0, "expires_at": 0,
        }  # fmt: skip
        for name, owner in names.items():
            one = Batch(owner, {**template, "id": name}, is_open=name == "batch_0")
            await storage.on(BatchTable, lambda table, one=one: table.put(one))
        assert len(await storage.on(BatchTable, lambda table: table._select("client = 'other'"))) == 5
        monkeypatch.setattr("server.storage.batches.json.loads", lambda text: decoded.append(text) or loads(text))
        response = await client.get("/v1/batches", params={"limit": 2})
        assert len(decoded) == 3, "of the page, and one more"
        monkeypatch.undo()
        first = response.json()
        listed = [*first["data"], *(await client.get("/v1/batches", params={"after": first["last_id"]})).json()["data"]]
        assert [one["id"] for one in listed] == [f"batch_{number}" for number in (7, 6, 5, 4, 3, 0)]
        again = (await client.get("/v1/batches", params={"order": "asc", "after": "batch_3", "limit": 3})).json()
        assert ([one["id"] for one in again["data"]], again["has_more"]) == (["batch_4", "batch_5", "batch_6"], True)
        for unknown in ("batch_1", "batch_other7"):
            assert error_of(await client.get("/v1/batches", params={"after": unknown}))["param"] == "after"


async def test_errors_of_lines_repeat_little_of_them(make_batches: Callable[..., FastAPI]) -> None:
    async with client_of(make_batches()) as client:
        batches = Batches(client)
        line = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{},"%s":1}' % (b"x" * 100_000)
        batch = await batches.ended((await batches.create(line))["id"])
    assert len(batch["errors"]["data"][0]["message"]) < 600


async def test_what_was_answered_is_kept_when_the_input_is_gone(
    make_batches: Callable[..., FastAPI], engine: FakeEngine
) -> None:
    engine.step_delay_s = 0.001
    first = make_batches()
    async with client_of(first) as client:
        batches = Batches(client)
        made = await batches.create(written([completion(max_tokens=1 + 60 * (n > 4)) for n in range(20)]))
        await batches.when(made["id"], lambda batch: batch["request_counts"]["completed"] >= 5)
        await first.state.services.jobs.close()
        await client.delete(f"/v1/files/{made['input_file_id']}")
    first.state.services.storage.close()
    again = make_batches()
    async with again.router.lifespan_context(again), client_of(again) as client:
        batches = Batches(client)
        batch = await batches.ended(made["id"])
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "input_file_not_found")
        assert len(await batches.content(batch["output_file_id"])) >= 5


async def test_a_bug_ends_a_batch_and_says_so(
    make_batches: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_batches()
    post = app.state.services.loopback.post

    async def fail(path: str, body: bytes, client: str, group: str, date: object = None) -> Any:
        if b'"seed": 3' in body:
            raise RuntimeError("a bug")
        return await post(path, body, client, group)

    monkeypatch.setattr(type(app.state.services.loopback), "post", lambda self, *arguments: fail(*arguments))
    async with client_of(app) as client:
        batches = Batches(client)
        batch = await batches.ended((await batches.create(written([completion(seed=n) for n in range(8)])))["id"])
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "server_error")
    assert "RuntimeError: a bug" in caplog.text


async def test_a_line_that_is_nested_too_deeply_is_named(make_batches: Callable[..., FastAPI]) -> None:
    deep = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":' + b"[" * 3000 + b"]" * 3000 + b"}"
    async with client_of(make_batches()) as client:
        batches = Batches(client)
        batch = await batches.ended((await batches.create(written([completion()]) + deep))["id"])
    assert (batch["status"], batch["errors"]["data"][0]["line"]) == ("failed", 2)


async def test_a_key_has_a_bounded_number_of_open_batches(
    make_batches: Callable[..., FastAPI], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.api.batches.routes.MAX_OPEN", 2)
    engine.first_delay_s = 60
    async with client_of(make_batches()) as client:
        batches = Batches(client)
        open_ones = [(await batches.create(written([completion()])))["id"] for _ in range(2)]
        body = {"endpoint": COMPLETIONS, "completion_window": "24h"}
        body["input_file_id"] = await batches.upload(written([completion()]))
        assert error_of(await client.post("/v1/batches", json=body))["code"] == "too_many_batches"
        await client.post(f"/v1/batches/{open_ones[0]}/cancel")
        await batches.ended(open_ones[0])
        assert (await client.post("/v1/batches", json=body)).status_code == 200
