"""Images that are stored: once for each client, until their last use is deleted, and for answers after a restart."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from server.http.image_fetcher import ImageFetcher
from tests.server.batches.test_batches import Batches, written
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of
from tests.server.images.conftest import data_url, file_of, image_part, picture, text_part
from tests.server.images.test_image_files import uploaded
from tests.server.images.test_remote_images import HOST, PUBLIC, URL, Web, sends
from tests.server.responses.test_background import no_longer_waiting, running

LARGE = file_of(picture(150, 150))
RESPONSES = "/v1/responses"
MakeApp = Callable[..., FastAPI]


def asks(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    item = {"role": "user", "content": [{"type": "input_text", "text": "a"}, *parts]}
    return {"model": "tiny", "input": [item], "max_output_tokens": 16, **fields}


def shows(data: bytes = LARGE) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(data)}


async def answered(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    response = await client.post(RESPONSES, json=body)
    assert response.status_code == 200, response.text
    name: str = response.json()["id"]
    return name


async def stored(app: FastAPI) -> int:
    """Bytes of all that is stored."""
    num_bytes: int = await app.state.services.storage.run(lambda rows: rows.num_bytes())
    return num_bytes


async def test_stored_once(make_app: MakeApp, image_folder: Callable[..., Path], tmp_path: Path):
    """In ten responses, a conversation and after a restart; deleted with the last of them."""
    settings: dict[str, Any] = {"data_dir": tmp_path / "data", "max_stored_mib": 0.2}
    app = make_app(image_folder(), **settings)
    async with client_of(app) as client:
        conversation = (await client.post("/v1/conversations", json={})).json()["id"]
        names = [await answered(client, asks(shows())) for _ in range(10)]
        assert await stored(app) < 1.5 * len(LARGE)
        names.append(await answered(client, asks(shows(), shows(), conversation=conversation)))
        assert await stored(app) < 1.7 * len(LARGE)
    app.state.services.storage.close()

    app = make_app(image_folder(), **settings)
    async with client_of(app) as client:
        items = (await client.get(f"{RESPONSES}/{names[0]}/input_items")).json()["data"]
        assert items[0]["content"][1]["image_url"] == data_url(LARGE)
        for name in names:
            assert await stored(app) > len(LARGE)
            assert (await client.delete(f"{RESPONSES}/{name}")).status_code == 200
        assert await stored(app) > len(LARGE)
        found = (await client.get(f"/v1/conversations/{conversation}/items?order=asc")).json()["data"]
        assert [part["image_url"] for part in found[0]["content"][1:]] == [data_url(LARGE)] * 2
        assert (await client.delete(f"/v1/conversations/{conversation}")).status_code == 200
        assert await stored(app) == 0


async def test_background_after_a_restart(
    make_app: MakeApp, image_folder: Callable[..., Path], engine: FakeEngine, tmp_path: Path
):
    """The images are the same as in the request, even if a file was deleted and a URL has another image now."""

    def made(data: bytes) -> FastAPI:
        async def resolve(_: str) -> Sequence[str]:
            return [PUBLIC]

        app = make_app(image_folder(), data_dir=tmp_path / "data", image_hosts=(HOST,))
        served = app.state.services.models.default
        served.body_worker.fetcher = ImageFetcher(served.settings, resolve, Web(sends(data)))
        return app

    engine.first_delay_s = 60
    async with running(made(LARGE)) as client:
        file_id = await uploaded(client, data=file_of(picture(50, 60)))
        parts = ({"type": "input_image", "image_url": URL}, {"type": "input_image", "file_id": file_id}, shows())
        path = f"{RESPONSES}/{await answered(client, asks(*parts, background=True))}"
        await client.delete(f"/v1/files/{file_id}")
    engine.first_delay_s = 0
    async with running(made(file_of(picture(10, 10)))) as client:
        assert (await no_longer_waiting(client, path))["status"] == "incomplete"  # at its limit of tokens
    first, again = engine.requests
    assert (again.prompt, again.images) == (first.prompt, first.images)
    assert len({image.digest for image in again.images}) == 2


async def test_unfinished_responses_share_a_picture(
    make_app: MakeApp, image_folder: Callable[..., Path], engine: FakeEngine, tmp_path: Path
):
    """Half of the room is for unfinished responses: enough for many with one picture, but not for many pictures."""
    engine.first_delay_s = 60
    app = make_app(image_folder(), data_dir=tmp_path / "data", max_stored_mib=3 * len(LARGE) / (1 << 20))
    async with running(app) as client:
        for _ in range(3):
            await answered(client, asks(shows(), background=True))
        other = asks(shows(file_of(picture(150, 150, seed=1))), background=True)
        assert (await client.post(RESPONSES, json=other)).status_code == 429


async def test_lines_of_a_batch(
    make_app: MakeApp, image_folder: Callable[..., Path], engine: FakeEngine, tmp_path: Path
):
    """Each line has the prompt of the same request alone."""
    bodies = [
        chat(messages=[{"role": "user", "content": [text_part("a"), image_part(picture(seed=seed))]}])
        for seed in range(3)
    ]
    async with running(make_app(image_folder(), data_dir=tmp_path / "data")) as client:
        for body in bodies:
            assert (await client.post(CHAT, json=body)).status_code == 200
        batches = Batches(client)
        batch = await batches.create(written(bodies, CHAT), CHAT)
        ended = await batches.ended(batch["id"])
        assert ended["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    alone, lines = engine.requests[:3], engine.requests[3:]
    assert {(one.prompt, one.images) for one in lines} == {(one.prompt, one.images) for one in alone}
