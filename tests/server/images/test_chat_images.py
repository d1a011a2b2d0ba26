"""Images in chat completions: the prompts, the errors, and the usage."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from PIL import Image

from model_runner.image import ImageRun
from model_runner.images.decoding import decode
from scheduler.interface import EngineRequest
from server.generation.image_room import ImageRoom
from tests.image_processors import processor_of, tokenizer_of
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of, error_of
from tests.server.images.conftest import (
    BOTH,
    FIRST,
    LISTS,
    PLACEHOLDERS,
    STRINGS,
    data_url,
    file_of,
    image_part,
    picture,
    text_part,
)

Client = Callable[..., httpx.AsyncClient]
IMAGE = 300


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def truth(folder: Path, family: str, template: str, messages: list[dict[str, Any]], images: list[Image.Image]) -> Any:
    """The ids that transformers makes of the same messages."""
    place = {"type": "image"}
    of_template = [
        {**message, "content": [place if part["type"] == "image_url" else part for part in message["content"]]}
        for message in messages
    ]
    text = tokenizer_of(family, "<|start|>", "<|end|>").apply_chat_template(
        of_template,
        chat_template=template.replace("PLACE", PLACEHOLDERS[family]),
        tokenize=False,
        add_generation_prompt=True,
    )
    return processor_of(folder, family)(images=[images], text=[text])["input_ids"][0]


async def asked(client: httpx.AsyncClient, engine: FakeEngine, *messages: Any, **fields: Any) -> EngineRequest:
    """The engine's request for these messages."""
    response = await client.post(CHAT, json=chat(messages=list(messages), **fields))
    assert response.status_code == 200, response.text
    return engine.requests[-1]


def check_runs(request: EngineRequest) -> None:
    """Every image's rows are in order at places of the image token, and images follow each other."""
    places: list[int] = []
    for image in request.images:
        rows = [row for run in image.runs for row in range(run.row, run.row + run.length)]
        assert rows == list(range(image.num_rows))
        places += [place for run in image.runs for place in range(run.place, run.place + run.length)]
        assert len(image.digest) == 32
    assert places == sorted(set(places))
    assert all(request.prompt[place] == IMAGE for place in places)


@pytest.mark.parametrize("family", ["llava", "idefics3", "minicpmv4_6", "qwen2_vl"])
@pytest.mark.parametrize("template", [LISTS, BOTH, FIRST])
async def test_same_prompt_as_transformers(
    image_client: Client, image_folder: Callable[..., Path], engine: FakeEngine, family: str, template: str
):
    images = [picture(40, 30, 1), picture(150, 90, 2), picture(9, 12, 3)]
    messages = [
        {"role": "system", "content": [text_part("Be kind.")]},
        user(text_part("Look: "), image_part(images[0]), text_part(" and "), image_part(images[1])),
        {"role": "assistant", "content": [text_part("Seen.")]},
        user(image_part(images[2]), text_part("And this?")),
    ]
    async with image_client(family, template) as client:
        request = await asked(client, engine, *messages)
        assert list(request.prompt) == list(truth(image_folder(family, template), family, template, messages, images))
        check_runs(request)
        assert [decode(image.data).tobytes() for image in request.images] == [one.tobytes() for one in images]
        assert len({image.digest for image in request.images}) == 3
        response = await client.post(CHAT, json=chat(messages=messages))
    details = response.json()["usage"]["prompt_tokens_details"]
    assert details["image_tokens"] == sum(image.num_rows for image in request.images) > 0
    assert details["text_tokens"] + details["image_tokens"] == response.json()["usage"]["prompt_tokens"]


async def test_alone_or_among_others(image_client: Client, image_folder: Callable[..., Path], engine: FakeEngine):
    """LLaVA-OneVision shows one image in tiles, and several without; then they have other features."""
    family, image = "llava_onevision", picture(90, 40)
    alone, among = [user(image_part(image))], [user(image_part(image)), user(image_part(picture(9, 12)))]
    async with image_client(family, LISTS) as client:
        requests = [await asked(client, engine, *messages) for messages in (alone, among)]
    folder = image_folder(family, LISTS)
    for request, messages, images in zip(requests, (alone, among), ([image], [image, picture(9, 12)]), strict=True):
        assert list(request.prompt) == list(truth(folder, family, LISTS, messages, images))
        check_runs(request)
    first, other = (request.images[0] for request in requests)
    assert (first.num_rows > other.num_rows, first.digest != other.digest) == (True, True)


