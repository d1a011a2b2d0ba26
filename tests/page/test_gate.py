"""The gate in front of the API: paths, headers, websockets, and no cost before the first visit."""

import asyncio
import re
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from websockets.exceptions import InvalidStatus

from server.page.gate import MAX_WEBSOCKETS, PageGate
from tests.page import fake_site
from tests.page.fake_site import client_of, connect
from tests.waiting import until

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
WEBSOCKET = {"type": "websocket", "path": "/page/_nicegui_ws/socket.io/"}


def test_nothing_is_loaded_before_the_first_visit() -> None:
    with fake_site.running() as address, client_of(address) as client:
        assert client.get("/loaded").json() is False
        assert client.get("/v1/models").status_code == 200
        assert client.get("/", headers=BROWSER).status_code == 307
        assert client.get("/loaded").json() is False
        assert client.get("/page/").status_code == 200
        assert client.get("/loaded").json() is True


@pytest.mark.parametrize("path", ["/", "/page"])
def test_its_addresses_lead_to_it_relatively(client: httpx.Client, path: str) -> None:
    answer = client.get(path, headers=BROWSER)
    assert (answer.status_code, answer.headers["location"]) == (307, "page/")
    assert client.post(path).status_code in (404, 405)  # the API's


def test_programs_that_look_for_a_server_get_the_answer_of_the_api(client: httpx.Client) -> None:
    for method in ("GET", "HEAD"):
        assert client.request(method, "/").status_code == 404, "the fake API has no such path"
    assert client.head("/", headers=BROWSER).status_code == 307


def test_scripts_run_by_a_nonce_that_is_new_each_time(client: httpx.Client) -> None:
    nonces = set()
    for _ in range(2):
        page = client.get("/page/", headers={"accept-encoding": "gzip"})
        policy = page.headers["content-security-policy"]
        (nonce,) = re.findall(r"'nonce-([\w-]{20,})'", policy)
        nonces.add(nonce)
        scripts = re.findall(r"<script[^>]*>", page.text)
        assert scripts
        assert all(f'nonce="{nonce}"' in script for script in scripts)
        assert "unsafe-inline" not in re.search(r"script-src[^;]*", policy)[0]  # type: ignore[index]
        assert int(page.headers["content-length"]) == len(page.content)
    assert len(nonces) == 2


def test_all_that_the_page_loads_is_its_own_and_has_the_policy(client: httpx.Client) -> None:
    page = client.get("/page/").text
    paths = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(paths) > 5
    for path in paths:
        answer = client.get(httpx.URL("/page/").join(path))
        assert answer.status_code == 200, path
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"(?:src|href)=\"?(https?:)?//", page)
    assert client.get("/page/none").status_code == 404


async def test_answers_of_the_api_pass_untouched() -> None:
    async def answer(request: Request) -> Response:
        return JSONResponse({"path": request.url.path}, headers={"x-of-the-api": "yes"})

    api = Starlette(routes=[Route("/v1/models", answer), Route("/pages", answer)])
    gate = PageGate(api, "http://127.0.0.1:1/v1")
    for path in ("/v1/models", "/pages", "/none"):
        plain, gated = [
            await httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x").get(path)
            for app in (api, gate)
        ]
        assert (plain.status_code, plain.content, plain.headers) == (gated.status_code, gated.content, gated.headers)


async def test_other_paths_have_no_websockets(fake_address: str) -> None:
    with pytest.raises(InvalidStatus) as elsewhere:
        await connect(f"{fake_address.replace('http', 'ws')}/v1/models")
    assert elsewhere.value.response.status_code == 200  # as if nobody had asked for one


class HeldPage:
    """In the place of the page: holds websockets until told otherwise."""

    def __init__(self) -> None:
        self.num_open = 0
        self.end = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_open += 1
        await self.end.wait()
        self.num_open -= 1


async def test_websockets_are_limited() -> None:
    page = HeldPage()
    gate = PageGate(Starlette(), "http://127.0.0.1:1/v1")
    gate._page = page  # type: ignore[assignment]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    held = [asyncio.create_task(gate(WEBSOCKET, receive, send)) for _ in range(MAX_WEBSOCKETS)]
    await until(lambda: page.num_open == MAX_WEBSOCKETS)
    await gate(WEBSOCKET, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1013, "reason": "too many pages are open"}]
    page.end.set()
    await asyncio.gather(*held)
    await gate(WEBSOCKET, receive, send)
    assert len(sent) == 1  # there is room again
