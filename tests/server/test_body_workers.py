"""Worker processes for bodies: what exceeds the limits ends one request and one process, and senders share fairly."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from server.api import body_worker
from server.api.body_worker import BodyContext, Errand, Limits, WorkerPool
from server.errors import InternalError, InvalidRequestError, RateLimitError, UnavailableError
from server.telemetry.request_trace import Sender
from tests.server.constraints.schemas import BOMB
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of

LIMITS = Limits(cpu_s=1, num_bytes=64 << 20)


def process_of(context: BodyContext, body: bytes) -> int:
    return os.getpid()


def take_memory(context: BodyContext, body: bytes) -> int:
    return len(bytearray(256 << 20))


def take_memory_natively(context: BodyContext, body: bytes) -> None:
    """As a library does that cannot go on without it."""
    os.abort()


def take_time(context: BodyContext, body: bytes) -> None:
    for _ in itertools.count():
        pass


def take_time_for_an_image(context: BodyContext, body: bytes) -> int:
    """Work that takes longer than the limit, with an image."""
    context.weigh_image()
    start = time.process_time()
    while time.process_time() < start + LIMITS.cpu_s + 1.1:
        pass
    return os.getpid()


def end(context: BodyContext, body: bytes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(context: BodyContext, body: bytes) -> None:
    raise ZeroDivisionError("in a worker")


def until_gone(context: BodyContext, body: bytes) -> int:
    """Work that ends when a file of this name is gone."""
    while Path(body.decode()).exists():
        time.sleep(0.001)
    return os.getpid()


@pytest.fixture
def ask(workers: WorkerPool, make_app: Callable[..., Any], engine: FakeEngine) -> Callable[..., Future[Any]]:
    place = make_app().state.services.models.default.body_worker._pickled_context(engine.info)

    def submit(
        work: Callable[..., Any],
        sender: str = "a",
        body: bytes = b"",
        pool: WorkerPool = workers,
        *,
        is_background: bool = False,
    ):
        return pool.submit(
            Sender(sender, is_background), Errand(place, work, body, (), Sender(sender), LIMITS), len(body)
        )

    return submit


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(most=2)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (take_memory, "more than 64 MiB of memory"),
        (take_memory_natively, "more than 64 MiB of memory"),
        (take_time, "more than 1 s of CPU time"),
    ],
)
def test_what_exceeds_a_limit_is_refused_and_the_next_body_is_checked(ask, work: Callable[..., Any], reason: str):
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        ask(work).result()
    assert caught.value.code == "request_too_complex"
    assert ask(process_of).result() != os.getpid()


def test_an_image_allows_time_of_its_own(ask):
    assert ask(take_time_for_an_image).result() != os.getpid()


def test_a_process_that_is_killed_is_an_error_of_one_request(ask):
    with pytest.raises(InternalError, match="ended unexpectedly"):
        ask(end).result()
    assert ask(process_of).result() != os.getpid()


def test_a_process_that_ended_without_work_is_replaced_before_the_next_body(ask, pool: WorkerPool):
    before = ask(process_of, pool=pool).result()
    os.kill(before, signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)  # it is gone, and still to be reaped
    assert ask(process_of, pool=pool).result() != before


def test_a_pool_that_closes_ends_its_work_without_an_error_in_the_log(
    ask, pool: WorkerPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    lasting = tmp_path / "lasting"
    lasting.touch()
    ask(process_of, pool=pool).result()
    running = ask(until_gone, body=str(lasting).encode(), pool=pool)
    pool.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        running.result()
    assert not caplog.records


@pytest.mark.parametrize("one", [signal.SIGINT, signal.SIGTERM])
def test_signals_of_the_process_group_do_not_end_a_worker(ask, pool: WorkerPool, tmp_path: Path, one: signal.Signals):
    """The server gets them, too: it drains, and ends the workers afterwards."""
    lasting = tmp_path / "lasting"
    lasting.touch()
    begun = ask(process_of, pool=pool)
    while not pool.pids:
        time.sleep(0.001)
    os.kill(pool.pids[0], one)  # it has hardly started
    pid = begun.result()
    running = ask(until_gone, body=str(lasting).encode(), pool=pool)
    os.kill(pid, one)
    lasting.unlink()
    assert running.result() == pid


def test_a_bug_is_raised_with_its_trace(ask):
    with pytest.raises(ZeroDivisionError) as caught:
        ask(fail).result()
    assert "test_body_workers.py" in caught.value.__notes__[0]


def test_the_worker_that_was_used_last_goes_first(ask, pool: WorkerPool):
    assert len({ask(process_of, pool=pool).result() for _ in range(5)}) == 1


def test_a_sender_leaves_a_worker_to_others(ask, pool: WorkerPool, tmp_path: Path):
    lasting = tmp_path / "lasting"
    lasting.touch()
    mine = [ask(until_gone, "a", str(lasting).encode(), pool) for _ in range(5)]
    assert ask(process_of, "b", pool=pool).result() != os.getpid()
    assert not any(one.done() for one in mine)
    lasting.unlink()
    assert len({one.result() for one in mine}) == 1


def test_what_a_sender_has_in_the_background_counts_as_its_own_and_goes_last(ask, workers: WorkerPool, tmp_path: Path):
    lasting, last = tmp_path / "lasting", tmp_path / "last"
    lasting.touch()
    last.touch()
    behind = ask(until_gone, "a", str(last).encode(), is_background=True)
    mine = [
        ask(until_gone, "a", str(lasting).encode()),
        ask(until_gone, "a", str(lasting).encode(), is_background=True),
    ]
    waited_for = ask(process_of, "a")
    assert ask(process_of, "b").result() != os.getpid()  # of three workers, two are a's
    last.unlink()
    behind.result()
    waited_for.result()
    lasting.unlink()
    for one in mine:
        one.result()


def test_bodies_that_wait_are_bounded_for_each_sender(
    ask, pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lasting = tmp_path / "lasting"
    lasting.touch()
    body = str(lasting).encode()
    monkeypatch.setattr(body_worker, "MAX_WAITING_BYTES", 2 * len(body))
    running, *waiting = [ask(until_gone, "a", body, pool) for _ in range(3)]
    with pytest.raises(RateLimitError, match="are waiting to be checked"):
        ask(until_gone, "a", body, pool)
    other = ask(until_gone, "b", body, pool)
    waiting[0].cancel()
    lasting.unlink()
    assert {running.result(), waiting[1].result(), other.result()}
    assert ask(process_of, "a", pool=pool).result() != os.getpid()


PATTERNS = {"type": "string", "allOf": [{"pattern": f"{number:03}"} for number in range(40)]}


def held_to(schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "x", "schema": schema, "strict": True}
    return chat(response_format={"type": "json_schema", "json_schema": named})


async def test_short_bodies_that_need_a_worker_count_as_short(client, monkeypatch: pytest.MonkeyPatch):
    """A crowd of small agents, each with a schema, is not too much to wait for a worker."""
    counted = []
    submit = WorkerPool.submit

    def watched(pool: WorkerPool, sender: Sender, errand: Errand, num_bytes: int) -> "Future[Any]":
        counted.append(num_bytes)
        return submit(pool, sender, errand, num_bytes)

    monkeypatch.setattr(WorkerPool, "submit", watched)
    assert (await client.post(CHAT, json=held_to({"type": "integer"}))).status_code == 200
    assert counted
    assert max(counted) * 400 < body_worker.MAX_WAITING_BYTES / 8


async def test_patterns_for_one_string_are_few(client, workers: WorkerPool):
    response = await client.post(CHAT, json=held_to(PATTERNS))
    assert response.status_code == 400
    assert "patterns for the same value" in response.json()["error"]["message"]


async def test_a_schema_that_takes_all_memory_is_refused_while_others_are_answered(
    make_app, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(body_worker, "_BASE_BYTES", 32 << 20)
    async with client_of(make_app()) as client:
        slow = asyncio.create_task(client.post(CHAT, json=held_to(BOMB)))
        quick = await client.post(CHAT, json=held_to({"type": "integer"}))
        assert quick.status_code == 200
        assert not slow.done()
        response = await slow
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "request_too_complex"
