"""Images in Anthropic's messages and in responses, also in results of tools, and in token counts."""

import base64
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fastapi import FastAPI

from model_runner.images.decoding import decode
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import serving
from tests.server.images.conftest import BOTH, LISTS, data_url, file_of, image_part, picture, text_part
from tests.server.responses.test_websocket import connect, made, refused, running

Client = Callable[..., httpx.AsyncClient]
PNG = file_of(picture())
CALLED = "{# tool #}" + LISTS.replace(
    "{% for part", "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% for part", 1
)
"""Shows calls, and images in their results."""


def block(data: bytes = PNG, kind: str = "image/png") -> dict[str, Any]:
    """An image in Anthropic's format."""
    source = {"type": "base64", "media_type": kind, "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def input_image(data: bytes = PNG, **fields: Any) -> dict[str, Any]:
    """An image in the format of responses."""
    return {"type": "input_image", "image_url": data_url(data), **fields}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    """A message of responses."""
    return {"role": "user", "content": list(parts)}


async def test_three_apis_make_one_prompt(image_client: Client, engine: FakeEngine):
    """The same texts and images, also in the result of a tool, have the same tokens in each API."""
    other = file_of(picture(50, 20, 7), "JPEG")
    chat_messages = [
        {"role": "user", "content": [text_part("Go"), image_part()]},
        {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [
            text_part("Here"), {"type": "image_url", "image_url": data_url(other)}]},
    ]  # fmt: skip
    messages = [
        {"role": "user", "content": [text_part("Go"), block()]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [text_part("Here"), block(other, "image/jpeg")]}]},
    ]  # fmt: skip
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Go"}, input_image(detail="high")]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_text", "text": "Here"}, input_image(other)]},
    ]  # fmt: skip
    async with image_client(template=CALLED) as client:
        for path, body in (
            ("/v1/chat/completions", {"messages": chat_messages, "max_tokens": 4}),
            ("/v1/messages", {"messages": messages, "max_tokens": 4}),
            ("/v1/responses", {"input": items, "max_output_tokens": 16}),
        ):
            response = await client.post(path, json={"model": "tiny", **body})
            assert response.status_code == 200, response.text
            assert "warnings" not in response.json()
        counts = [
            (await client.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": messages})).json(),
            (await client.post("/v1/responses/input_tokens", json={"model": "tiny", "input": items})).json(),
        ]
    first, *others = engine.requests
    assert len(first.images) == 2
    assert [decode(image.data).size for image in first.images] == [(40, 30), (50, 20)]
    assert all(other.prompt == first.prompt and other.images == first.images for other in others)
    assert [count["input_tokens"] for count in counts] == [len(first.prompt)] * 2


async def test_ollama_shows_images_before_the_text(image_client: Client, engine: FakeEngine):
    content = [image_part(), text_part("What is this?")]
    sent = {"role": "user", "content": "What is this?", "images": [base64.b64encode(PNG).decode()]}
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": content}]},
        "/api/chat": {"messages": [sent]},
        "/api/generate": {"prompt": sent["content"], "images": sent["images"]},
    }
    async with image_client() as client:
        for path, body in bodies.items():
            response = await client.post(path, json={"model": "tiny", "stream": False, **body})
            assert response.status_code == 200, response.text
        assert "vision" in (await client.get("/api/tags")).json()["models"][0]["capabilities"]
    first, *others = engine.requests
    assert len(first.images) == 1
    assert [(other.prompt, other.images) for other in others] == [(first.prompt, first.images)] * 2


async def test_stored_responses_keep_images(image_client: Client, engine: FakeEngine):
    async with image_client() as client:
        item = {"role": "user", "content": [{"type": "input_text", "text": "Go"}, input_image()]}
        first = (
            await client.post("/v1/responses", json={"model": "tiny", "input": [item], "max_output_tokens": 16})
        ).json()
        body = {"model": "tiny", "input": "And?", "max_output_tokens": 16, "previous_response_id": first["id"]}
        second = await client.post("/v1/responses", json=body)
        assert second.status_code == 200, second.text
        listed = (await client.get(f"/v1/responses/{first['id']}/input_items")).json()
    assert engine.requests[1].images[0].digest == engine.requests[0].images[0].digest
    assert listed["data"][0]["content"][1]["image_url"] == data_url(PNG)


