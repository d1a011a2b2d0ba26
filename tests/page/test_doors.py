"""What strangers can do to the page, and what happens to those who have gone."""

import asyncio
import json
import re
import time
from pathlib import Path

import httpx
import pytest
import websockets.asyncio.client
from nicegui import Client, core
from nicegui.page import page
from websockets.exceptions import ConnectionClosed

from server.client.openai_answers import AnswerError, EventParser
from server.page.api import Api, ApiError
from server.page.browser import Browser
from server.page.key_dialog import KeyDialog
from server.page.narrowing import TextPacket
from server.page.session import Session, can_be_sent
from tests.page import fake_site

SOCKET = "/page/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
connect = websockets.asyncio.client.connect


def test_what_is_not_there_takes_no_room(client: httpx.Client) -> None:
    for _ in range(300):
        answer = client.get("/page/none")
        assert (answer.status_code, answer.text) == (404, "There is no such page.")
    assert client.get("/page/").status_code == 200


def test_there_is_no_polling(client: httpx.Client) -> None:
    answer = client.get("/page/_nicegui_ws/socket.io/?EIO=4&transport=polling")
    assert (answer.status_code, answer.text) == (400, '"Invalid transport"')


@pytest.mark.parametrize("announcing", ['5999999999-["event"]', '61-["event"]', '5["event"]'])
def test_attachments_are_not_taken(announcing: str) -> None:
    with pytest.raises(ValueError, match="attachments"):
        TextPacket(encoded_packet=announcing)


def test_what_is_said_in_text_is_taken() -> None:
    assert TextPacket(encoded_packet='2["event",{"a":1}]').data == ["event", {"a": 1}]


async def test_a_message_without_end_closes_the_websocket(fake_address: str) -> None:
    async with connect(fake_address.replace("http", "ws") + SOCKET) as socket:
        assert socket.protocol.extensions == []
        await socket.recv()
        with pytest.raises(ConnectionClosed, match="too big"):
            await _ask(socket, "4" + "x" * (4 << 20))


async def _ask(socket: websockets.asyncio.client.ClientConnection, message: str) -> None:
    await socket.send(message)
    await socket.recv()


def test_nobody_can_write_to_the_log(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        with fake_site.running(log) as address:
            asyncio.run(_say_to_log(address, "a forged line"))
        log.seek(0)
        assert "a forged line" not in log.read()


async def _say_to_log(address: str, line: str) -> None:
    async with httpx.AsyncClient(base_url=address, trust_env=False) as client:
        html = (await client.get("/page/")).text
    (client_id,) = set(re.findall(r"client_id\W+([0-9a-f-]{36})", html))
    async with connect(address.replace("http", "ws") + SOCKET) as socket:
        await socket.recv()
        await socket.send("40")
        await socket.recv()
        for message in ("attachments", "5999999999-[]", "not a packet"):
            await socket.send("4" + message)
        await socket.send("421" + json.dumps(["log", {"client_id": client_id, "level": "error", "message": line}]))
        assert await socket.recv() == "431[]"


@pytest.mark.parametrize(("key", "can"), [("sk-1 ~", True), ("", True), ("sk-ä", False), ("a\nb", False)])
def test_keys_that_a_header_can_have(key: str, can: bool) -> None:
    assert can_be_sent(key) is can


async def test_a_question_for_a_key_ends_with_its_tab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "loop", asyncio.get_running_loop())
    tab = Client(page(""), request=None)
    with tab:
        dialog = KeyDialog()
    questions = [asyncio.create_task(dialog.ask("why")) for _ in range(2)]
    await asyncio.sleep(0)
    tab.delete()
    async with asyncio.timeout(10):
        await asyncio.wait(questions)
    assert all(question.cancelled() for question in questions)


class NoBrowser(Browser):
    """Remembers nothing."""

    def __init__(self) -> None: ...

    def remember_key(self, key: str) -> None: ...


async def test_a_key_that_came_meanwhile_is_tried_before_another_is_asked_for() -> None:
    reasons: list[str] = []

    async def ask(reason: str) -> str:
        reasons.append(reason)
        return "first" if len(reasons) == 1 else "second"

    session = Session(Api("http://127.0.0.1:1/v1"), NoBrowser(), ask)
    late = asyncio.Event()

    async def call(key: str) -> str:
        if key == "":
            await late.wait()
        if key != "second":
            raise ApiError(f"not {key}", 401)
        return key

    waiting = asyncio.create_task(session.with_key(call))
    await asyncio.sleep(0)
    session.key = "second"
    late.set()
    assert await waiting == "second"
    assert reasons == []
    session.key = "wrong"
    assert await session.with_key(call) == "second"
    assert reasons == ["not wrong", "not first"]


def test_a_line_in_many_pieces_takes_time_in_proportion_and_has_an_end() -> None:
    parser = EventParser()
    start = time.perf_counter()
    for _ in range(16 << 10):
        assert list(parser.feed(b"x" * 1024)) == []
    assert time.perf_counter() - start < 5
    with pytest.raises(AnswerError, match="does not end"):
        list(parser.feed(b"x"))


def test_pieces_of_lines_are_put_together() -> None:
    parser = EventParser()
    pieces = [b"da", b"ta: 1\n\nda", b"", b"ta: 2\ndata: 3", b"\n", b": no\ndata"]
    assert [payload for piece in pieces for payload in parser.feed(piece)] == [b"1", b"2", b"3"]
