"""The work of visitors leaves the event loop to others, and none of them keeps the others out."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from nicegui import Client
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from server.page import throttle
from server.page.throttle import MOST_PAGES, MOST_PAGES_OF_ORIGIN, PageLimit, VisitorQueue, origin_of


async def test_origins_alternate() -> None:
    """However much one of them sends."""
    visitors = VisitorQueue()
    done: list[str] = []

    async def work(origin: str) -> None:
        async with visitors.turn(origin):
            done.append(origin)

    async with visitors.turn("first"):
        waiting = [asyncio.create_task(work(origin)) for origin in ["greedy"] * 50 + ["modest"] * 3]
        await asyncio.sleep(0)
    await asyncio.wait(waiting)
    assert [at for at, origin in enumerate(done) if origin == "modest"] == [1, 3, 5]


async def test_work_is_followed_by_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as long as the work took, so that it takes at most a third of the loop's time."""
    now = 0.0
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    monkeypatch.setattr(throttle.time, "thread_time", lambda: now)
    monkeypatch.setattr(throttle.asyncio, "sleep", rest)
    visitors = VisitorQueue()
    for took in (0.01, 0.04, 10.0):
        async with visitors.turn("a"):
            now += took
    assert rests == pytest.approx([0.02, 0.08, 0.5])
    rests.clear()
    for _ in range(100):
        async with visitors.turn("a"):
            now += 1e-6
    assert 1 < len(rests) < 100
    assert sum(rests) == pytest.approx(100 * 0.0002 * 2, rel=0.2)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("::ffff:10.1.2.3", "::ffff:10.1.2.3"),
        ("", ""),
        ("testclient", "testclient"),
    ],
)
def test_origins(host: str, origin: str) -> None:
    assert origin_of({"client": (host, 80)}) == origin


Full = Callable[[dict[str, int]], None]


@pytest.fixture
def open_pages(monkeypatch: pytest.MonkeyPatch) -> Full:
    """Have so many pages open, by host."""

    def open_(numbers: dict[str, int]) -> None:
        hosts = [host for host, number in numbers.items() for _ in range(number)]
        requests = [Request({"type": "http", "client": (host, 1)}) for host in hosts]
        pages = {str(at): SimpleNamespace(request=request) for at, request in enumerate(requests)}
        monkeypatch.setattr(Client, "instances", pages)

    return open_


@pytest.mark.parametrize(
    ("pages", "host", "status"),
    [
        ({}, "a", 200),
        ({"a": MOST_PAGES_OF_ORIGIN - 1}, "a", 200),
        ({"a": MOST_PAGES_OF_ORIGIN}, "a", 503),
        ({"a": MOST_PAGES_OF_ORIGIN}, "b", 200),
        ({"2001:db8::1": MOST_PAGES_OF_ORIGIN}, "2001:db8::2", 503),
        ({"a": MOST_PAGES_OF_ORIGIN, "b": MOST_PAGES - MOST_PAGES_OF_ORIGIN}, "c", 503),
    ],
)
async def test_room_is_shared_between_addresses(
    open_pages: Full, pages: dict[str, int], host: str, status: int
) -> None:
    open_pages(pages)
    room = PageLimit(PlainTextResponse("a page"), VisitorQueue(), "/page/")
    transport = httpx.ASGITransport(room, client=(host, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as visitor:
        answer = await visitor.get("/page/")
        assert (answer.status_code, "retry-after" in answer.headers) == (status, status == 503)
        assert (await visitor.get("/page/static/page.css")).status_code == 200


async def test_pages_that_are_being_made_take_room(open_pages: Full) -> None:
    open_pages({})
    made = asyncio.Event()

    async def page(scope: Any, receive: Any, send: Any) -> None:
        await made.wait()
        await PlainTextResponse("a page")(scope, receive, send)

    transport = httpx.ASGITransport(PageLimit(page, VisitorQueue(), "/page/"), client=("a", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=None) as visitor:
        asked = [asyncio.create_task(visitor.get("/page/")) for _ in range(MOST_PAGES_OF_ORIGIN + 1)]
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [(await one).status_code for one in done] == [503]
        made.set()
        statuses = [(await one).status_code for one in asked]
    assert statuses.count(200) == MOST_PAGES_OF_ORIGIN