async def test_over_a_websocket(make_app: Callable[..., FastAPI], image_folder: Callable[..., Any], engine: FakeEngine):
    """Prompts are the same as over HTTP. A turn that is not stored is remembered with its images, also large ones."""
    app = make_app(image_folder(template=CALLED))
    large = file_of(picture(300, 250, 3))  # read in the process for large bodies
    first = [user({"type": "input_text", "text": "Go"}, input_image(), input_image(large))]
    fields: dict[str, Any] = {"store": False, "max_output_tokens": 16}
    async with running(app) as (address, _), connect(address) as socket:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
            over_http = await client.post("/v1/responses", json={"model": "tiny", "input": first, **fields})
            response = await made(socket, input=first, **fields)
            assert response["usage"]["input_tokens"] == over_http.json()["usage"]["input_tokens"]
            called = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
            second = [called, {"type": "function_call_output", "call_id": "c", "output": [input_image(large)]}]
            history = [*first, *response["output"], *second]
            await client.post("/v1/responses", json={"model": "tiny", "input": history, **fields})
        await made(socket, input=second, previous_response_id=response["id"], **fields)
        error = await refused(socket, input=[user(input_image(PNG[:90]))])
        assert error["message"].endswith("Please make sure your image is valid.")
        assert error["param"] == "input[0].content[0]"
    assert len(engine.requests) == 4
    for one, other in (engine.requests[:2], engine.requests[2:]):
        assert (one.prompt, one.images) == (other.prompt, other.images)
    assert [len(request.images) for request in engine.requests] == [2, 2, 3, 3]


@pytest.mark.parametrize(
    ("source", "message", "param"),
    [
        ({"type": "url", "url": "https://example.com/a.png"}, "messages.0.content.1.image.source.url: This server",
         "messages[0].content[1].source.url"),
        ({"type": "base64", "media_type": "image/png", "data": "a*"},
         "messages.0.content.1.image.source.base64.data: The image is not valid base64.",
         "messages[0].content[1].source.data"),
        (block(b"hello")["source"], "messages.0.content.1.image.source: Could not process image.",
         "messages[0].content[1]"),
        (block(PNG + bytes(1 << 20))["source"],
         f"messages.0.content.1.image.source: image exceeds 1 MB maximum: {len(PNG) + (1 << 20)} bytes > 1048576 bytes",
         "messages[0].content[1]"),
        (block(kind="image/bmp")["source"],
         "Supported values are: 'image/jpeg', 'image/png', 'image/gif' or 'image/webp'.",
         "messages[0].content[1].source.media_type"),
    ],
)  # fmt: skip
async def test_errors_of_messages(image_client: Client, source: dict[str, Any], message: str, param: str):
    content = [text_part("x"), {"type": "image", "source": source}]
    async with image_client(max_image_mib=1) as client:
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        response = await client.post("/v1/messages", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert ": messages" not in error["message"]
    assert error["details"]["param"] == param


async def test_errors_of_responses(image_client: Client, client: httpx.AsyncClient):
    def body(part: dict[str, Any]) -> dict[str, Any]:
        return {"model": "tiny", "input": [{"role": "user", "content": [part]}]}

    async with image_client() as images:
        missing = await images.post("/v1/responses", json=body({"type": "input_image"}))
        broken = await images.post("/v1/responses", json=body(input_image(PNG[:90])))
    assert missing.json()["error"]["param"] == "input[0].content[0].image_url"
    assert broken.json()["error"]["message"].endswith("Please make sure your image is valid.")
    refused = (await client.post("/v1/responses", json=body(input_image()))).json()["error"]
    assert refused["message"] == "Invalid content type. input_image is only supported by certain models."
    assert refused["param"] == "input[0].content[0].type"


async def test_images_that_must_not_be_scaled(image_client: Client):
    async with image_client() as client:
        for value, status in (("downsize", 200), ("error", 400)):
            content = [{**block(), "transformations": {"oversized_image": value}}]
            body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
            assert (await client.post("/v1/messages", json=body)).status_code == status


def test_official_clients(make_app: Callable[..., FastAPI], image_folder: Callable[..., Any], engine: FakeEngine):
    """OpenAI's and Anthropic's clients send images unchanged, streamed and whole."""
    with serving(make_app(image_folder("idefics3", BOTH))) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="x") as client:
            messages: Any = [{"role": "user", "content": [text_part("a"), image_part(detail="auto")]}]
            whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, seed=1)
            stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, seed=1, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            assert text == whole.choices[0].message.content
            items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "a"}, input_image()]}]
            client.responses.create(model="tiny", input=items)
        with anthropic.Anthropic(base_url=address, api_key="x") as claude:
            turn: Any = {"role": "user", "content": [text_part("a"), block()]}
            claude.messages.create(model="tiny", max_tokens=4, messages=[turn])
    assert len({request.prompt for request in engine.requests}) == 1
    assert len({request.images for request in engine.requests}) == 1
