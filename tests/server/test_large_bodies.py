"""However large a body is and whatever is in it, nobody else waits for it: /health is asked all the while."""

import asyncio
import gc
import http.client
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from model_runner.hub.repository import ModelFolder
from server.api import body_worker
from server.api.body_worker import WorkerPool
from server.api.model_services import ModelParts
from server.app import create_app
from server.config import Settings
from server.http.responses import json_response
from server.telemetry.request_trace import Sender
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, scripted
from tests.server.helpers import CHAT, COMPLETIONS, serving

LIMIT_S = 0.1
TRIES = 3
"""Something else on the machine may keep the server waiting once."""
QUIET_ANSWERS = 100
LARGEST = 8 << 20

ONE_MESSAGE = '"messages":[{"role":"user","content":"x"}]'
CUT = '{"model":"tiny","max_tokens":1,"truncate_prompt_tokens":100,"prompt":'


def string(begin: str, end: str) -> Callable[[int], bytes]:
    """A body of the size that is one string between these."""
    return lambda size: f"{begin}{'a' * (size - len(begin) - len(end))}{end}".encode()


def array(begin: str, item: str, end: str) -> Callable[[int], bytes]:
    """A body of nearly the size that repeats an item between these."""
    return lambda size: f"{begin}{','.join([item] * ((size - len(begin) - len(end)) // (len(item) + 1)))}{end}".encode()


