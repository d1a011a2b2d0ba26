"""CORS for browsers, and HEAD for monitors."""

from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from fastapi import FastAPI

from server.http.origins import EXPOSED_HEADERS, Origins
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of, error_of

PAGE = "https://chat.example.com"
ASKED = "authorization,content-type,x-stainless-lang,x-api-key,anthropic-version"
KEY = {"authorization": "Bearer main-key"}


def preflight(origin: str = PAGE, method: str = "POST") -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": ASKED,
    }


@pytest.fixture
async def for_pages(make_app: Callable[..., FastAPI]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with a key, for pages of one origin."""
    async with client_of(make_app(api_key="main-key", cors_origins=[PAGE])) as client:
        yield client


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "DELETE"])
async def test_a_preflight_needs_no_key(for_pages: httpx.AsyncClient, method: str):
    answer = await for_pages.options(CHAT, headers=preflight(method=method))
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert method in answer.headers["access-control-allow-methods"].split(", ")
    assert answer.headers["access-control-allow-headers"] == ASKED


async def test_a_page_of_another_origin_is_not_let_in(for_pages: httpx.AsyncClient):
    other = "https://evil.example.com"
    assert (await for_pages.options(CHAT, headers=preflight(other))).status_code == 400
    answer = await for_pages.get("/v1/models", headers={**KEY, "origin": other})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (chat(), KEY, 200),
        (chat(stream=True), KEY, 200),
        (chat(), {}, 401),
        (chat(temperature=9), KEY, 400),
        (chat(model="other"), KEY, 404),
        (chat(seed=1), KEY, 500),
    ],
)
async def test_answers_and_errors_can_be_read_by_the_page(
    for_pages: httpx.AsyncClient, engine: FakeEngine, body: dict, headers: dict, status: int
):
    if status == 500:
        engine.refuse = ZeroDivisionError("a bug")
    answer = await for_pages.post(CHAT, json=body, headers={**headers, "origin": PAGE})
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-expose-headers"] == ", ".join(EXPOSED_HEADERS)
    assert answer.headers["x-request-id"]


async def test_an_error_that_no_route_answered_can_be_read_by_the_page(
    for_pages: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("server.telemetry.metrics.Metrics.collect", lambda self: 1 / 0)
    answer = await for_pages.get("/metrics", headers={**KEY, "origin": PAGE})
    error_of(answer, 500, "server_error")
    assert answer.headers["access-control-allow-origin"] == PAGE


async def test_all_origins(make_app: Callable[..., FastAPI]):
    async with client_of(make_app(cors_origins=["*"])) as client:
        for answer in (
            await client.options(CHAT, headers=preflight()),
            await client.get("/version", headers={"origin": PAGE}),
        ):
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in answer.headers


OF_THIS_MACHINE = (
    "http://localhost",
    "http://localhost:3000",
    "https://127.0.0.1:8443",
    "http://[::1]",
    "http://[::1]:1",
)
OF_OTHERS = (
    *(PAGE, "http://notlocalhost", "http://localhost.evil.com", "http://evil.com:80", "http://localhost:80.evil.com"),
    *("http://127.0.0.1.evil.com", "http://127.0.0.10", "http://127x0.0.1", "http://user@localhost", "ftp://localhost"),
    *("null", "localhost", "http://localhost/", "http://localhost:", "http://localhost\n", "http://192.168.0.7"),
)


async def may_read(client: httpx.AsyncClient, origin: str) -> bool:
    """Whether a browser lets a page of this origin read answers; it asks first, and looks at the answer again."""
    asked = await client.options(CHAT, headers=preflight(origin))
    answer = await client.get("/version", headers={"origin": origin})
    allowed = {one.headers.get("access-control-allow-origin") for one in (asked, answer)}
    assert allowed in ({origin}, {None})
    return allowed == {origin}


@pytest.mark.parametrize("settings", [{}, {"api_key": "main-key", "cors_origins": "localhost"}])
async def test_pages_on_localhost_may_use_a_server(make_app: Callable[..., FastAPI], settings: dict):
    """Allowed by default without keys; with keys, only by a setting."""
    async with client_of(make_app(**settings)) as client:
        assert all([await may_read(client, origin) for origin in OF_THIS_MACHINE])
        assert not any([await may_read(client, origin) for origin in OF_OTHERS])


def test_websockets_are_for_the_same_pages():
    origins = Origins.of((), has_keys=False)
    assert all(origin in origins for origin in OF_THIS_MACHINE)
    assert not any(origin in origins for origin in OF_OTHERS)


@pytest.mark.parametrize(
    "settings",
    [{"cors_origins": "none"}, {"cors_origins": PAGE}, {"api_key": "main-key"}],
    ids=["off", "others", "key"],
)
async def test_they_may_not_where_that_is_off(make_app: Callable[..., FastAPI], settings: dict):
    async with client_of(make_app(**settings)) as client:
        assert not any([await may_read(client, origin) for origin in OF_THIS_MACHINE])


async def test_localhost_is_one_origin_among_others(make_app: Callable[..., FastAPI]):
    async with client_of(make_app(api_key="main-key", cors_origins=["localhost", PAGE])) as client:
        assert await may_read(client, PAGE)
        assert await may_read(client, OF_THIS_MACHINE[0])


async def test_short_paths_have_preflights_as_well(client: httpx.AsyncClient):
    asked = await client.options("/chat/completions", headers=preflight(OF_THIS_MACHINE[1]))
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, OF_THIS_MACHINE[1])


async def test_no_origin_leaves_no_trace(make_app: Callable[..., FastAPI]):
    async with client_of(make_app(cors_origins="none")) as client:
        error_of(await client.options(CHAT, headers=preflight()), 405)
        answer = await client.get("/version", headers={"origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/v1/models", "/v1/models/tiny"])
async def test_head_is_get_without_the_body(client: httpx.AsyncClient, path: str):
    got, head = await client.get(path), await client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert list(head.headers) == list(got.headers)


async def test_head_is_refused_as_get_would_be(make_app: Callable[..., FastAPI]):
    async with client_of(make_app(api_key="main-key")) as client:
        for path, headers, status in (
            ("/v1/models", {}, 401),
            ("/nowhere", KEY, 404),
            (CHAT, KEY, 405),
            ("/v1/models", KEY, 200),
        ):
            answer = await client.head(path, headers=headers)
            assert (answer.status_code, answer.content) == (status, b"")


async def test_head_is_logged_and_counted_as_what_it_is(client: httpx.AsyncClient):
    await client.head("/v1/models")
    line = 'samewise:http_requests_total{handler="/v1/models",method="HEAD",status="200"} 1.0'
    assert line in (await client.get("/metrics")).text.splitlines()


def test_a_connection_goes_on_after_head(address: str):
    with httpx.Client(base_url=address, trust_env=False) as client:
        for _ in range(2):
            assert client.head("/v1/models").status_code == 200
            assert client.get("/v1/models").json()["object"] == "list"


async def test_the_document_says_nothing_of_head(client: httpx.AsyncClient):
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert not [path for path, operations in paths.items() if "head" in operations]
