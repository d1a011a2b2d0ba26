"""Uploaded images: purposes, use by id in every API that has it, and what other keys see."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of
from tests.server.images.conftest import file_of, image_part, picture, text_part
from tests.server.images.test_other_apis import input_image

PNG = file_of(picture())


async def uploaded(client: httpx.AsyncClient, purpose: str = "vision", data: bytes = PNG, **headers: str) -> str:
    """The id of a new file."""
    response = await client.post(
        "/v1/files", data={"purpose": purpose}, files={"file": ("a.png", data)}, headers=headers
    )
    assert response.status_code == 200, response.text
    assert response.json()["purpose"] == purpose
    name: str = response.json()["id"]
    return name


def of_responses(file_id: str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "input_text", "text": "a"}, {"type": "input_image", "file_id": file_id}]
    return {"model": "tiny", "input": [{"role": "user", "content": content}], "max_output_tokens": 16, **fields}


def of_messages(file_id: str) -> dict[str, Any]:
    content = [text_part("a"), {"type": "image", "source": {"type": "file", "file_id": file_id}}]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4}


@pytest.mark.parametrize("purpose", ["vision", "user_data"])
async def test_same_prompt_as_sent(
    make_app: Callable[..., FastAPI],
    image_folder: Callable[..., Path],
    engine: FakeEngine,
    tmp_path: Path,
    purpose: str,
):
    async with client_of(make_app(image_folder(), data_dir=tmp_path / "data")) as client:
        file_id = await uploaded(client, purpose)
        first = await client.post("/v1/responses", json=of_responses(file_id))
        assert first.status_code == 200, first.text
        assert (await client.post("/v1/messages", json=of_messages(file_id))).status_code == 200
        count = await client.post("/v1/messages/count_tokens", json=of_messages(file_id))
        sent = [text_part("a"), image_part()]
        assert (await client.post(CHAT, json=chat(messages=[{"role": "user", "content": sent}]))).status_code == 200
        both = {"model": "tiny", "input": [{"role": "user", "content": [{**input_image(), "file_id": file_id}]}]}
        assert (await client.post("/v1/responses", json=both)).json()["error"][
            "code"
        ] == "invalid_parameter_combination"

        follow = {"model": "tiny", "input": "b", "previous_response_id": first.json()["id"], "max_output_tokens": 16}
        assert (await client.post("/v1/responses", json=follow)).status_code == 200
        await client.delete(f"/v1/files/{file_id}")
        gone = (await client.post("/v1/responses", json=follow)).json()["error"]
        assert (gone["message"], gone["code"]) == (f"No such File object: {file_id}", "not_found")
    first_request, *others = engine.requests
    assert all(one.images[0].data == PNG for one in engine.requests)
    assert all(one.prompt == first_request.prompt for one in others[:2])
    assert count.json()["input_tokens"] == len(first_request.prompt)


async def test_other_keys_and_sizes(
    make_with_keys: Callable[..., FastAPI], image_folder: Callable[..., Path], tmp_path: Path
):
    app = make_with_keys(
        {"a": {}, "b": {}}, model_folder=image_folder(), data_dir=tmp_path / "data", max_image_mib=0.01
    )
    keys = {name: {"authorization": f"Bearer {name}-key"} for name in "ab"}
    async with client_of(app) as client:
        file_id = await uploaded(client, **keys["a"])
        large = await uploaded(client, data=PNG + bytes(20_000), **keys["a"])
        assert (await client.post("/v1/responses", json=of_responses(file_id), headers=keys["a"])).status_code == 200
        other = (await client.post("/v1/responses", json=of_responses(file_id), headers=keys["b"])).json()["error"]
        assert (other["code"], other["param"]) == ("not_found", "input[0].content[1]")
        refused = (await client.post("/v1/responses", json=of_responses(large), headers=keys["a"])).json()["error"]
        assert refused["code"] == "image_too_large"


async def test_capabilities(
    make_app: Callable[..., FastAPI], image_folder: Callable[..., Path], client: httpx.AsyncClient
):
    assert (await client.get("/v1/capabilities")).json()["images"] is None
    assert (await client.get("/props")).json()["modalities"]["vision"] is False
    async with client_of(make_app(image_folder(), max_images=7, image_hosts=("a.example",))) as images:
        found = (await images.get("/v1/capabilities")).json()["images"]
        assert (await images.get("/v1/models")).json()["data"][0]["input_modalities"] == ["text", "image"]
        assert (await images.get("/props")).json()["modalities"]["vision"] is True
    assert found == {
        "formats": ["png", "jpeg", "gif", "webp"],
        "max_images": 7,
        "max_bytes": 20 << 20,
        "max_pixels": 50_000_000,
        "max_aspect": 200,
        "low_detail": False,
        "url_hosts": ["a.example"],
    }
