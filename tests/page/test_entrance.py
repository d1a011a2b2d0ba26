"""Access to the page of a server with keys: nothing of the page runs without a key."""

from collections.abc import Iterator
from http.cookies import SimpleCookie

import httpx
import pytest
from starlette.responses import PlainTextResponse

from server.page import entrance
from server.page.entrance import Entrance
from tests.page import fake_site
from tests.page.fake_site import SENT_BACK, client_of, connect, opened, query_of, socket_url, visit

KEY = "a-key-that-nobody-guesses"
NOWHERE = "http://127.0.0.1:1/v1"


@pytest.fixture(scope="module")
def locked_address() -> Iterator[str]:
    """A site whose API wants the key."""
    with fake_site.running(key=KEY) as address:
        yield address


async def test_nothing_runs_without_a_key(locked_address: str) -> None:
    with client_of(locked_address) as client:
        html = client.get("/page/").text
        assert "Incorrect API key provided." in html
        assert "client_id" not in html
        for path in ("/page/static/page.js", "/page/_nicegui_ws/socket.io/?EIO=4&transport=polling", "/page/key"):
            assert client.get(path).status_code == 404
        async with connect(socket_url(locked_address, **query_of("0" * 36))) as socket:
            await socket.recv()
            assert await socket.recv() == SENT_BACK
        for key in ("wrong", "ä"):
            refused = client.post("/page/key", headers={"authorization": f"Bearer {key}".encode("latin-1")})
            assert refused.json() == {"message": "Incorrect API key provided."}
            assert not refused.cookies
        assert client.get("/loaded").json() is False

        answer = client.post("/page/key", headers={"authorization": f"Bearer {KEY}"})
        assert answer.status_code == 204
        (cookie,) = SimpleCookie(answer.headers["set-cookie"]).values()
        assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "strict", "")
        client_id = visit(client)
        async with opened(locked_address, **query_of(client_id)):
            pass


async def _get(tried: Entrance, cookie: str = "") -> str:
    headers = {"cookie": cookie.encode("latin-1")} if cookie else {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(tried), base_url="http://x") as visitor:
        return (await visitor.get("/page/", headers=headers)).text


async def test_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end, and nobody can write one."""
    now = 1e9
    monkeypatch.setattr(entrance.time, "time", lambda: now)
    tried, other = (Entrance(NOWHERE, PlainTextResponse("the page")) for _ in range(2))
    ticket = tried._ticket(str(int(now) + 60))
    assert await _get(tried, f"samewise_page={ticket}") == "the page"
    later = ticket.replace("1000000060", "1000000061")
    for wrong in (later, other._ticket(str(int(now) + 60)), "1000000060.", "1000000060", ".", "9" * 5000 + ".x", "²."):
        assert await _get(tried, f"samewise_page={wrong}") != "the page"
    now += 60
    assert await _get(tried, f"samewise_page={ticket}") != "the page"


async def test_a_server_that_cannot_be_asked_may_want_a_key() -> None:
    tried = Entrance(NOWHERE, PlainTextResponse("the page"))
    assert "No server answers at http://127.0.0.1:1." in await _get(tried)
