"""No key finds, lists, reads or deletes another's files: to it there is none of that id."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from tests.server.files.calling import FILES, LINES, listed, sent, uploaded
from tests.server.helpers import client_of, error_of
from tests.server.tenants.keys import of_tenant, write_keys


@pytest.fixture
def app(make_app: Callable[..., FastAPI], tmp_path: Path) -> FastAPI:
    return make_app(data_dir=tmp_path / "data", api_keys_file=write_keys(tmp_path / "keys", ann={}, bob={}))


ROUTES = [("GET", ""), ("GET", "/content"), ("HEAD", ""), ("HEAD", "/content"), ("DELETE", "")]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_file_of_another_key_is_as_one_that_is_none(app: FastAPI, method: str, path: str) -> None:
    async with of_tenant(app, "ann") as ann, of_tenant(app, "bob") as bob:
        made = await uploaded(ann)
        of_ann = await bob.request(method, f"{FILES}/{made['id']}{path}")
        of_nobody = await bob.request(method, f"{FILES}/file-{'0' * 32}{path}")
        assert of_ann.status_code == of_nobody.status_code == 404
        if method != "HEAD":
            assert of_ann.json() == {
                "error": error_of(of_nobody, 404) | {"message": f"No such File object: {made['id']}"}
            }
        assert (await ann.get(f"{FILES}/{made['id']}/content")).content == LINES
        assert (await ann.request(method, f"{FILES}/{made['id']}{path}")).status_code == 200


async def test_each_key_lists_its_own(app: FastAPI) -> None:
    async with of_tenant(app, "ann") as ann, of_tenant(app, "bob") as bob:
        made = {client: [(await uploaded(client))["id"] for _ in range(2)] for client in (ann, bob, ann)}
        for client in (ann, bob):
            assert (await listed(client, order="asc"))[-2:] == made[client]
        assert await listed(bob, order="asc") == made[bob]
        error = error_of(await bob.get(FILES, params={"after": made[ann][0]}))
        assert error["param"] == "after"


async def test_nobody_without_a_key(app: FastAPI) -> None:
    async with client_of(app) as client:
        answers = [await sent(client), await client.get(FILES)]
        answers += [await client.request(method, f"{FILES}/file-0{path}") for method, path in ROUTES]
    assert {answer.status_code for answer in answers} == {401}


async def test_head_tells_what_get_would(client: httpx.AsyncClient, app: FastAPI) -> None:
    client.headers["authorization"] = "Bearer ann-key"
    made = await uploaded(client)
    answer = await client.head(f"{FILES}/{made['id']}/content")
    assert (answer.content, answer.headers["content-length"]) == (b"", str(len(LINES)))
