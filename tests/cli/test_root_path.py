"""A server behind a proxy that strips a path: the links of its documentation and of its page begin with it."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from starlette.requests import Request
from starlette.responses import JSONResponse

from server.assembly import ModelOnEngine, find_checkpoints, make_app
from server.config import Settings
from server.http.root_path import RootPathMiddleware
from server.page.gate import PageGate
from tests.cli.test_upgrades import Application
from tests.server.fake_engine import FakeEngine
from tests.server.tiny_model import write_folder


@pytest.fixture
def serve(tmp_path: Path) -> Callable[[str], httpx.AsyncClient]:
    """A client of the application with this setting."""

    def make(root_path: str) -> httpx.AsyncClient:
        settings = Settings(model=str(write_folder(tmp_path / "tiny")), root_path=root_path)
        app = make_app(
            [ModelOnEngine(FakeEngine(), settings, find_checkpoints(settings, Console(quiet=True)))], settings
        )
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")

    return make


@pytest.mark.parametrize("root_path", ["/llm", "/docs", "/v1"])
async def test_the_documentation_links_below_it(serve: Callable[[str], httpx.AsyncClient], root_path: str) -> None:
    async with serve(root_path) as client:
        assert f"url: '{root_path}/openapi.json'" in (await client.get("/docs")).text
        document = (await client.get("/openapi.json")).json()
        assert document["servers"] == [{"url": root_path}]
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/models")).status_code == 200


async def test_without_it_nothing_changes(serve: Callable[[str], httpx.AsyncClient]) -> None:
    async with serve("") as client:
        assert "url: '/openapi.json'" in (await client.get("/docs")).text
        assert "servers" not in (await client.get("/openapi.json")).json()


@pytest.mark.parametrize(("root_path", "location"), [("", "page/"), ("/llm", "/llm/page/")])
async def test_the_root_leads_to_the_page(root_path: str, location: str) -> None:
    gate = PageGate(Application(), "http://127.0.0.1:1/v1", root_path)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://x") as client:
        assert (await client.get("/", headers={"accept": "text/html"})).headers["location"] == location


async def test_the_page_gets_it_in_the_header_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = PageGate(Application(), "http://127.0.0.1:1/v1", "/llm")

    async def show(scope: dict, receive: object, send: object) -> None:  # type: ignore[type-arg]
        prefixes = Request(scope).headers.getlist("x-forwarded-prefix")
        await JSONResponse(prefixes)(scope, receive, send)  # type: ignore[arg-type]

    monkeypatch.setattr(gate, "_to_page", show)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://x") as client:
        assert (await client.get("/page/", headers={"x-forwarded-prefix": "/evil"})).json() == ["/llm"]


async def test_websockets_and_other_paths_pass_unchanged() -> None:
    middleware = RootPathMiddleware(Application(), "/llm")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://x") as client:
        assert (await client.get("/v1/models")).text == "served"