def prompts(size: int) -> bytes:
    """As many prompts of the same length as a server takes, of token ids."""
    ids = ",".join(["7"] * (size // 2000 - 10))
    return f'{{"model":"tiny","max_tokens":1,"prompt":[{",".join([f"[{ids}]"] * 1000)}]}}'.encode()


SHAPES = {
    "chat, one string": (CHAT, string('{"model":"tiny","messages":[{"role":"user","content":"', '"}]}')),
    "chat, messages": (CHAT, array('{"model":"tiny","messages":[', '{"role":"user","content":"x"}', "]}")),
    "chat, objects": (
        CHAT,
        array(f'{{"model":"tiny",{ONE_MESSAGE},"chat_template_kwargs":{{"tone":[', '{"a":{}}', "]}}"),
    ),
    "chat, numbers": (CHAT, array(f'{{"model":"tiny",{ONE_MESSAGE},"chat_template_kwargs":{{"tone":[', "1.5", "]}}")),
    "completions, one string": (COMPLETIONS, string(f'{CUT}"', '"}')),
    "completions, ids": (COMPLETIONS, array(f"{CUT}[", "7", "]}")),
    "completions, strings": (COMPLETIONS, array(f"{CUT}[", '"a"', "]}")),
    "completions, prompts": (COMPLETIONS, prompts),
    "tokenize, one string": ("/tokenize", string('{"return_token_strs":true,"prompt":"', '"}')),
    "detokenize, ids": ("/detokenize", array('{"tokens":[', "7", "]}")),
    "detokenize, strings": ("/detokenize", array('{"tokens":[', '"7"', "]}")),
}


@pytest.fixture(scope="module")
def address(folder: Path, tokenizer: Tokenizer, workers: WorkerPool) -> Iterator[str]:
    """A server for a model with a long context; as in the real one, what is there at the start is no garbage."""
    engine = FakeEngine(script=scripted(b"x"))
    engine.info_ = replace(engine.info_, max_model_len=8192, num_blocks=1024)
    parts = ModelParts(engine, tokenizer, Settings(), ModelFolder(folder, "tiny"))
    app = create_app([parts], parts.settings, workers=workers)
    gc.collect()
    gc.freeze()
    with serving(app) as address:
        yield address.removeprefix("http://")
    gc.unfreeze()
    app.state.services.models.default.body_worker.close()


def longest_answer(address: str, is_over: Callable[[], bool]) -> float:
    """Seconds that the slowest of many answers to /health took, the last one asked for when all was over."""
    connection = http.client.HTTPConnection(address)
    longest, was_over = 0.0, False
    while not was_over:
        was_over = is_over()
        begin = time.perf_counter()
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        longest = max(longest, time.perf_counter() - begin)
        time.sleep(0.002)
    connection.close()
    return longest


def delay(address: str, path: str, body: bytes) -> float:
    """How much longer /health takes because of the body: the least of a few tries, of which the first that is good."""
    least = math.inf
    for _ in range(TRIES):
        statuses: list[int] = []
        sender = threading.Thread(target=lambda: statuses.append(post(address, path, body)))  # noqa: B023
        sender.start()
        with_body = longest_answer(address, lambda: not sender.is_alive())  # noqa: B023
        left = iter(range(QUIET_ANSWERS))
        without = longest_answer(address, lambda: next(left, None) is None)  # noqa: B023
        assert statuses in ([200], [400])
        least = min(least, with_body - without)
        if least < LIMIT_S:
            break
    return least


def post(address: str, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection(address)
    connection.request("POST", path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    while response.read(1 << 20):
        pass
    connection.close()
    return response.status


@pytest.mark.parametrize("size", [LARGEST, body_worker.LARGE_BYTES])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_body_keeps_others_waiting(address: str, shape: str, size: int):
    path, build = SHAPES[shape]
    body = build(size - 1)
    assert 0.9 * size < len(body) < size
    assert delay(address, path, body) < LIMIT_S


def test_a_body_taken_in_on_the_event_loop_would(address: str, monkeypatch: pytest.MonkeyPatch):
    """The negative control."""
    monkeypatch.setattr(body_worker, "SMALL_BYTES", LARGEST)
    monkeypatch.setattr(body_worker, "LARGE_BYTES", LARGEST)
    path, build = SHAPES["completions, ids"]
    assert delay(address, path, build(LARGEST - 1)) > LIMIT_S


async def test_a_large_answer_comes_in_pieces_and_whole():
    content = bytes(range(256)) * (3 << 12) + b"end"
    transport = httpx.ASGITransport(json_response(content, {"x-samewise-ignored": "store"}))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get("/")
    assert response.content == content
    assert response.headers["content-length"] == str(len(content))
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-samewise-ignored"] == "store"


Place = tuple[int, int]
"""Ids of a process and a thread."""


def place_of(context: body_worker.BodyContext, body: bytes) -> Place:
    """Work that says where it is done."""
    return os.getpid(), threading.get_ident()


@pytest.fixture
def taken_in(make_app: Callable[..., FastAPI], engine: FakeEngine) -> Callable[[bytes], Awaitable[Place]]:
    services = make_app().state.services
    return lambda body: services.models.default.body_worker.run(place_of, body, engine.info, sender=Sender("somebody"))


async def test_small_bodies_stay_unless_something_in_them_is_costly(taken_in):
    assert await taken_in(b'{"dry_multiplier": 1}') == (os.getpid(), threading.get_ident())
    for costly in (
        b'{"dry_sequence_breakers": ["a"]}',
        rb'{"\u0064ry_sequence_breakers": ["a"]}',
        b'{"tools": [{}]}',
        b'{"format": {}}',
    ):
        process, _ = await taken_in(costly)
        assert process != os.getpid()


def heavy(context: body_worker.BodyContext, body: bytes, num_bytes: int) -> Place:
    """Work that says where it is done, which is more than the body shows."""
    context.weigh(num_bytes)
    return place_of(context, body)


async def test_what_means_more_than_its_bytes_is_taken_in_where_that_belongs(
    make_app: Callable[..., FastAPI], engine: FakeEngine
):
    taking = make_app().state.services.models.default.body_worker
    here = os.getpid(), threading.get_ident()

    async def place(num_bytes: int) -> Place:
        return await taking.run(heavy, b"{}", engine.info, num_bytes, sender=Sender("somebody"))

    assert await place(body_worker.SMALL_BYTES) == here
    process, thread = await place(body_worker.SMALL_BYTES + 1)
    assert process == os.getpid()
    assert thread != threading.get_ident()
    process, _ = await place(body_worker.LARGE_BYTES)
    assert process != os.getpid()


async def test_many_bodies_compete_with_the_event_loop_no_more_than_one(taken_in):
    bodies = [b" " * size for size in (body_worker.SMALL_BYTES + 1, body_worker.LARGE_BYTES - 1)] * 20
    ((process, thread),) = set(await asyncio.gather(*map(taken_in, bodies)))
    assert process == os.getpid()
    assert thread != threading.get_ident()
