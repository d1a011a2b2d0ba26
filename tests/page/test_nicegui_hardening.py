"""Attacks by strangers through the page's websocket, and the state kept for them."""

import asyncio
import json
import logging
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from server.page import nicegui_hardening
from server.page.nicegui_hardening import BrowserPacket, RateLimitFilter, Socket
from tests.page import fake_site
from tests.page.fake_site import SENT_BACK, connect, id_in, opened, query_of, socket_url, visit
from tests.waiting import until

MEGABYTE = 1_000_000 - 100
"""Maximum message size of browsers."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("site") / "log"


@pytest.fixture(scope="module")
def fake_address(log: Path) -> Iterator[str]:
    """A site that writes to the log."""
    with log.open("w") as file, fake_site.running(file) as address:
        yield address


@pytest.fixture
def query(client: httpx.Client) -> dict[str, str]:
    """The query of a new page's websocket."""
    return query_of(visit(client))


@pytest.mark.parametrize(
    "wrong",
    [
        {"client_id": str(uuid4())},
        {"client_id": ""},
        {"tab_id": "x" * 36},
        {"tab_id": "a" * 3_000},
        {"old_tab_id": "a" * 37},
        {"document_id": ""},
        {"next_message_id": "1" * 10},
    ],
)
async def test_a_websocket_belongs_to_a_page(fake_address: str, query: dict[str, str], wrong: dict[str, str]) -> None:
    async with connect(socket_url(fake_address, **query | wrong)) as socket:
        assert str(await socket.recv()).startswith("0{")
        assert await socket.recv() == SENT_BACK
        with pytest.raises(ConnectionClosed):
            await socket.recv()


async def test_a_page_has_one_document_and_one_websocket(fake_address: str, query: dict[str, str]) -> None:
    async with opened(fake_address, **query) as first:
        async with connect(socket_url(fake_address, **query | {"document_id": str(uuid4())})) as socket:
            await socket.recv()
            assert await socket.recv() == SENT_BACK
        async with opened(fake_address, **query) as second:
            with pytest.raises(ConnectionClosed):
                await _read_on(first)
            await second.send('421["log",{}]')
            await _read_until(second, "431[]")


@pytest.mark.parametrize(
    "message", [b"4", "", "3", "2probe", "5", "x", "4", "44", "4[[],[]]", '43["x"]', '451-["event"]', "4x"]
)
async def test_what_no_browser_sends_closes_the_websocket(
    fake_address: str, query: dict[str, str], message: str | bytes
) -> None:
    async with opened(fake_address, **query) as socket:
        await socket.send(message)
        with pytest.raises(ConnectionClosed):
            await _read_on(socket)


async def test_a_message_without_end_closes_the_websocket(fake_address: str, query: dict[str, str]) -> None:
    async with opened(fake_address, **query) as socket:
        assert socket.protocol.extensions == []
        with pytest.raises(ConnectionClosed, match="too big"):
            await _ask_too_much(socket)


