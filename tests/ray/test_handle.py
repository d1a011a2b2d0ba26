"""Ray's errors as clients see them, with a stand-in for Ray's handle."""

import asyncio
import importlib
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from server.errors import ApiError, InternalError, UnavailableError
from server.ray.exchange import Accepted, ForwardedRequest

pytestmark = pytest.mark.ray

REQUEST = ForwardedRequest({"path": "/v1/models"}, b"")
START = {"type": "http.response.start", "status": 200, "headers": []}


@pytest.fixture(scope="module", autouse=True)
def ray_is_imported() -> None:
    """Import Ray first, because its own warnings are not tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("server.ray.application")


class Response:
    """Says what it is given; an exception is raised."""

    def __init__(self, *said: Any) -> None:
        self._said = list(said)
        self.is_cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self._said:
            raise StopAsyncIteration
        one = self._said.pop(0)
        if isinstance(one, asyncio.Event):
            await one.wait()
        if isinstance(one, Exception):
            raise one
        return one

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """One call, and what came of it."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self.options_: dict[str, Any] = {}

    def options(self, **options: Any) -> "Handle":
        self.options_ = options
        return self

    @property
    def answer(self) -> "Handle":
        return self

    def remote(self, request: ForwardedRequest) -> Response:
        assert request is REQUEST
        return self.response


async def said(*said: Any) -> tuple[list[Any], ApiError | None, Handle]:
    from server.ray.application import HandleReplicas  # noqa: PLC0415  (needs Ray)

    handle, got = Handle(Response(*said)), []
    try:
        async for one in HandleReplicas(handle).answer(REQUEST, "session"):
            got.append(one)  # noqa: PERF401  (what came before an error is looked at)
    except ApiError as error:
        return got, error, handle
    return got, None, handle


def died() -> Exception:
    from ray.exceptions import ActorDiedError  # noqa: PLC0415

    return ActorDiedError()


def unavailable() -> Exception:
    from ray.exceptions import ActorUnavailableError  # noqa: PLC0415

    return ActorUnavailableError("the network is down", None)


def undeployed() -> Exception:
    from ray.serve.exceptions import ReplicaUnavailableError  # noqa: PLC0415

    return ReplicaUnavailableError("gone")


def failed() -> Exception:
    from ray.exceptions import RayTaskError  # noqa: PLC0415

    return RayTaskError("answer", "trace", ValueError("a bug")).as_instanceof_cause()


async def test_all_is_passed_on_in_the_session() -> None:
    got, error, handle = await said(Accepted("one"), START)
    assert (got, error) == ([Accepted("one"), START], None)
    assert handle.options_ == {"stream": True, "session_id": "session"}


@pytest.mark.parametrize("make", [died, unavailable, undeployed])
@pytest.mark.parametrize("before", [(), (Accepted("one"), START)])
async def test_the_end_of_a_replica_is_told(make: Callable[[], Exception], before: tuple[Any, ...]) -> None:
    got, error, handle = await said(*before, make())
    assert got == list(before)
    assert isinstance(error, UnavailableError)
    assert "has stopped" in error.message
    assert handle.response.is_cancelled


async def test_a_bug_in_a_replica_is_told_as_one() -> None:
    _, error, _ = await said(Accepted("one"), failed())
    assert isinstance(error, InternalError)
    assert "a bug" not in error.message


async def test_nobody_waits_for_ever_for_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.ray.application.NO_REPLICA_S", 0.01)
    _, error, handle = await said(asyncio.Event())
    assert isinstance(error, UnavailableError)
    assert "No replica is ready" in error.message
    assert handle.response.is_cancelled


class Result:
    """Ray's result of a call to a replica."""

    def __init__(self, said: Any) -> None:
        self._said = said

    def get(self, timeout_s: float | None) -> Any:
        if isinstance(self._said, asyncio.Event):
            raise TimeoutError
        if isinstance(self._said, Exception):
            raise self._said
        return self._said


async def metrics_of(*said: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Through Ray's own class."""
    from ray.serve.handle import DeploymentBroadcastResponse  # noqa: PLC0415

    from server.ray.application import HandleReplicas  # noqa: PLC0415

    async def results() -> list[Result]:
        if isinstance(said[0], Exception):
            raise said[0]
        return [Result(one) for one in said]

    class Broadcasting:
        def broadcast(self, method: str) -> Any:
            assert method == "metrics"
            return DeploymentBroadcastResponse(results(), None)

    monkeypatch.setattr("server.ray.application.METRICS_S", 0.05)
    return await HandleReplicas(Broadcasting()).metrics()  # type: ignore[arg-type]


async def test_without_replicas_there_are_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError):
        await metrics_of(undeployed(), monkeypatch=monkeypatch)


async def test_a_replica_that_is_slow_or_dies_does_not_keep_the_others_from_telling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = await metrics_of(("one", []), asyncio.Event(), died(), ("two", []), monkeypatch=monkeypatch)
    assert told == [("one", []), ("two", [])]


async def test_where_no_replica_tells_anything_that_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError):
        await metrics_of(asyncio.Event(), died(), monkeypatch=monkeypatch)
