"""Images through `samewise serve`: answers are transformers', and the same alone, in a crowd and after a crash."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests import image_models
from tests.image_processors import processor_of, tokenizer_of
from tests.served.conftest import Server
from tests.server.images.conftest import LISTS, image_part, picture, text_part

NUM_STREAMS = 16
NUM_TOKENS = 24
MARKERS = ("<|start|>", "<|end|>")


@pytest.fixture(params=["smolvlm"])
def image_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    """A server of a tiny model, and the model's folder."""
    folder = tmp_path / request.param
    image_models.write_model(folder, request.param, *MARKERS, template=LISTS.replace("PLACE", "<image>"))
    running = Server("--quantization", "none", "--kv-cache-gib", "0.05", str(folder))
    yield running, folder
    assert running.terminate() == 0
    assert "base64" not in running.log


def expected(folder: Path, image: Image.Image) -> list[int]:
    """The tokens that transformers generates for `messages_of` the picture."""
    tokenizer = tokenizer_of(folder.name, *MARKERS)
    prompt = [{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "image"}]}]
    template = LISTS.replace("PLACE", "<image>")
    text = tokenizer.apply_chat_template(prompt, chat_template=template, tokenize=False, add_generation_prompt=True)
    inputs = processor_of(folder, folder.name)(text=text, images=[[image]], return_tensors="pt")
    model: Any = image_models.load_oracle(folder)
    output = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def fields_of(folder: Path, image: Image.Image) -> dict[str, Any]:
    """A request about a picture."""
    message: Any = {"role": "user", "content": [text_part("What is"), image_part(image)]}
    extra = {"ignore_eos": True, "return_token_ids": True}
    fields = {"model": folder.name, "messages": [message], "max_tokens": NUM_TOKENS, "extra_body": extra}
    return {**fields, "logprobs": True}


def numbered(folder: Path, index: int) -> dict[str, Any]:
    """A request about one of many pictures."""
    return {**fields_of(folder, picture(20 + 7 * index, 90 - index, seed=index)), "seed": index}


def logprobs_of(choice: Any) -> list[tuple[str, float]]:
    """The sampled tokens with their logprobs."""
    content = choice.logprobs.content if choice.logprobs else ()
    return [(one.token, one.logprob) for one in content]


async def streams(server: Server, folder: Path, begun: asyncio.Event | None = None) -> list[list[tuple[str, float]]]:
    """The sampled tokens with their logprobs of streams about different pictures, at the same time."""
    num_begun = 0

    async def one(index: int) -> list[tuple[str, float]]:
        nonlocal num_begun
        tokens: list[tuple[str, float]] = []
        async for chunk in await client.chat.completions.create(**numbered(folder, index), stream=True):
            for choice in chunk.choices:
                num_begun += not tokens
                tokens += logprobs_of(choice)
            if begun is not None and num_begun >= NUM_STREAMS:
                begun.set()
        return tokens

    async with server.async_client() as client:
        return await asyncio.gather(*(one(index) for index in range(NUM_STREAMS)))


async def test_images_served(image_server: tuple[Server, Path]) -> None:
    server, folder = image_server
    fields = fields_of(folder, picture(70, 50))
    whole = server.client.chat.completions.create(**fields, temperature=0)
    assert whole.choices[0].model_dump()["token_ids"] == expected(folder, picture(70, 50))
    assert whole.model_dump()["usage"]["prompt_tokens_details"]["image_tokens"] > 0

    alone = [server.client.chat.completions.create(**numbered(folder, index)) for index in (0, 5, 11)]
    begun = asyncio.Event()
    disturbed = asyncio.create_task(streams(server, folder, begun))
    while not begun.is_set() and not await asyncio.to_thread(server.metric, "images_waiting"):
        pass  # until images are being encoded, which takes long enough to see
    os.kill(server.engine_pid, signal.SIGKILL)
    await begun.wait()
    os.kill(server.engine_pid, signal.SIGKILL)
    found = await disturbed
    assert server.metric("engine_restarts_total") == 2
    crowd = await streams(server, folder)
    assert found == crowd
    assert [crowd[index] for index in (0, 5, 11)] == [logprobs_of(one.choices[0]) for one in alone]
    assert len({tokens[0][1] for tokens in crowd}) > NUM_STREAMS / 2
