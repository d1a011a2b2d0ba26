"""POST /infill: the prompts that llama.cpp makes."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from server.api.llama_cpp.answer import LlamaCompletion
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import client_of, requested
from tests.server.llama_cpp.test_completion import events_of
from tests.server.test_fill_in import FAMILIES, FIRST, MID, PRE, QWEN, SUF, write_coder

PATH = "/infill"
REPOSITORY, FILE = FIRST + 3, FIRST + 4
GAP = [PRE, *b"ab", SUF, *b"(x", MID]


def infill(**fields: Any) -> dict[str, Any]:
    return {"input_prefix": "ab", "input_suffix": "(x", "n_predict": 5, "seed": 3, **fields}


@pytest.fixture
async def coder(make_app: Callable[..., FastAPI], tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app(write_coder(tmp_path / "coder"))) as client:
        yield client


@pytest.fixture
async def codestral(make_app: Callable[..., FastAPI], tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app(write_coder(tmp_path / "m", FAMILIES["codestral"][0]))) as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [REPOSITORY, *b"myproject\n", FILE, *b"filename\n", *GAP]),
        (
            {"input_extra": [{"filename": "a.py", "text": "A"}, {"text": "B<|file_sep|>"}]},
            [REPOSITORY, *b"myproject\n", FILE, *b"a.py\nA", FILE, *b"tmp\nB<|file_sep|>", FILE, *b"filename\n", *GAP],
        ),
        (
            {"prompt": "cd"},
            [REPOSITORY, *b"myproject\n", FILE, *b"filename\n", PRE, *b"abcd", SUF, *b"(x", MID],
        ),
        (
            {"input_prefix": "", "input_suffix": ""},
            [REPOSITORY, *b"myproject\n", FILE, *b"filename\n", PRE, SUF, MID],
        ),
    ],
)
async def test_with_a_pattern_for_several_files(
    coder: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], expected: list[int]
):
    asked = await requested(coder, engine, PATH, infill(**fields))
    assert list(asked.prompt) == expected
    given = await requested(coder, engine, "/completion", {"prompt": expected, "n_predict": 5, "seed": 3})
    assert asked.sampling.temperature == given.sampling.temperature == 0.8
    assert set(asked.sampling.stop_token_ids) - set(given.sampling.stop_token_ids) == set(range(FIRST, FIRST + 6))


@pytest.mark.parametrize("added", [QWEN[:3], FAMILIES["starcoder"][0]])
async def test_without_such_a_pattern(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path, added: tuple[str, ...]
):
    async with client_of(make_app(write_coder(tmp_path / "m", added))) as client:
        assert list((await requested(client, engine, PATH, infill())).prompt) == GAP
        extra = [{"filename": "a.py", "text": "A"}, {"text": "B"}]
        asked = await requested(client, engine, PATH, infill(input_extra=extra))
        assert list(asked.prompt) == [*b"\n\n--- snippet ---\n\nA\n\n--- snippet ---\n\nB", *GAP]


async def test_the_suffix_comes_first(codestral: httpx.AsyncClient, engine: FakeEngine):
    asked = await requested(codestral, engine, PATH, infill(prompt="c"))
    assert list(asked.prompt) == [SUF, *b"(x", PRE, *b"abc"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_is_that_to_the_same_tokens(codestral: httpx.AsyncClient, stream: bool):
    filled = await codestral.post(PATH, json=infill(stream=stream))
    given = await codestral.post(
        "/completion", json={"prompt": FAMILIES["codestral"][1], "n_predict": 5, "seed": 3, "stream": stream}
    )
    first, second = (events_of(one.text) if stream else [one.json()] for one in (filled, given))
    msgspec.convert(first[-1], LlamaCompletion)
    assert [one["content"] for one in first] == [one["content"] for one in second]
    assert first[-1]["prompt"] == "[SUFFIX](x[PREFIX]ab"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input_prefix": None}, "input_prefix", "missing_required_parameter"),
        ({"input_suffix": 3}, "input_suffix", "invalid_type"),
        ({"input_extra": {}}, "input_extra", "invalid_type"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text", "missing_required_parameter"),
        ({"input_extra": [{"text": "a", "filename": 3}]}, "input_extra[0].filename", "invalid_type"),
        ({"prompt": [1]}, "prompt", "invalid_type"),
        ({"input_extra": [{"text": "x" * 300}]}, "input_prefix", "context_length_exceeded"),
        ({"n_predict": 4, "num_predict": 5}, "num_predict", "invalid_parameter_combination"),
    ],
)
async def test_what_is_refused(coder: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    response = await coder.post(PATH, json=infill(**fields))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["error_code"]) == (param, code)


async def test_a_model_without_the_tokens(client: httpx.AsyncClient):
    error = (await client.post(PATH, json=infill())).json()["error"]
    assert (error["code"], error["param"], error["error_code"]) == (400, "input_suffix", "unsupported_parameter")
