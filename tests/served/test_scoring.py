"""Contrastive decoding and DoLa from the command line to the answer, with tiny models."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.served.conftest import Server
from tests.server.tiny_model import write_folder


@pytest.fixture(scope="module")
def tiny_server(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model and an auxiliary model with the same tokenizer."""
    folders = []
    for family in ("llama", "qwen3"):
        folder = write_folder(tmp_path_factory.mktemp("served") / family)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(tiny_model(family) / name, folder / name)
        folders.append(folder)
    server = Server(str(folders[0]), "--aux-model", str(folders[1]), "--kv-cache-gib", "0.05")
    yield server
    assert server.terminate() == 0


def text_of(server: Server, **fields: Any) -> str:
    body = {"model": "llama", "prompt": "the low", "max_tokens": 24, "seed": 5, "ignore_eos": True, **fields}
    response = httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_each_has_its_own_answer_and_gives_it_again(tiny_server: Server) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"contrastive": {"amateur": "qwen3"}},
        {"contrastive": {"beta": 1, "expert_weight": 1, "temperature": 0.5}},
        {"dola": {"layers": [0, 1, 2]}, "repetition_penalty": 1.2},
    ]
    texts = [text_of(tiny_server, **fields) for fields in settings]
    assert len(set(texts)) == len(texts)
    assert texts == [text_of(tiny_server, **fields, speculation="off") for fields in settings]


def test_capabilities_name_the_auxiliary_model(tiny_server: Server) -> None:
    answer = httpx.get(f"{tiny_server.address}/v1/capabilities").json()
    assert (answer["aux_model"], answer["dola_layers"]) == ("qwen3", 3)
