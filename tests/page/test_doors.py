"""Attacks by strangers on the page, and handling of visitors who have left."""

import asyncio
import time

import httpx
import pytest
from nicegui import Client, core
from nicegui.page import page

from server.client.openai_answers import AnswerError, EventParser
from server.page.api import Api, ApiError, can_be_sent
from server.page.browser import Browser
from server.page.session import Session
from server.page.shell import KeyDialog


def test_what_is_not_there_takes_no_room(client: httpx.Client) -> None:
    for _ in range(300):
        answer = client.get("/page/none")
        assert (answer.status_code, answer.text) == (404, "Page not found.")
    assert client.get("/page/").status_code == 200


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
    start = time.process_time()
    for _ in range(16 << 10):
        assert list(parser.feed(b"x" * 1024)) == []
    assert time.process_time() - start < 5
    with pytest.raises(AnswerError, match="more than 16 MiB"):
        list(parser.feed(b"x"))


def test_pieces_of_lines_are_put_together() -> None:
    parser = EventParser()
    pieces = [b"da", b"ta: 1\n\nda", b"", b"ta: 2\ndata: 3", b"\n", b": no\ndata"]
    assert [payload for piece in pieces for payload in parser.feed(piece)] == [b"1", b"2", b"3"]
