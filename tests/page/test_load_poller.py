"""Who reads the server, how often, and what becomes of what it has not."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from server.page.api import ApiError
from server.page.load import poller
from server.page.load.poller import Poller, SharedPollers
from tests.page.metrics import Metrics
from tests.waiting import until


class FakeApi:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.keys: set[str] = set()
        self.answers: dict[str, Any] = {"/metrics": Metrics().text()}
        """Answers by path; other paths do not exist."""

    async def version(self) -> str:
        self.asked["/version"] += 1
        return "1.0"

    async def metrics(self, key: str) -> str:
        return await self._answer("/metrics", key)

    async def get(self, path: str, key: str) -> dict[str, Any]:
        return await self._answer(path, key)

    async def _answer(self, path: str, key: str) -> Any:
        name = path.partition("?")[0]
        self.asked[name] += 1
        self.keys.add(key)
        answer = self.answers.get(name, ApiError("Not Found", 404))
        if isinstance(answer, ApiError):
            raise answer
        return answer(path) if callable(answer) else answer


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def pollers(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> SharedPollers:
    monkeypatch.setattr(poller, "INTERVAL_S", 0.01)
    return SharedPollers(api)  # type: ignore[arg-type]


async def test_all_with_a_key_share_one_reading(pollers: SharedPollers, api: FakeApi) -> None:
    seen: list[list[dict[str, Any]]] = [[], [], []]
    ends: list[Callable[[], None]] = [pollers.subscribe("k", one.append) for one in seen]
    await until(lambda: all(len(one) >= 3 for one in seen))
    assert all(mine is theirs for mine, theirs in zip(seen[0], seen[1], strict=False))
    assert api.asked["/metrics"] <= len(seen[0]) + 1
    ends[0]()
    ends[0]()
    before = len(seen[1])
    await until(lambda: len(seen[1]) > before)
    ends[1]()
    ends[2]()
    await until(lambda: not any(task.get_name() == "poll the server" for task in asyncio.all_tasks()))
    assert len(seen[0]) < len(seen[1])


async def test_who_comes_later_sees_the_latest_at_once_and_only_with_the_same_key(
    pollers: SharedPollers, api: FakeApi
) -> None:
    first: list[dict[str, Any]] = []
    later: list[dict[str, Any]] = []
    ends = [pollers.subscribe("k", first.append)]
    await until(lambda: bool(first))
    ends.append(pollers.subscribe("k", later.append))
    assert later == first[-1:]
    other: list[dict[str, Any]] = []
    ends.append(pollers.subscribe("another", other.append))
    assert other == []
    await until(lambda: bool(other))
    assert api.keys == {"k", "another"}
    for end in ends:
        end()


async def test_what_the_server_has_not_is_asked_for_once(api: FakeApi) -> None:
    watched = Poller(api, "k")  # type: ignore[arg-type]
    readings = [await watched.poll() for _ in range(4)]
    assert api.asked == {"/version": 1, "/metrics": 4, "/steps": 1, "/requests": 1}
    assert list(readings[-1].groups) == ["Server", "Work"]
    assert readings[-1].requests is None
    assert (readings[-1].problem, readings[-1].charts) == ("", [])


@pytest.mark.parametrize("text", [None, "<html></html>", "python_info 1\n"])
async def test_a_server_without_metrics(api: FakeApi, text: str | None) -> None:
    if text is None:
        del api.answers["/metrics"]
    else:
        api.answers["/metrics"] = text
    watched = Poller(api, "k")  # type: ignore[arg-type]
    readings = [await watched.poll() for _ in range(3)]
    assert {reading.problem for reading in readings} == {
        "This server has no metrics at /metrics, so its load is unknown."
    }
    assert api.asked["/metrics"] == 1


async def test_a_server_that_goes_and_comes_again(api: FakeApi) -> None:
    watched = Poller(api, "k")  # type: ignore[arg-type]
    assert (await watched.poll()).problem == ""
    there, api.answers["/metrics"] = api.answers["/metrics"], ApiError("No server answers.")
    assert (await watched.poll()).problem == "No server answers. Retrying."
    api.answers |= {"/metrics": there, "/requests": {"object": "list", "data": []}}
    assert (await watched.poll()).problem == ""
    assert api.asked["/version"] == 2
    assert (await watched.poll()).requests == []


async def test_steps_are_asked_for_after_the_last_one(api: FakeApi) -> None:
    paths: list[str] = []

    def steps(path: str) -> dict[str, Any]:
        paths.append(path)
        if path.endswith("=40"):
            raise ApiError("Invalid 'after'", 400, "after")
        last = 40 if len(paths) == 1 else 3
        return {"data": [{"number": last, "ended_at": 1e9}], "last_step": last, "kv_cache": {"block_size": 16}}

    api.answers["/steps"] = steps
    watched = Poller(api, "k")  # type: ignore[arg-type]
    readings = [await watched.poll() for _ in range(4)]
    assert paths == ["/steps?after=0", "/steps?after=40", "/steps?after=0", "/steps?after=3"]
    assert {reading.problem for reading in readings} == {""}
    assert [chart.title for chart in readings[-1].charts] == ["Tokens per step"]


async def test_one_of_several_models_or_all_of_them(api: FakeApi) -> None:
    """All together have no steps in common."""
    paths: list[str] = []

    def steps(path: str) -> dict[str, Any]:
        paths.append(path)
        return {"data": [], "last_step": 0}

    metrics = Metrics()
    metrics.gauge("num_requests_running", 1)
    metrics.gauge("num_requests_running", 2, model_name="org/n")
    api.answers = {"/metrics": metrics.text(), "/steps": steps}
    for model, running, shown in (("", "3", "m, org/n"), ("org/n", "2", "org/n")):
        reading = await Poller(api, "k", model).poll()  # type: ignore[arg-type]
        assert reading.models == ["m", "org/n"]
        assert reading.groups["Work"]["Running choices"] == running
        assert shown in reading.groups["Server"].values()
        assert [chart.title for chart in reading.charts] == ["Tokens per step"] * bool(model)
    assert paths == ["/steps?after=0&model=org%2Fn"]


async def test_an_answer_of_another_kind_is_a_problem(api: FakeApi) -> None:
    api.answers["/steps"] = {"steps": []}
    reading = await Poller(api, "k").poll()  # type: ignore[arg-type]
    assert reading.problem.startswith("The server's answer to /steps cannot be read")


async def test_a_watch_that_fails_says_so_and_makes_room(
    pollers: SharedPollers, api: FakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.answers["/metrics"] = 5
    seen: list[dict[str, Any]] = []
    end = pollers.subscribe("k", seen.append)
    await until(lambda: bool(seen))
    assert "Internal error" in seen[0]["problem"]
    assert "while polling the server" in caplog.text
    api.answers["/metrics"] = Metrics().text()
    again: list[dict[str, Any]] = []
    other = pollers.subscribe("k", again.append)
    end()
    await until(lambda: len(again) > 1)
    assert again[-1]["problem"] == ""
    other()


async def test_who_fails_to_look_hinders_nobody(pollers: SharedPollers) -> None:
    def fail(reading: dict[str, Any]) -> None:
        raise RuntimeError

    seen: list[dict[str, Any]] = []
    ends = [pollers.subscribe("k", fail), pollers.subscribe("k", seen.append)]
    await until(lambda: len(seen) > 1)
    for end in ends:
        end()
