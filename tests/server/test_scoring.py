"""Request fields for contrastive decoding and DoLa, and the resulting engine parameters."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from model_runner.contract import Contrastive, DoLa, SamplingParams
from model_runner.hub.repository import ModelFolder
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, events_of, refused, requested
from tests.server.tiny_model import write_folder

BOTH = pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion)], ids=["chat", "text"])


@pytest.fixture(scope="module")
def aux(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder(write_folder(tmp_path_factory.mktemp("models") / "small"), "org/small")


@pytest.fixture
async def client(make_app: Callable[..., FastAPI], aux: ModelFolder) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app(aux=aux)) as client:
        yield client


async def told(client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]) -> SamplingParams:
    return (await requested(client, engine, path, body)).sampling


@BOTH
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, None),
        ({}, Contrastive(0.1, 1.5, 0.5, 1.0)),
        ({"alpha": None, "amateur": None}, Contrastive(0.1, 1.5, 0.5, 1.0)),
        ({"alpha": 0, "beta": 0.25, "amateur": "org/small"}, Contrastive(0.0, 1.25, 0.25, 1.0)),
        ({"beta": 1, "expert_weight": 1, "temperature": 0.5}, Contrastive(0.1, 1.0, 1.0, 0.5)),
        ({"alpha": 1, "beta": 10, "temperature": 100}, Contrastive(1.0, 11.0, 10.0, 100.0)),
    ],
)
async def test_contrastive_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, make: Callable[..., dict], asked: object, expected: object
):
    sampling = await told(client, engine, path, make(contrastive=asked))
    assert (sampling.contrastive, sampling.dola) == (expected, None)


@BOTH
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, None),
        ({"layers": "low"}, DoLa("low", 0.1)),
        ({"layers": "high", "alpha": 0}, DoLa("high", 0.0)),
        ({"layers": [3, 0, 3], "alpha": 0.2}, DoLa((0, 3), 0.2)),
    ],
)
async def test_dola_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, make: Callable[..., dict], asked: object, expected: object
):
    sampling = await told(client, engine, path, make(dola=asked))
    assert (sampling.contrastive, sampling.dola) == (None, expected)


async def test_both_go_together_with_all_that_samples(client: httpx.AsyncClient, engine: FakeEngine):
    others = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.2,
        "presence_penalty": 1, "frequency_penalty": 1, "no_repeat_ngram_size": 3, "bad_words": ["x"], "min_tokens": 2,
        "allowed_token_ids": [101, 102], "logit_bias": {"5": 1}, "n": 2, "logprobs": True, "top_logprobs": 2, "seed": 1,
        "speculation": {"method": "suffix"}, "cache_salt": "s",
    }  # fmt: skip
    for mixed in ({"contrastive": {}}, {"dola": {"layers": "low"}}):
        response = await client.post(CHAT, json=chat(stream=True, **mixed, **others))
        assert response.status_code == 200
        assert events_of(response.text)[0]["object"] == "chat.completion.chunk"
        assert engine.requests[-1].sampling.least_share == 0.1


async def test_messages_say_what_there_is(
    client: httpx.AsyncClient, make_app: Callable[..., FastAPI], engine: FakeEngine
):
    asked = {"amateur": "org/other"}
    text = await refused(client, CHAT, chat(contrastive=asked), "contrastive.amateur", "unsupported_value")
    assert text == (
        "Unsupported value: 'contrastive.amateur' does not support 'org/other' with this server. "
        "Supported values are: 'org/small'."
    )
    text = await refused(client, CHAT, chat(dola={"layers": [4]}), "dola.layers[0]", "integer_above_max_value")
    assert text == (
        "Invalid 'dola.layers[0]': integer above maximum value. "
        "Expected a value <= 3, the model's last layer, but got 4 instead."
    )
    both = chat(contrastive={}, dola={"layers": "low"})
    await refused(client, CHAT, both, "contrastive", "invalid_parameter_combination")
    engine.info_ = replace(engine.info_, num_early_exits=0)
    async with client_of(make_app()) as poor:
        text = await refused(poor, CHAT, chat(contrastive={}), "contrastive", "unsupported_parameter")
        assert "has no auxiliary model. Start it with --aux-model" in text
        await refused(poor, CHAT, chat(dola={"layers": "low"}), "dola", "unsupported_parameter")


async def test_capabilities_say_whether_it_can_be_had(client: httpx.AsyncClient, make_app: Callable[..., FastAPI]):
    answer = (await client.get("/v1/capabilities")).json()
    assert (answer["aux_model"], answer["dola_layers"]) == ("org/small", 4)
    for path in (CHAT, COMPLETIONS):
        fields = answer["endpoints"][path]
        assert "dola" in fields["contrastive"]["excludes"]
        assert "contrastive" in fields["dola"]["excludes"]
        assert "use_beam_search" in fields["dola"]["excludes"]
    async with client_of(make_app()) as poor:
        assert (await poor.get("/v1/capabilities")).json()["aux_model"] is None