async def test_several_forms_of_one_image(image_client: Client, engine: FakeEngine):
    """The declared type does not matter, line breaks are allowed, and equal pixels have one digest."""
    data, image = file_of(picture()), image_part()
    url = data_url(data)
    head, body = url.split(",")
    forms = [
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": f"DATA:image/jpeg;x=y;BASE64,{body}"}},
        {"type": "image_url", "image_url": {"url": head + "," + body[:60] + "\r\n" + body[60:], "detail": "high"}},
        {"type": "image_url", "image_url": {"url": data_url(file_of(picture(), "WEBP", lossless=True), "image/*")}},
    ]
    async with image_client() as client:
        request = await asked(client, engine, user(image, *forms))
        lower = await client.post(CHAT, json=chat(messages=[user(image_part(detail="low"))]))
    assert len(request.images) == 5
    assert len({image.digest for image in request.images}) == 1
    assert lower.json()["warnings"][0]["path"] == "messages[0].content[0].image_url.detail"


async def test_low_resolution(image_client: Client, engine: FakeEngine):
    """It has fewer tokens and another digest, in each API with `detail`; where there is no choice, it is reported."""
    details = ("low", "auto", "high", "original")
    parts = [image_part(picture(200, 100), detail=detail) for detail in details]
    async with image_client("idefics3", LISTS) as client:
        request = await asked(client, engine, user(*parts))
        url = parts[0]["image_url"]["url"]
        item = {"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "low"}]}
        response = await client.post("/v1/responses", json={"model": "tiny", "input": [item], "max_output_tokens": 16})
        assert "warnings" not in response.json()
        found = (await client.post("/tokenize", json={"messages": [user(*parts)]})).json()
        text = (await client.post("/tokenize", json={"messages": [user(text_part("a"))]})).json()
    low, *others = request.images
    places = [{"start": image.start, "num_tokens": image.num_rows} for image in request.images]
    assert (found["tokens"], found["images"]) == (list(request.prompt), places)
    assert "images" not in text
    assert (low.detail, low.num_rows) == ("low", 4)
    assert engine.requests[-1].images[0].digest == low.digest
    assert {(image.detail, image.num_rows, image.digest) for image in others} == {("", 12, others[0].digest)}
    assert low.digest != others[0].digest


async def test_typed_placeholders_stay_text(image_client: Client, engine: FakeEngine):
    """A typed placeholder takes no image's place, with and without images, in any part of the conversation."""
    typed = "see <image> here"
    async with image_client(template=LISTS) as client:
        plain = await asked(client, engine, user(text_part(typed)))
        assert IMAGE not in plain.prompt
        request = await asked(client, engine, user(text_part(typed), image_part(), text_part("<image><image>")))
        as_string = await asked(client, engine, {"role": "user", "content": typed})
        call = {"id": "c", "type": "function", "function": {"name": "see", "arguments": "{}"}}
        told = (
            {"role": "system", "content": typed},
            user(text_part("Go.")),
            {"role": "assistant", "content": typed, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": typed},
        )
        assert IMAGE not in (await asked(client, engine, *told)).prompt
        completion = await client.post("/v1/completions", json={"model": "tiny", "prompt": typed, "max_tokens": 2})
        assert completion.status_code == 200
        assert not engine.requests[-1].images
        response = await client.post("/tokenize", json={"messages": [{"role": "user", "content": typed}]})
    assert as_string.prompt == plain.prompt == tuple(response.json()["tokens"])
    tokenizer = tokenizer_of("llava", "<|start|>", "<|end|>")
    assert tokenizer.decode(plain.prompt) == f"<|start|>user:{typed}<|end|><|start|>assistant:"
    assert request.prompt.count(IMAGE) == request.images[0].num_rows
    before, after = (tokenizer.encode(text) for text in ("<|start|>user:see <", "image> here"))
    assert request.images[0].runs == (ImageRun(len(before) + len(after), 0, request.images[0].num_rows),)
    check_runs(request)


async def test_template_of_strings(image_client: Client, engine: FakeEngine):
    """In a template that prints a list as Python, the image goes to its place in the string."""
    async with image_client("qwen2_vl", STRINGS) as client:
        request = await asked(client, engine, user(text_part("a"), image_part(), text_part("b <|image_pad|>")))
    tokenizer = tokenizer_of("qwen2_vl", "<|start|>", "<|end|>")
    pads = "<|image_pad|>" * request.images[0].num_rows
    text = f"<|start|>user:a<|vision_start|>{pads}<|vision_end|>b <|image_pad|><|end|><|start|>assistant:"
    assert tokenizer.decode(request.prompt) == text
    assert request.prompt.count(IMAGE) == request.images[0].num_rows
    assert request.images[0].grid == (1, 3, 4) or request.images[0].grid is not None
    check_runs(request)


async def test_images_of_tools(image_client: Client, engine: FakeEngine):
    """They are accepted where the template shows them, and refused where it would drop them."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        user(text_part("Go."), image_part(picture(seed=1))),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [text_part("Here:"), image_part(picture(seed=2))]},
    ]
    async with image_client(template=BOTH) as client:
        request = await asked(client, engine, *messages)  # the template shows no calls, so the result is the user's
        assert len(request.images) == 2
        check_runs(request)
    with_tools = "{% if tool_calls %}{% endif %}" + BOTH.replace(
        "{% if m.content is string %}", "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
        "{% if m.content is string %}"
    )  # fmt: skip
    async with image_client(template=with_tools + "{# tool #}") as client:
        error = error_of(await client.post(CHAT, json=chat(messages=messages)))
    assert error["param"] == "messages[2].content[1]"
    assert "does not show images in messages of the role 'tool'" in error["message"]


PNG = file_of(picture())
JPEG = file_of(picture(), "JPEG")
MANY_SCANS = JPEG[: JPEG.rindex(b"\xff\xda")] + 40 * JPEG[JPEG.rindex(b"\xff\xda") : -2] + JPEG[-2:]


@pytest.mark.parametrize(
    ("url", "message", "code"),
    [
        ("https://example.com/a.png", "but got a value without the 'data:' prefix.", "invalid_value"),
        ("file:///etc/passwd", "but got a value without the 'data:' prefix.", "invalid_value"),
        ("data:image/png;base64", "but got one without a ','.", "invalid_value"),
        ("data:" + 2000 * ";" + "base64,abc", "but got one without a ','.", "invalid_value"),
        ("data:image/png,abc", "but got one with 'image/png'.", "invalid_value"),
        ("data:image/png;base64,a*b=", "Invalid base64 image_url.", "invalid_base64"),
        ("data:image/png;base64,", "Invalid base64 image_url.", "invalid_base64"),
        (data_url(b"hello"), "one the following formats: ['png', 'jpeg', 'gif', 'webp'].", "invalid_image_format"),
        (data_url(file_of(picture(), "BMP")), "one the following formats", "invalid_image_format"),
        (data_url(MANY_SCANS), "Invalid 'messages[0].content[1].image_url.url': The image has more", "invalid_image"),
        (data_url(PNG[: len(PNG) // 2]), "Please make sure your image is valid.", "invalid_image"),
        (data_url(file_of(picture(300, 1))), "300 x 1 pixels", "image_too_large"),
        (data_url(file_of(picture(200, 60))), "at most 10000. Scale it down.", "image_too_large"),
        (data_url(file_of(picture(99, 99)) + bytes(1 << 20)), "at most 1048576 for one image", "image_too_large"),
    ],
)  # fmt: skip
async def test_unusable_images(image_client: Client, engine: FakeEngine, url: str, message: str, code: str):
    part = {"type": "image_url", "image_url": {"url": url}}
    async with image_client(max_image_megapixels=0.01, max_image_mib=1) as client:
        error = error_of(await client.post(CHAT, json=chat(messages=[user(text_part("x"), part)])))
    assert message in error["message"]
    assert (error["param"], error["code"]) == ("messages[0].content[1]", code)
    assert not engine.requests


async def test_too_many_images(image_client: Client):
    async with image_client(max_images=2) as client:
        error = error_of(await client.post(CHAT, json=chat(messages=[user(*[image_part()] * 3)])))
    assert "has 3 images" in error["message"]
    assert error["param"] == "messages[0].content[2]"


async def test_images_with_more_rows_than_memory(image_client: Client, engine: FakeEngine):
    small, large = image_part(), image_part(picture(64, 64, seed=1))
    async with image_client() as client:
        engine.info_ = replace(engine.info_, max_image_rows=4)
        error = error_of(await client.post(CHAT, json=chat(messages=[user(small, large)])))
        again = await client.post(CHAT, json=chat(messages=[user(large, large)]))
    assert "memory for 4." in error["message"]
    assert (error["param"], error["code"]) == ("messages", "image_too_large")
    assert again.status_code == 200, again.text


async def test_models_without_images(client: httpx.AsyncClient):
    error = error_of(await client.post(CHAT, json=chat(messages=[user(text_part("x"), image_part())])))
    assert error["message"] == "Invalid content type. image_url is only supported by certain models."
    assert error["param"] == "messages[0].content[1].type"


async def test_combinations(image_client: Client, engine: FakeEngine):
    messages = [user(image_part(), text_part("x"))]
    async with image_client() as client:
        guided = {"guidance": {"scale": 2, "negative_prompt": "no"}}
        assert error_of(await client.post(CHAT, json=chat(messages=messages, **guided)))["param"] == (
            "guidance.negative_prompt"
        )
        embedded = await client.post("/v1/embeddings", json={"model": "tiny", "messages": messages})
        assert error_of(embedded)["param"] == "messages"
        applied = await client.post("/apply-template", json={"messages": messages})
        assert applied.status_code == 400
        request = await asked(client, engine, *messages, guidance={"scale": 2})
        assert len(request.images) == 1
        tool = {"type": "function", "function": {"name": "see", "parameters": {"type": "object"}}}
        for fields in (
            {"n": 4},
            {"use_beam_search": True, "n": 2, "temperature": 0},
            {"tools": [tool]},
            {"response_format": {"type": "json_object"}},
            {"prediction": {"type": "content", "content": "x"}},
        ):
            other = await asked(client, engine, *messages, **fields)
            assert [image.digest for image in other.images] == [image.digest for image in request.images]
            check_runs(other)
        echoed = await client.post(CHAT, json=chat(messages=messages, continue_final_message=True, echo=True))
        assert echoed.json()["choices"][0]["message"]["content"].startswith("x")
        count = (await client.post("/tokenize", json={"messages": messages})).json()["count"]
    assert count == len(request.prompt)


async def test_no_base64_in_logs(image_client: Client, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    broken = data_url(PNG[:100])
    async with image_client() as client:
        for part in (image_part(), {"type": "image_url", "image_url": {"url": broken}}):
            await client.post(CHAT, json=chat(messages=[user(part)]))
    assert broken[30:60] not in caplog.text


async def test_prompt_logprobs(image_client: Client, engine: FakeEngine):
    """They are null where the model sees an image and no token."""
    messages = [user(text_part("ab"), image_part(), text_part("c"))]
    async with image_client() as client:
        response = await client.post(CHAT, json=chat(messages=messages, prompt_logprobs=1))
    places = range(engine.requests[0].images[0].start, engine.requests[0].images[0].end)
    reported = response.json()["prompt_logprobs"]
    assert [place for place, entry in enumerate(reported) if entry is None] == [0, *places]


async def test_room_for_images(
    make_app: Callable[..., FastAPI],
    image_folder: Callable[..., Path],
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
):
    """Images of running requests are bounded, one file counts once, and ended requests leave their room."""
    app = make_app(image_folder())
    part = image_part()
    messages = [user(part, part)]
    room: ImageRoom = app.state.services.image_room
    monkeypatch.setattr(room, "_max_bytes", len(file_of(picture())) * 3 // 2)
    async with client_of(app) as client:
        for _ in range(3):
            await asked(client, engine, *messages, n=2)
        assert room.num_bytes == 0
        full = error_of(
            await client.post(CHAT, json=chat(messages=[user(part, image_part(picture(seed=1)))])),
            429,
            "rate_limit_exceeded",
        )
    assert "of running and waiting requests have 0 of" in full["message"]
    assert room.num_bytes == 0