@pytest.mark.parametrize(
    "packet",
    [
        '5999999999-["event"]',
        '61-["event"]',
        '3["event"]',
        "0/admin,",
        '2/admin,["log",{}]',
        '2["unknown",{}]',
        '2["event"]',
        '2["event",[]]',
        '2["event",{"client_id":"a","id":{},"listener_id":"b","args":[]}]',
        '2["ack",{"client_id":"a","next_message_id":"x"}]',
        '2["handshake",{"client_id":"a","document_id":"d","tab_id":"' + "x" * MEGABYTE + '"}]',
    ],
)
def test_packets_that_no_browser_sends(packet: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        BrowserPacket(encoded_packet=packet)


def test_packets_of_browsers() -> None:
    """The largest, too: three hundred thousand characters of which most have to be escaped twice."""
    text = '{"a": [1]}\n' * 20_000
    said = {"client_id": "c", "id": 3, "listener_id": "l", "args": [json.dumps(text), None, "[[1],[2]]"]}
    packet = BrowserPacket(encoded_packet="2" + json.dumps(["event", said]))
    assert packet.data == ["event", said]
    packet = BrowserPacket(encoded_packet='27["ack",{"client_id":"c","next_message_id":5}]')
    assert (packet.id, packet.data) == (7, ["ack", {"client_id": "c", "next_message_id": 5}])


NOTHING = "[" + "[]," * (MEGABYTE // 3) + "[]]"
EVENT = '2["event",{"client_id":"c","id":3,"listener_id":"l","args":'


@pytest.mark.parametrize(
    "packet",
    [
        '2["event",' + NOTHING[1:],
        '2["event",{"args":' + NOTHING + "}]",
        '2["log",{"a":' + NOTHING + "}]",
        '2["javascript_response",{"client_id":"c","request_id":"r","result":' + NOTHING + "}]",
        EVENT + json.dumps([NOTHING]) + "}]",
        "0" + NOTHING,
    ],
)
def test_what_is_not_used_is_not_read(packet: str) -> None:
    """A megabyte of lists would be tens of megabytes of objects."""
    tracemalloc.start()
    try:
        BrowserPacket(encoded_packet=packet)
    except ValueError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 3 * MEGABYTE


async def test_nobody_can_write_to_the_log(fake_address: str, query: dict[str, str], log: Path) -> None:
    event = {"client_id": query["client_id"], "id": 0, "listener_id": "none", "args": []}
    async with opened(fake_address, **query) as socket:
        for said in (["unknown"], ["event"], ["event", {}], ["event", event], ["event", 1, 2], ["handshake", {}]):
            await socket.send("42" + json.dumps(said))
        for message in ("42attachments", "42", "42[", "40/admin,", "40", '42["log"]'):
            await socket.send(message)
        line = {"client_id": query["client_id"], "level": "error", "message": "a forged line"}
        await socket.send("421" + json.dumps(["log", line]))
        await _read_until(socket, "431[]")
    for what in ("a forged line", "Task exception", "Exception in ASGI application"):
        assert _count(what, log) == 0


async def test_errors_that_strangers_cause_do_not_fill_the_log(
    client: httpx.Client, fake_address: str, log: Path
) -> None:
    """A list to choose from takes an object, so that this is an error for each event."""
    html = _page(client)
    elements = json.loads(html.split("String.raw`")[1].split("`")[0])
    (at,) = (at for at, one in elements.items() if one.get("props", {}).get("aria-label") == "Model")
    (listener,) = (one["listener_id"] for one in elements[at]["events"] if one["type"] == "update:modelValue")
    client_id = id_in(html)
    event = {"client_id": client_id, "id": int(at), "listener_id": listener, "args": ["5"]}
    async with opened(fake_address, **query_of(client_id)) as socket:
        for _ in range(50):
            await socket.send("42" + json.dumps(["event", event]))
        await socket.send('421["log",{}]')
        await _read_until(socket, "431[]")
    assert _count("\nTypeError", log) <= 1


def test_the_log_says_how_much_was_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    monkeypatch.setattr(nicegui_hardening.time, "monotonic", lambda: now)
    logger = logging.getLogger("tests.sparing")
    logger.addFilter(RateLimitFilter())
    for now in (100.0, 101.0, 159.0, 161.0, 162.0):
        logger.warning("at %d", now)
    assert caplog.messages == ["at 100", "at 161 (2 earlier records were suppressed)"]


async def test_a_prefetched_page_has_the_ids_of_its_query(fake_address: str, query: dict[str, str]) -> None:
    query["implicit_handshake"] = "false"
    async with opened(fake_address, **query) as socket:
        for other in ({"document_id": str(uuid4())}, {"tab_id": str(uuid4())}):
            await socket.send("421" + json.dumps(["handshake", query | other | {"next_message_id": 0}]))
            await _read_until(socket, "431[false]")
        await socket.send("421" + json.dumps(["handshake", query | {"next_message_id": 0}]))
        await _read_until(socket, "431[true]")


async def test_nothing_is_kept_of_those_who_have_gone(client: httpx.Client, fake_address: str) -> None:
    """However long the names are that they give themselves."""
    for number in range(5):
        query = query_of(visit(client))
        async with opened(fake_address, **query | {"implicit_handshake": "false"}) as socket:
            ids = {"client_id": query["client_id"], "document_id": query["document_id"], "next_message_id": 0}
            for tab_id in (str(number) + "x" * 900_000, query["tab_id"]):
                await socket.send("421" + json.dumps(["handshake", ids | {"tab_id": tab_id}]))
            await socket.send('422["log",{}]')
            await _read_until(socket, "432[]")
    await until(lambda: not any(client.get("/held").json().values()), fake_site.LIMIT_S)


async def test_each_ping_is_answered_once() -> None:
    async def receive() -> Any:
        return {"type": "websocket.receive", "text": "3"}

    async def send(message: Any) -> None: ...

    socket = Socket(asyncio.get_running_loop().create_future(), receive, send)
    for _ in range(2):
        await socket.send({"type": "websocket.send", "text": "2"})
        assert await socket.receive() == {"type": "websocket.receive", "text": "3"}
    assert (await socket.receive())["type"] == "websocket.disconnect"


async def test_a_browser_that_does_not_read_loses_its_websocket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nicegui_hardening, "_READ_S", 0.0)
    never = asyncio.Event()

    async def wait(message: Any = None) -> Any:
        await never.wait()

    socket = Socket(asyncio.get_running_loop().create_future(), wait, wait)
    reading = asyncio.create_task(socket.receive())
    with pytest.raises(TimeoutError):
        await socket.send({"type": "websocket.send", "text": "2"})
    assert await reading == {"type": "websocket.disconnect", "code": 1008}
    with pytest.raises(OSError, match="ended"):
        await socket.send({"type": "websocket.send", "text": "2"})


def _page(client: httpx.Client) -> str:
    return client.get("/page/").text


def _count(text: str, log: Path) -> int:
    return log.read_text().count(text)


async def _ask_too_much(socket: Any) -> None:
    await socket.send("4" + "x" * (4 << 20))
    await _read_on(socket)


async def _read_until(socket: Any, message: str) -> None:
    while await socket.recv() != message:
        pass


async def _read_on(socket: Any) -> None:
    while True:
        await socket.recv()
