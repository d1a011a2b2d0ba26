"""Every route hands bodies to the body worker: none is parsed where everybody waits for it."""

from collections.abc import Callable
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.routing import Route

from server.api import body_worker
from server.api.dialect import Dialect
from server.api.dialects import DIALECTS
from server.api.ollama.routes import CHANGES
from server.http import json_body
from server.http.json_body import validated
from tests.server.helpers import client_of

LARGE = b'{"model": "' + b"x" * body_worker.LARGE_BYTES + b'"}'
WITHOUT_JSON = {"/v1/files", "/ping", *CHANGES}
"""Routes whose bodies are forms, or are not read."""


@pytest.fixture
def parsed_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the bodies that this process parses."""
    sizes: list[int] = []
    parse = json_body.parse_json

    def note(body: bytes) -> Any:
        sizes.append(len(body))
        return parse(body)

    monkeypatch.setattr(json_body, "parse_json", note)
    return sizes


def with_bodies(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path of all routes that may have a body."""
    all_routes = (route for dialect in app.state.dialects for route in dialect.router.routes)
    routes = [route for route in all_routes if isinstance(route, Route) and route.path not in WITHOUT_JSON]
    return [(method, route.path) for route in routes for method in sorted(route.methods & {"POST", "PUT", "PATCH"})]


async def test_no_route_parses_a_large_body_in_the_server(
    make_app: Callable[..., FastAPI], parsed_here: list[int], tmp_path: Any
):
    app = make_app(data_dir=tmp_path)
    routes = with_bodies(app)
    assert len(routes) > 15
    statuses: dict[str, int] = {}
    async with client_of(app) as client:
        for method, path in routes:
            response = await client.request(
                method,
                path.replace("{", "").replace("}", ""),
                content=LARGE,
                headers={"content-type": "application/json"},
            )
            statuses[path] = response.status_code
    assert not parsed_here
    assert set(statuses.values()) <= {400, 404}, statuses
    assert statuses["/v1/batches"] == statuses["/v1/conversations/{conversation_id}"] == 400


async def test_a_route_that_does_would_be_found(make_app: Callable[..., FastAPI], parsed_here: list[int]):
    """The negative control."""
    router = APIRouter()

    @router.post("/v1/careless")
    async def careless(request: Request) -> Response:
        validated(next(iter(DIALECTS[0].requests.values())), await request.body())
        return Response()

    app = make_app(dialects=(*DIALECTS, Dialect(router)))
    assert ("POST", "/v1/careless") in with_bodies(app)
    async with client_of(app) as client:
        await client.post("/v1/careless", content=LARGE, headers={"content-type": "application/json"})
    assert parsed_here == [len(LARGE)]
