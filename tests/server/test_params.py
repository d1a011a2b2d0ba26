"""The engine's parameters: the request's, then the model's defaults, then the API's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from model_runner.contract import SamplingParams
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, scripted
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, requested
from tests.server.tiny_model import BOS, END, EOS, write_folder


async def sampling(client: httpx.AsyncClient, engine: FakeEngine, **fields: Any) -> SamplingParams:
    return (await requested(client, engine, COMPLETIONS, completion(seed=3, **fields))).sampling


async def test_defaults_of_the_api(client: httpx.AsyncClient, engine: FakeEngine):
    assert await sampling(client, engine) == SamplingParams(seed=3, stop_token_ids=(EOS, END))


FIELDS = {
    "temperature": 0.5, "top_p": 0.25, "presence_penalty": -1.5, "frequency_penalty": 1.5, "top_k": 7, "min_p": 0.125,
    "typical_p": 0.75, "repetition_penalty": 1.25, "no_repeat_ngram_size": 3, "min_tokens": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
async def test_field_reaches_the_engine(client: httpx.AsyncClient, engine: FakeEngine, name: str):
    expected = SamplingParams(**{"seed": 3, "stop_token_ids": (EOS, END), name: FIELDS[name]})
    assert await sampling(client, engine, **{name: FIELDS[name]}) == expected
    assert await sampling(client, engine, **{name: None}) == SamplingParams(seed=3, stop_token_ids=(EOS, END))


async def test_fields_that_take_work(client: httpx.AsyncClient, engine: FakeEngine):
    got = await sampling(client, engine, logit_bias={"5": -100, "0": 1.5})
    assert got.logit_bias == ((5, -100.0), (0, 1.5))
    got = await sampling(client, engine, allowed_token_ids=[9, 8, 9])
    assert got.allowed_token_ids == (9, 8)
    got = await sampling(client, engine, stop_token_ids=[7, EOS])
    assert got.stop_token_ids == (7, EOS, END)
    got = await sampling(client, engine, stop_token_ids=[7], ignore_eos=True)
    assert got.stop_token_ids == (7,)
    got = await sampling(client, engine, top_k=-1)
    assert got.top_k == 0
    got = await sampling(client, engine, bad_words=["the", "lo"])
    assert got.bad_words == ((257,), (258,), (259,), (32, 259))
    got = await sampling(client, engine, temperature=1e-300)
    assert got.temperature == 0
    assert (await sampling(client, engine, logprobs=0)).logprobs == 0


async def test_logprobs_of_the_prompt(client: httpx.AsyncClient, engine: FakeEngine):
    assert (await sampling(client, engine, logprobs=2)).prompt_logprobs is None
    assert (await sampling(client, engine, echo=True)).prompt_logprobs is None
    assert (await sampling(client, engine, logprobs=2, echo=True)).prompt_logprobs == 2
    assert (await sampling(client, engine, logprobs=2, echo=True, prompt_logprobs=5)).prompt_logprobs == 5
    assert (await sampling(client, engine, prompt_logprobs=0)).prompt_logprobs == 0


async def test_defaults_of_the_model(make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path):
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "min_p": None}
    folder = write_folder(tmp_path / "m", generation={**generation, "eos_token_id": EOS})
    async with client_of(make_app(folder)) as client:
        got = await sampling(client, engine)
        assert (got.temperature, got.top_p, got.top_k, got.repetition_penalty, got.min_p) == (0.6, 0.9, 20, 1.1, 0.0)
        assert got.stop_token_ids == (EOS, END)  # the file's, and the end of an answer in the template
        got = await sampling(client, engine, temperature=0, top_k=0)
        assert (got.temperature, got.top_k, got.top_p) == (0.0, 0, 0.9)
        fields = (await client.get("/v1/capabilities")).json()["endpoints"][CHAT]
        assert (fields["temperature"]["default"], fields["min_p"]["default"]) == (0.6, 0)


async def test_a_model_that_is_not_to_be_sampled_from(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path
):
    folder = write_folder(tmp_path / "m", generation={"do_sample": False, "temperature": 0.6, "top_p": 0.9})
    async with client_of(make_app(folder)) as client:
        assert (await sampling(client, engine)).temperature == 0
        assert (await sampling(client, engine, temperature=0.5)).temperature == 0.5
        fields = (await client.get("/v1/capabilities")).json()["endpoints"][CHAT]
        assert fields["temperature"]["default"] == 0


async def test_the_model_s_end_of_the_output(make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path):
    engine.script = scripted(b"abcdefgh")
    folder = write_folder(tmp_path / "m", generation={"max_new_tokens": 7, "stop_strings": "e"})

    async def text(client: httpx.AsyncClient, **fields: Any) -> str:
        return (await client.post(COMPLETIONS, json=completion(**fields))).json()["choices"][0]["text"]

    async with client_of(make_app(folder)) as client:
        assert await text(client, max_tokens=None) == "abcd"
        assert await text(client, max_tokens=None, stop=[]) == "abcdefg"
        assert await text(client, max_tokens=None, stop="c") == "ab"
        assert await text(client, max_tokens=8, stop=[]) == "abcdefgh"
        request = await requested(client, engine, CHAT, chat(max_tokens=None, beam_search={"width": 2}))
        assert (request.max_tokens, request.beam_search.stop) == (7, ("e",))
        endpoints = (await client.get("/v1/capabilities")).json()["endpoints"]
        assert endpoints[CHAT]["max_completion_tokens"]["default"] == 7
        assert endpoints[COMPLETIONS]["max_tokens"]["default"] == 7
        assert endpoints[CHAT]["stop"]["default"] == ["e"]


async def test_end_of_sequence_without_generation_config(tmp_path: Path, make_app, engine: FakeEngine):
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").unlink()
    async with client_of(make_app(folder)) as client:
        assert (await sampling(client, engine)).stop_token_ids == (2, EOS, END)
    (folder / "config.json").unlink()
    async with client_of(make_app(folder)) as client:
        assert (await sampling(client, engine)).stop_token_ids == (EOS, END)


async def test_max_tokens(client: httpx.AsyncClient, engine: FakeEngine):
    async def asked(path: str, body: dict[str, Any]) -> int:
        assert (await client.post(path, json=body)).status_code == 200
        return engine.requests[-1].max_tokens

    assert await asked(CHAT, chat(max_tokens=None)) == 128, "half of the context"
    assert await asked(CHAT, chat(max_tokens=None, messages=[{"role": "user", "content": "x" * 180}])) < 60
    assert await asked(CHAT, chat(max_tokens=None, max_completion_tokens=7)) == 7
    assert await asked(COMPLETIONS, completion(max_tokens=None)) == 16
    assert await asked(COMPLETIONS, completion(max_tokens=None, prompt=[65] * 250)) == 6
    long = [{"role": "user", "content": "x" * 400}]
    assert await asked(CHAT, chat(max_tokens=None, messages=long, truncate_prompt_tokens=-1)) == 1
    assert await asked(COMPLETIONS, completion(max_tokens=0)) == 0


async def test_truncated_prompts(client: httpx.AsyncClient, engine: FakeEngine):
    prompt = [i % 250 for i in range(400)]

    async def kept(**fields: Any) -> tuple[int, ...]:
        response = await client.post(COMPLETIONS, json=completion(prompt=prompt, **fields))
        assert response.status_code == 200, response.text
        return engine.requests[-1].prompt

    assert await kept(truncate_prompt_tokens=3) == tuple(prompt[-3:])
    assert await kept(truncate_prompt_tokens=-1, max_tokens=6) == tuple(prompt[-250:])
    assert await kept(truncate_prompt_tokens=-1, max_tokens=None) == tuple(prompt[-240:])
    long = {"role": "user", "content": "word " * 300}
    assert (await client.post(CHAT, json=chat(messages=[long], truncate_prompt_tokens=-1))).status_code == 200
    echo = await client.post(COMPLETIONS, json=completion(prompt="abcdef", truncate_prompt_tokens=2, echo=True))
    assert echo.json()["choices"][0]["text"].startswith("ef")


async def test_the_rest_reaches_the_engine(make_app: Callable[..., FastAPI], engine: FakeEngine):
    async with client_of(make_app(policy="priority")) as client:
        body = completion(prompt=[[1, 2], [3]], n=2, priority=4, cache_salt="pepper", seed=-1, learn=False)
        answer = (await client.post(COMPLETIONS, json=body)).json()
    first, second = engine.requests
    assert (first.prompt, second.prompt) == ((1, 2), (3,))
    assert [choice.index for choice in first.choices] == [0, 1]
    assert {(r.priority, r.cache_salt, r.learn, r.max_tokens, r.sampling.seed) for r in engine.requests} == {
        (4, "pepper", False, 5, 2**64 - 1)
    }
    assert first.request_id != second.request_id
    assert {choice["seed"] for choice in answer["choices"]} == {-1}


async def test_drawn_seeds_differ_between_prompts(client: httpx.AsyncClient, engine: FakeEngine):
    answer = (await client.post(COMPLETIONS, json=completion(prompt=["a"] * 4))).json()
    seeds = [choice["seed"] for choice in answer["choices"]]
    assert len(set(seeds)) == 4
    assert seeds == [request.sampling.seed for request in engine.requests]
    assert answer["seed"] == seeds[0] < 2**53
    assert len({choice["text"] for choice in answer["choices"]}) == 4


def test_a_text_is_refused_unseen_only_when_it_is_certainly_too_long(tokenizer: Tokenizer):
    for text in ("the the the", "x" * 1000, "é" * 50, ""):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=True))
    assert tokenizer.fewest_tokens("x" * 100_000) > 256


async def test_prompt_logprobs(client: httpx.AsyncClient, engine: FakeEngine):
    body = completion(prompt=[65, 66, BOS], prompt_logprobs=2, logprobs=1, echo=True)
    choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second["66"]["decoded_token"] == "B"
    assert second["66"]["rank"] == 3
    assert third[str(BOS)]["decoded_token"] == "<|bos|>"
    assert sorted(entry["rank"] for entry in third.values()) == [1, 2, 3]
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    answer = (await client.post(CHAT, json=chat(prompt_logprobs=0))).json()
    assert [len(entry) for entry in answer["prompt_logprobs"][1:]] == [1] * (len(engine.requests[-1].prompt) - 1)


async def test_token_ids(client: httpx.AsyncClient, engine: FakeEngine):
    answer = (await client.post(CHAT, json=chat(return_token_ids=True))).json()
    assert answer["prompt_token_ids"] == list(engine.requests[-1].prompt)
    assert bytes(answer["choices"][0]["token_ids"]).decode() == answer["choices"][0]["message"]["content"]
    unasked = (await client.post(CHAT, json=chat())).json()
    assert (unasked["prompt_token_ids"], unasked["choices"][0]["token_ids"]) == (None, None)


async def test_a_token_that_the_model_does_not_have(client: httpx.AsyncClient, engine: FakeEngine):
    """The tokenizer may know more tokens than the model: they never reach the engine."""
    engine.info_ = replace(engine.info_, vocab_size=5)
    refused = await client.post(COMPLETIONS, json=completion(prompt="hello"))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
    assert "which the model does not have" in refused.json()["error"]["message"]
    assert engine.requests == []
