"""Responses in the background: made without their clients, followed, cancelled, and made after a restart."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from scheduler.interface import EngineRequest, RequestOutput
from server.api.responses.background import resume
from server.api.responses.objects import ResponseStreamError
from server.api.responses.store import pending_jobs
from server.api.responses.stream import EventReplay, LiveFrames, ResponseStream, RunningResponses
from server.app import _lifespan
from server.engine.client import EngineUnavailableError, QueueFullError, RequestFailedError
from server.errors import InvalidRequestError
from server.storage.storage import FILE, NotStoredError
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import client_of, error_of, says
from tests.server.responses.calling import RESPONSES, asking, events_of, kinds_of, text_of, whole
from tests.server.responses.test_answers import ADDED, DONE, TEXT
from tests.waiting import until

QUEUED = ["created", "queued", "in_progress"]


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, which starts and ends as a server does."""
    async with _lifespan(app), client_of(app) as client:
        yield client


async def begun(client: httpx.AsyncClient, **fields: Any) -> str:
    """The path of a response in the background."""
    response = await whole(client, background=True, **fields)
    assert (response["status"], response["output"], response["background"]) == ("queued", [], True)
    return f"{RESPONSES}/{response['id']}"


async def ended(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """The response when it has ended: its stream says when."""
    last = events_of((await client.get(f"{path}?stream=true")).text)[-1]["response"]
    response = (await client.get(path)).json()
    assert response == last
    return response


async def no_longer_waiting(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """The response after a restart: until it is taken up, there is nothing to follow."""
    while (response := (await client.get(path)).json())["status"] in ("queued", "in_progress"):  # noqa: ASYNC110
        await asyncio.sleep(0)
    return response


async def test_it_is_made_without_its_client(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = says("Done.")
    response = await ended(client, await begun(client))
    assert (response["status"], text_of(response)) == ("completed", "Done.")


async def test_it_comes_out_as_in_the_foreground(client: httpx.AsyncClient) -> None:
    fields = {"seed": 5, "max_output_tokens": 12}
    response = await ended(client, await begun(client, **fields))
    assert text_of(response) == text_of(await whole(client, **fields))


async def test_its_stream_is_followed_from_any_place(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script, engine.step_delay_s = says("Done."), 0.01
    path = await begun(client)
    streams = [client.get(f"{path}?stream=true{rest}") for rest in ("", "&starting_after=1", "&starting_after=4")]
    told, late, later = [(await stream).text for stream in map(asyncio.ensure_future, streams)]
    every = events_of(told)
    assert kinds_of(every) == [*QUEUED, *ADDED, *TEXT, *DONE, "completed"]
    assert events_of(late, 2) == every[2:]
    assert events_of(later, 5) == every[5:]


async def test_it_goes_on_when_its_stream_is_left(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    streamed = await client.post(RESPONSES, json=asking(background=True, stream=True, max_output_tokens=3))
    told = events_of(streamed.text)
    assert kinds_of(told)[:3] == QUEUED
    again = await client.get(f"{RESPONSES}/{told[0]['response']['id']}?stream=true")
    assert again.text == streamed.text


async def test_events_that_are_too_large_are_sent_and_not_kept(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.api.responses.background.MAX_KEPT_BYTES", 8000)
    made: list[LiveFrames] = []

    def watched(*args: Any) -> LiveFrames:
        made.append(LiveFrames(*args))
        return made[-1]

    monkeypatch.setattr("server.api.responses.background.LiveFrames", watched)
    fields = {"seed": 7, "max_output_tokens": 200}
    sent = events_of((await client.post(RESPONSES, json=asking(stream=True, **fields))).text)
    outputs_of, is_followed, is_late, goes_on = engine._outputs, asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def in_parts(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        await is_followed.wait()
        number = 0
        async for output in outputs_of(request):
            if (number := number + 1) == 150:
                is_late.set()
                await goes_on.wait()
            yield output

    monkeypatch.setattr(engine, "_outputs", in_parts)
    path = await begun(client, **fields)
    following = asyncio.ensure_future(client.get(f"{path}?stream=true"))
    await until(lambda: bool(made[0].followers))
    is_followed.set()
    await is_late.wait()
    await until(lambda: bool(made[0].cut_because))
    assert "not kept" in error_of(await client.get(f"{path}?stream=true"))["message"]
    goes_on.set()
    followed = events_of((await following).text)
    assert kinds_of(followed) == [*QUEUED, *kinds_of(sent)[2:]]
    assert [one.get("delta") for one in followed[3:]] == [one.get("delta") for one in sent[2:]]
    response = (await client.get(path)).json()
    assert response == followed[-1]["response"]
    (warning,) = response["warnings"]
    assert (warning["path"], "8000 bytes" in warning["reason"]) == ("stream", True)
    assert "no stored events" in error_of(await client.get(f"{path}?stream=true"))["message"]


def test_frames_of_all_responses_have_bounded_memory() -> None:
    running = RunningResponses(1000)
    first, second, other = (LiveFrames(client, running, 600) for client in ("ann", "ann", "bob"))
    other.add(b"o" * 300)
    first.add(b"a" * 400)
    for frames in (first, other):
        frames.publish()
    slow, close = EventReplay(first, 0), EventReplay(first, 0)
    assert len(list(close.take())) == 1
    second.add(b"b" * 400)  # ann has 800 of 1100
    assert (first.complete(), second.complete(), other.complete()) == ((), (b"b" * 400,), (b"o" * 300,))
    assert "too much memory" in first.cut_because
    first.add(b"next")
    first.publish()
    assert list(close.take()) == [b"next"]
    with pytest.raises(InvalidRequestError, match="Event 0 "):
        list(slow.take())
    slow.close()
    close.close()
    first.publish()
    assert (first.frames, first.num_ready) == ([], 2)


class _Ending:
    """A run that is over, whose response notes when its last event is written."""

    def __init__(self, written: list[str]) -> None:
        self.usage, self._written = None, written

    async def wait(self) -> bool:
        return False

    def end(self, usage: None) -> Iterator[ResponseStreamError]:
        self._written.append("end")
        yield ResponseStreamError(sequence_number=0, code="server_error", message="", param=None)


async def test_others_have_turns_between_responses_that_end_together() -> None:
    written: list[str] = []

    async def tick() -> None:
        while written.count("end") < 5:
            written.append("tick")
            await asyncio.sleep(0)

    async def keep(*_: object) -> bool:
        return True

    running = RunningResponses()
    endings: list[Any] = [_Ending(written) for _ in range(5)]
    streams = [ResponseStream(one, one, keep, str, LiveFrames("", running, 1000)) for one in endings]  # type: ignore[arg-type]
    await asyncio.gather(*(stream.wait() for stream in streams), tick())
    assert "end end" not in " ".join(written)


async def test_it_is_cancelled(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.first_delay_s = 60
    path = await begun(client)
    following = asyncio.ensure_future(client.get(f"{path}?stream=true"))
    response = (await client.post(f"{path}/cancel")).json()
    assert response["status"] == "cancelled"
    assert (await client.get(path)).json() == response
    assert kinds_of(events_of((await following).text))[-1] == "cancelled"
    assert engine.num_live == 0
    assert (await client.post(f"{path}/cancel")).json() == response


async def test_only_what_is_in_the_background_is_cancelled(client: httpx.AsyncClient) -> None:
    response = await whole(client)
    error_of(await client.post(f"{RESPONSES}/{response['id']}/cancel"))


async def test_a_failure_is_its_end(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after, engine.failure = 0, RequestFailedError("it broke")
    response = await ended(client, await begun(client))
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")


async def test_its_record_names_the_error(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after, engine.failure = 0, RequestFailedError("it broke")
    response = await ended(client, await begun(client))
    one = (await client.get(f"/v1/requests/{response['id']}")).json()
    assert (one["state"], one["error"], one["choices"][0]["finish_reason"]) == ("ended", "InternalError", "error")


async def test_a_full_queue_promises_nothing(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.refuse = QueueFullError()
    error_of(await client.post(RESPONSES, json=asking(background=True)), 429, "rate_limit_exceeded")


async def test_it_is_deleted_while_it_is_made(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.first_delay_s = 60
    path = await begun(client)
    assert (await client.delete(path)).json()["deleted"]
    error_of(await client.get(path), 404)
    assert engine.num_live == 0


async def test_an_unfinished_one_is_nothing_to_go_on_from(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.first_delay_s = 60
    path = await begun(client)
    error_of(await client.post(RESPONSES, json=asking(previous_response_id=path.rpartition("/")[2])))
    await client.post(f"{path}/cancel")


async def test_it_is_there_when_it_ends_in_a_full_store(make_app: Callable[..., FastAPI], engine: FakeEngine) -> None:
    async with client_of(make_app(max_stored_mib=0.02)) as client:
        engine.first_delay_s = 60
        path = await begun(client)
        engine.first_delay_s = 0
        others = [(await whole(client, input="x" * 1000))["id"] for _ in range(9)]
        assert (await client.get(f"{RESPONSES}/{others[0]}")).status_code == 404
        await client.post(f"{path}/cancel")
        assert (await client.get(path)).json()["status"] == "cancelled"


async def test_no_more_is_promised_than_half_of_the_store(make_app: Callable[..., FastAPI], engine: FakeEngine) -> None:
    app, large = make_app(max_stored_mib=0.1), {"input": [{"role": "user", "content": "hi", "junk": "x" * 8000}]}
    engine.first_delay_s = 60
    async with client_of(app) as client:
        paths = [await begun(client, **large) for _ in range(2)]
        error = error_of(
            await client.post(RESPONSES, json=asking(background=True, **large)), 429, "rate_limit_exceeded"
        )
        assert "Unfinished background responses" in error["message"]
        assert await app.state.services.storage.run(lambda rows: rows.num_bytes()) < 0.05 * (1 << 20)
        assert engine.num_live == len(paths)
        await client.post(f"{paths[0]}/cancel")
        paths.append(await begun(client, **large))
        for path in paths:
            await client.post(f"{path}/cancel")
            assert (await client.get(path)).json()["status"] == "cancelled"


async def test_one_that_cannot_be_stored_has_failed(make_app: Callable[..., FastAPI]) -> None:
    async with client_of(make_app(max_stored_mib=0.004)) as client:
        response = await ended(client, await begun(client))
        assert (response["status"], response["output"]) == ("failed", [])
        assert "Too large to store" in response["error"]["message"]


async def test_what_is_too_large_to_be_stored_is_not_promised(
    make_app: Callable[..., FastAPI], engine: FakeEngine
) -> None:
    async with client_of(make_app(max_stored_mib=0.004)) as client:
        large = asking(background=True, metadata={str(number): "x" * 500 for number in range(9)})
        error_of(await client.post(RESPONSES, json=large), 413)
    await asyncio.sleep(0)  # the engine takes note
    assert engine.num_live == 0


async def test_it_has_failed_even_if_that_cannot_be_written(
    make_app: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app()
    storage, works = app.state.services.storage, []
    write = storage.run

    async def full_after_the_promise(work: Any) -> Any:
        works.append(work)
        if len(works) > 1:
            raise NotStoredError("disk full")
        return await write(work)

    monkeypatch.setattr(storage, "run", full_after_the_promise)
    async with client_of(app) as client:
        response = await ended(client, await begun(client))
    await app.state.services.jobs.close()
    assert (response["status"], response["error"]["message"]) == ("failed", "disk full")
    assert await write(pending_jobs), "it is made when the server is started again"


async def test_one_that_is_cancelled_when_it_has_ended_is_completed(
    make_app: Callable[..., FastAPI], engine: FakeEngine
) -> None:
    app = make_app()
    engine.script = says("Done.")
    services, others_end = app.state.services, threading.Event()
    async with client_of(app) as client:
        path = await begun(client)
        job = services.jobs.get(path.rpartition("/")[2], "")
        writing = asyncio.ensure_future(services.storage.run(lambda rows: others_end.wait()))
        following = asyncio.ensure_future(client.get(f"{path}?stream=true"))
        while job.builder.status != "completed":  # noqa: ASYNC110
            await asyncio.sleep(0)  # it is reported only after it is written
        cancelling = asyncio.ensure_future(client.post(f"{path}/cancel"))
        while not job._is_cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0)
        others_end.set()
        await writing
        assert (await cancelling).json()["status"] == "completed"
        assert kinds_of(events_of((await following).text))[-2:] == ["output_item.done", "completed"]


async def test_one_whose_model_is_gone_after_a_restart_has_failed(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path
) -> None:
    engine.first_delay_s = 60
    async with running(make_app(data_dir=tmp_path)) as client:
        path = await begun(client)
    async with running(make_app(data_dir=tmp_path, served_model_name=["other"])) as client:
        response = await no_longer_waiting(client, path)
    assert response["status"] == "failed"
    assert "`tiny` does not exist" in response["error"]["message"]


async def test_one_whose_key_is_gone_after_a_restart_has_failed(
    make_with_keys: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path
) -> None:
    engine.first_delay_s = 60
    async with running(make_with_keys({"ann": {}, "bob": {}}, data_dir=tmp_path)) as client:
        client.headers["authorization"] = "Bearer ann-key"
        path = await begun(client)
    num_before = len(engine.requests)
    app = make_with_keys({"bob": {}}, data_dir=tmp_path)
    async with running(app):
        engine.first_delay_s = 0
        while await app.state.services.storage.run(pending_jobs):  # noqa: ASYNC110
            await asyncio.sleep(0)
    async with running(make_with_keys({"ann": {}, "bob": {}}, data_dir=tmp_path)) as client:
        client.headers["authorization"] = "Bearer ann-key"
        response = await no_longer_waiting(client, path)
    assert response["status"] == "failed"
    assert "no longer accepted" in response["error"]["message"]
    assert len(engine.requests) == num_before


async def test_a_damaged_promise_fails_alone(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path
) -> None:
    engine.first_delay_s = 60
    async with running(make_app(data_dir=tmp_path)) as client:
        paths = [await begun(client) for _ in range(2)]
    with sqlite3.connect(tmp_path / FILE) as connection:
        first = paths[0].rpartition("/")[2]
        connection.execute("UPDATE rows SET body = '{}' WHERE kind = 'job' AND id = ?", (first,))
    connection.close()
    engine.first_delay_s = 0
    async with running(make_app(data_dir=tmp_path)) as client:
        statuses = [(await no_longer_waiting(client, path))["status"] for path in paths]
    assert statuses == ["failed", "incomplete"]


@pytest.mark.parametrize("method", ["DELETE", "POST"])
async def test_one_that_is_unwanted_while_it_is_taken_up_again_is_not_made(
    make_app: Callable[..., FastAPI],
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    engine.first_delay_s = 60
    async with running(make_app(data_dir=tmp_path)) as client:
        path = await begun(client)
    app = make_app(data_dir=tmp_path)
    worker, begins, goes_on = app.state.services.models.default.body_worker, asyncio.Event(), asyncio.Event()
    take_in = worker.run

    async def slowly(*args: Any, **fields: Any) -> Any:
        begins.set()
        await goes_on.wait()
        return await take_in(*args, **fields)

    monkeypatch.setattr(worker, "run", slowly)
    work = await resume(app.state.services)
    resuming = asyncio.ensure_future(work())
    async with client_of(app) as client:
        await begins.wait()
        await client.request(method, path if method == "DELETE" else f"{path}/cancel")
        goes_on.set()
        await resuming
        answer = await client.get(path)
    assert engine.num_live == 0
    if method == "POST":
        assert answer.json()["status"] == "cancelled"
    else:
        error_of(answer, 404)


async def test_what_is_promised_as_soon_as_the_server_runs_is_made_once(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path
) -> None:
    app = make_app(data_dir=tmp_path)
    work = await resume(app.state.services)
    async with client_of(app) as client:
        engine.first_delay_s = 60
        path = await begun(client)
        await work()
        assert len(engine.requests) == 1
        await client.post(f"{path}/cancel")


@pytest.mark.parametrize("dies", [False, True])
async def test_it_is_made_after_a_restart(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path, dies: bool
) -> None:
    fields = {"input": "And?", "max_output_tokens": 12}
    async with running(make_app(data_dir=tmp_path)) as client:
        first = await whole(client, max_output_tokens=3)
        engine.first_delay_s = 0 if dies else 60
        engine.fail_after, engine.failure = (2, EngineUnavailableError("it ends")) if dies else (None, None)
        path = await begun(client, **fields, previous_response_id=first["id"])
    assert engine.num_live == 0
    engine.first_delay_s, engine.fail_after = 0, None
    async with running(make_app(data_dir=tmp_path)) as client:
        waiting = (await client.get(path)).json()
        response = await no_longer_waiting(client, path)
        again = await whole(client, **fields, previous_response_id=first["id"], seed=response["seed"])
    assert waiting["id"] == response["id"]
    assert waiting["seed"] == response["seed"]
    assert text_of(response) == text_of(again)
