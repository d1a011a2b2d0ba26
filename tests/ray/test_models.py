"""Two models on one cluster, each with replicas of its own: the answers of one server with both."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from bench import tiny_models
from tests import tiny_vocabulary
from tests.ray.cluster import Cluster
from tests.served.conftest import Server

pytestmark = pytest.mark.ray

PROMPTS = tuple("a b c d e f g h "[: 2 * length] for length in range(1, 7))
AT_A_TIME = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The entries of two tiny models."""
    parent = tmp_path_factory.mktemp("models")
    for kind in ("llama", "mixtral"):
        tiny_models.write_tiny_model(kind, parent / kind)
        tiny_vocabulary.tokenizer(tiny_models.VOCAB_SIZE).save(str(parent / kind / "tokenizer.json"))
    dense, mixture = str(parent / "llama"), str(parent / "mixtral")
    return [{"name": "dense", "path": dense}, {"name": "org/mixture", "path": mixture, "aliases": ["mix"]}]


@pytest.fixture(scope="module")
def single(models: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with both models."""
    settings: Path = tmp_path_factory.mktemp("settings") / "models.yaml"
    loaded = [{**model, "load": "start"} for model in models]
    settings.write_text(yaml.safe_dump({"kv_cache_gib": 0.1, "threads": 1, "models": loaded}))
    server = Server("--config", str(settings))
    yield server
    assert server.terminate() == 0


@pytest.fixture(scope="module")
def address(ray: Cluster, models: list[dict[str, Any]]) -> Iterator[str]:
    """The same models on Ray: two replicas of the first, and one of the second."""
    with ray.running(3, models=models, kv_cache_gib=0.1, replicas={"dense": {"min_replicas": 2}}):
        yield ray.address


async def answers_of(address: str) -> dict[tuple[str, str, bool], str]:
    """Texts of both models in turns, streamed and whole, by model, prompt and whether they were streamed."""
    places = asyncio.Semaphore(AT_A_TIME)

    async def ask(model: str, prompt: str, *, stream: bool) -> str:
        body = {
            "model": model,
            "prompt": prompt,
            "seed": len(prompt),
            "max_tokens": 12,
            "extra_body": {"ignore_eos": True},
        }
        async with places:
            if not stream:
                return (await client.completions.create(**body)).choices[0].text
            return "".join(
                [chunk.choices[0].text async for chunk in await client.completions.create(**body, stream=True)]
            )

    names = ("dense", "org/mixture", "mix")
    asked = [(name, prompt, stream) for prompt in PROMPTS for name in names for stream in (False, True)]
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        texts = await asyncio.gather(*(ask(name, prompt, stream=stream) for name, prompt, stream in asked))
    return dict(zip(asked, texts, strict=True))


def test_answers_of_both_models_are_those_of_one_server(address: str, single: Server) -> None:
    ours, its = asyncio.run(answers_of(address)), asyncio.run(answers_of(single.address))
    assert ours == its
    assert len(set(ours.values())) > len(PROMPTS)
    assert all(ours["mix", prompt, True] == ours["org/mixture", prompt, False] for prompt in PROMPTS)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/generate", "/tokenize"])
def test_a_wrong_name_is_refused_as_by_one_server(address: str, single: Server, path: str) -> None:
    fields = (
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2} if "messages" in path else {"prompt": "a"}
    )
    body, headers = {"model": "nobody", **fields}, {"x-request-id": "r"}
    ours, its = (httpx.post(one + path, json=body, headers=headers, timeout=60) for one in (address, single.address))
    assert (ours.status_code, ours.json()) == (404, its.json())


def test_lists_have_both_models(address: str, single: Server, ray: Cluster) -> None:
    def listed(of: str) -> list[Any]:
        models = httpx.get(f"{of}/v1/models", timeout=60).json()["data"]
        fields = ("id", "root", "aliases", "max_model_len", "input_modalities")
        return [[model[field] for field in fields] + [model["status"]["value"]] for model in models]

    assert listed(address) == listed(single.address)
    assert [name for name, *_ in listed(address)] == ["dense", "org/mixture", "mix"]
    assert httpx.get(f"{address}/ready?model=mix").status_code == 200
    assert httpx.get(f"{address}/ready?model=nobody").status_code == 404
    lines = [line for line in httpx.get(f"{address}/metrics").text.splitlines() if "num_requests_running{" in line]
    counts = [sum(f'model_name="{name}"' in line for line in lines) for name in ("dense", "org/mixture")]
    assert counts == [2, 1]
    assert len(ray.replica_pids()) == 3
