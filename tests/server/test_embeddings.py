"""POST /v1/embeddings, in memory and through the official client."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from openai import BadRequestError, OpenAI
from safetensors.numpy import save_file

from model_runner.contract import Pooling
from server.api.pooling.intent import embedding_intent
from server.api.pooling.schema import EmbeddingRequest
from server.engine.client import QueueFullError
from server.generation import run
from server.generation.abilities import read_abilities
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import client_of, completion, error_of, refused, requested
from tests.server.tiny_model import START, write_folder

PATH = "/v1/embeddings"
TRAINED = {
    "modules.json": [
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ],
    "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
    "config_sentence_transformers.json": {
        "prompts": {"query": "Q: ", "document": ""},
        "default_prompt_name": "document",
    },
    "config.json": {"architectures": ["LlamaForCausalLM"], "matryoshka_dimensions": [4, 8]},
}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "hi", **fields}


def folder_with(path: Path, files: dict[str, Any]) -> Path:
    write_folder(path)
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(content))
    return path


@pytest.fixture
async def trained(make_app: Callable[..., FastAPI], tmp_path: Path):
    async with client_of(make_app(folder_with(tmp_path / "model", TRAINED))) as client:
        yield client


@pytest.mark.parametrize("given", ["hi", ["hi", "ho"], [7, 8, 9], [[7, 8], [9]]])
def test_the_official_client_gets_the_same_in_both_formats(openai_client: OpenAI, engine: FakeEngine, given: Any):
    answers = [
        openai_client.embeddings.create(model="tiny", input=given, **({"encoding_format": form} if form else {}))
        for form in ("float", None)  # without a format it asks for base64, and decodes that
    ]
    assert answers[0] == answers[1]
    count = len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1
    assert [one.index for one in answers[0].data] == list(range(count))
    assert {len(one.embedding) for one in answers[0].data} == {16}
    num_tokens = sum(len(request.prompt) for request in engine.requests) // 2
    assert answers[0].usage.prompt_tokens == answers[0].usage.total_tokens == num_tokens > 0


async def test_a_model_that_was_not_trained_gives_its_last_state(client: httpx.AsyncClient, engine: FakeEngine):
    request = await requested(client, engine, PATH, asked(user="me", cache_salt="s"))
    assert (request.prompt, request.max_tokens, request.cache_salt) == (tuple(b"hi"), 0, "s")
    assert request.speculation is None
    assert request.sampling.pooling == Pooling("last", normalizes=True)
    request = await requested(client, engine, PATH, asked(use_activation=False))
    assert request.sampling.pooling == Pooling("last", normalizes=False)
    capabilities = (await client.get("/v1/capabilities")).json()
    assert capabilities["embedding"]["trained"] is False
    assert (capabilities["generates"], capabilities["scoring"]) == (True, None)


async def test_a_model_is_used_as_its_configuration_says(trained: httpx.AsyncClient, engine: FakeEngine):
    assert (await requested(trained, engine, PATH, asked())).sampling.pooling == Pooling("mean")
    query = await requested(trained, engine, PATH, asked(prompt_name="query", dimensions=8))
    assert query.prompt == tuple(b"Q: hi")
    assert query.sampling.pooling == Pooling("mean", dimensions=8)
    assert (await requested(trained, engine, PATH, asked(dimensions=16))).sampling.pooling == Pooling("mean")
    longer = await requested(trained, engine, PATH, asked(use_activation=True))
    assert longer.sampling.pooling == Pooling("mean", normalizes=True)
    assert (await trained.get("/v1/capabilities")).json()["embedding"] == {
        "trained": True,
        "pooling": "mean",
        "normalized": False,
        "size": 16,
        "dimensions": [4, 8],
        "prompts": ["document", "query"],
        "default_prompt": "document",
        "similarity": None,
    }


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", "string_below_min_length"),
        ({"input": []}, "input", "empty_array"),
        ({"input": ["a"] * 2049}, "input", "array_above_max_length"),
        ({"input": [[1], [400]]}, "input[1][0]", "integer_above_max_value"),
        ({"input": "x" * 300}, "input", "context_length_exceeded"),
        ({"input": ["a", "b", "x" * 300]}, "input[2]", "context_length_exceeded"),
        ({"input": [[1], [2] * 300]}, "input[1]", "context_length_exceeded"),
        ({"encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ({"dimensions": 0}, "dimensions", "integer_below_min_value"),
        ({"dimensions": 8}, "dimensions", "unsupported_parameter"),
        ({"prompt_name": "query"}, "prompt_name", "invalid_value"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "integer_below_min_value"),
        ({"priority": 1}, "priority", "unsupported_value"),
        ({"temperature": 1}, "temperature", "unknown_parameter"),
        ({"model": 3}, "model", "invalid_type"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str
):
    await refused(client, PATH, asked(**fields), param, code)


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        (["hi", [7, 8], "ho"], [b"hi", bytes([7, 8]), b"ho"]),
        ([[7, 8], "hi"], [bytes([7, 8]), b"hi"]),
        ([7, 8], [bytes([7, 8])]),
    ],
)
async def test_texts_and_tokens_may_be_mixed(
    client: httpx.AsyncClient, engine: FakeEngine, given: list[Any], spelled: list[bytes]
):
    answer = await client.post(PATH, json=asked(input=given))
    assert [bytes(request.prompt) for request in engine.requests] == spelled
    assert len(answer.json()["data"]) == len(spelled)


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def of_messages(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, **fields}


@pytest.mark.parametrize(
    "fields",
    [{}, {"add_generation_prompt": True}, {"continue_final_message": True}, {"chat_template_kwargs": {"tone": "x"}}],
)
async def test_messages_are_embedded_as_the_template_writes_them(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
):
    answer = await client.post(PATH, json=of_messages(**fields))
    assert answer.json()["object"] == "list"
    tokens = (await client.post("/tokenize", json={"add_generation_prompt": False, **of_messages(**fields)})).json()
    (request,) = engine.requests
    assert list(request.prompt) == tokens["tokens"]
    assert (request.max_tokens, request.sampling.pooling) == (0, Pooling("last", normalizes=True))
    assert answer.json()["usage"]["prompt_tokens"] == tokens["count"]


async def test_messages_have_none_of_the_model_s_prompts_before_them(trained: httpx.AsyncClient, engine: FakeEngine):
    request = await requested(trained, engine, PATH, of_messages(dimensions=4, encoding_format="base64"))
    assert request.prompt[0] == START
    error = await refused(
        trained, PATH, of_messages(prompt_name="query"), "prompt_name", "invalid_parameter_combination"
    )
    assert "messages" in error


async def test_what_the_template_does_not_show_of_messages_is_reported(client: httpx.AsyncClient):
    answer = await client.post(PATH, json=of_messages(messages=[{"role": "user", "content": "hi", "name": "Ann"}]))
    assert [one["path"] for one in answer.json()["warnings"]] == ["messages[0].name"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"messages": MESSAGES}, "input", "invalid_parameter_combination"),
        ({"input": ["a", 7]}, "input[1]", "invalid_type"),
        ({"input": [7, "a"]}, "input[1]", "invalid_type"),
        ({"input": ["a", [7, "a"]]}, "input[1][1]", "invalid_type"),
        ({"input": ["a", []]}, "input[1]", "empty_array"),
        ({"input": [["a"]]}, "input[0][0]", "invalid_type"),
        ({"input": {}}, "input", "invalid_type"),
        ({"add_generation_prompt": True}, "add_generation_prompt", "invalid_value"),
        ({"chat_template_kwargs": {"tone": "x"}}, "chat_template_kwargs", "invalid_value"),
        ({"input": None, "messages": []}, "messages", "empty_array"),
        ({"input": None, "messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"input": None, "messages": [{"role": "user", "content": "x" * 300}]}, "messages", "context_length_exceeded"),
        (
            {"input": None, "messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "invalid_parameter_combination",
        ),
    ],
)
async def test_what_cannot_be_of_messages_and_mixed_inputs(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str
):
    await refused(client, PATH, asked(**fields), param, code)


def test_messages_are_as_costly_as_their_texts():
    body = of_messages(messages=[{"role": "user", "content": "x" * 100_000}])
    assert embedding_intent(EmbeddingRequest.model_validate(body)).asks.num_bytes > 100_000


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"dimensions": 5}, "dimensions", "invalid_value"),
        ({"dimensions": 17}, "dimensions", "invalid_value"),
        ({"dimensions": 10**1000}, "dimensions", "invalid_value"),
        ({"prompt_name": "nobody"}, "prompt_name", "invalid_value"),
        ({"prompt_name": ""}, "prompt_name", "invalid_value"),
        ({"prompt_name": "query", "input": [1]}, "prompt_name", "invalid_parameter_combination"),
    ],
)
async def test_what_this_model_cannot_do(trained: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    assert len(await refused(trained, PATH, asked(**fields), param, code)) < 200


async def test_another_model_is_not_found(client: httpx.AsyncClient):
    assert error_of(await client.post(PATH, json=asked(model="other")), 404)["code"] == "model_not_found"


async def test_the_end_of_a_long_text_can_be_used(client: httpx.AsyncClient, engine: FakeEngine):
    long = "x" * 400 + "abc"
    assert len((await requested(client, engine, PATH, asked(input=long, truncate_prompt_tokens=-1))).prompt) == 256
    assert (await requested(client, engine, PATH, asked(input=long, truncate_prompt_tokens=3))).prompt == tuple(b"abc")


async def test_a_server_may_cut_texts_that_are_too_long(make_app: Callable[..., FastAPI], engine: FakeEngine):
    body = asked(input=["a", "x" * 400])
    async with client_of(make_app()) as client:
        told = await refused(client, PATH, body, "input[1]", "context_length_exceeded")
        assert "truncate_prompt_tokens" in told
        assert "--auto-truncate" in told
    async with client_of(make_app(auto_truncate=True)) as client:
        answer = await client.post(PATH, json=body)
        assert (answer.status_code, answer.headers["x-samewise-ignored"]) == (200, "input[1]")
        assert {len(request.prompt) for request in engine.requests} == {1, 256}
        await refused(client, PATH, asked(input=[97] * 400), "input", "context_length_exceeded")


async def test_token_ids_of_another_tokenizer_are_reported(client: httpx.AsyncClient):
    """This tokenizer's are bytes, so a text in bytes is its own, and long runs of ids without a text are not."""
    for tokens, paths in (([*b"The capital of France is Paris."], []), ([5, 300, 301, 310] * 9, ["input[0]"])):
        answer = await client.post(PATH, json=asked(input=[tokens]))
        assert [one["path"] for one in answer.json().get("warnings", [])] == paths


async def test_token_ids_of_any_size_are_compared_with_the_vocabulary(client: httpx.AsyncClient):
    for token in (1 << 32, 10**30):
        await refused(client, PATH, asked(input=[token]), "input[0]", "integer_above_max_value")


async def test_more_inputs_than_the_queue_holds_are_given_to_the_engine_bit_by_bit(
    make_app: Callable[..., FastAPI], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    most, submit = 0, engine.submit

    def watched(*arguments: Any) -> Any:
        nonlocal most
        stream = submit(*arguments)
        most = max(most, engine.num_live)
        return stream

    monkeypatch.setattr(engine, "submit", watched)
    async with client_of(make_app(max_waiting=0)) as client:
        answer = await client.post(PATH, json=asked(input=[f"{number}" for number in range(50)]))
    assert [tuple(request.prompt) for request in engine.requests] == [tuple(b"%d" % number) for number in range(50)]
    assert len(answer.json()["data"]) == 50
    assert most == engine.info.max_num_seqs
    assert engine.num_live == 0


async def test_a_request_that_was_accepted_waits_for_room(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """Even where none of it is in the engine any more."""
    submit, tries = engine.submit, itertools.count()

    def full_at_times(*arguments: Any) -> Any:
        if next(tries) % 30 >= 10:
            raise QueueFullError("full")
        return submit(*arguments)

    monkeypatch.setattr(engine, "submit", full_at_times)
    monkeypatch.setattr(run, "_RETRY_S", 0.001)
    answer = await client.post(PATH, json=asked(input=[f"{number}" for number in range(25)]))
    assert [tuple(request.prompt) for request in engine.requests] == [tuple(b"%d" % number) for number in range(25)]
    assert len(answer.json()["data"]) == 25


async def test_without_room_for_the_first_a_request_is_refused(client: httpx.AsyncClient, engine: FakeEngine):
    engine.refuse = QueueFullError("full")
    assert (await client.post(PATH, json=asked(input=["a", "b"]))).status_code == 429
    assert len(engine.requests) == 1


def test_the_client_raises_what_is_refused(openai_client: OpenAI):
    with pytest.raises(BadRequestError, match="was not trained for shorter ones"):
        openai_client.embeddings.create(model="tiny", input="hi", dimensions=3)


@pytest.mark.parametrize(
    ("files", "names", "reason"),
    [
        ({}, ["generate", "embed"], ""),
        ({"config.json": {"architectures": ["LlamaModel"]}}, ["embed"], ""),
        ({"config.json": {"architectures": ["GPT2LMHeadModel"]}}, ["generate", "embed"], ""),
        ({**TRAINED, "1_Pooling/config.json": {"pooling_mode": "max"}}, ["generate"], "max, is not supported"),
        ({**TRAINED, "1_Pooling/config.json": {"pooling_mode": "lasttoken"}}, ["generate", "embed"], ""),
        ({**TRAINED, "modules.json": [{"path": "3", "type": "a.Dense"}]}, ["generate"], "names Dense"),
        ({**TRAINED, "sentence_bert_config.json": {"do_lower_case": True}}, ["generate"], "do_lower_case"),
        (
            {**TRAINED, "1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False}},
            ["generate"],
            "leaves out the prompt",
        ),
    ],
)
def test_abilities_are_read_from_the_models_files(
    files: dict[str, Any], names: list[str], reason: str, tmp_path: Path, tokenizer: Tokenizer
):
    abilities = read_abilities(folder_with(tmp_path / "model", files), tokenizer)
    assert abilities.names == names
    assert reason in abilities.no_embedding


@pytest.mark.parametrize(("weight", "is_there"), [("lm_head.weight", True), ("norm.weight", False)])
def test_a_head_that_has_no_weights_is_none(weight: str, is_there: bool, tmp_path: Path, tokenizer: Tokenizer):
    config = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    folder = folder_with(tmp_path / "model", {**TRAINED, "config.json": config})
    save_file({weight: np.zeros(2)}, folder / "model.safetensors")
    assert read_abilities(folder, tokenizer).generates == is_there


def test_normalisation_is_a_module(tmp_path: Path, tokenizer: Tokenizer):
    files = {**TRAINED, "modules.json": [*TRAINED["modules.json"], NORMALIZE]}
    embedding = read_abilities(folder_with(tmp_path / "model", files), tokenizer).embedding
    assert embedding is not None
    assert (embedding.by, embedding.normalizes, embedding.is_trained) == ("mean", True, True)


async def test_a_model_without_a_head_for_tokens_does_not_write(make_app: Callable[..., FastAPI], tmp_path: Path):
    folder = folder_with(tmp_path / "model", {**TRAINED, "config.json": {"architectures": ["LlamaModel"]}})
    async with client_of(make_app(folder)) as client:
        message = await refused(client, "/v1/completions", completion(), "model", "unsupported_model")
        assert message == "The model `tiny` cannot generate text. It can embed (/v1/embeddings)."
        assert (await client.post(PATH, json=asked())).status_code == 200
        message = await refused(client, "/v1/score", {"queries": "a", "documents": "b"}, "model", "unsupported_model")
        assert message.startswith("The model `tiny` cannot score texts. It is not made for scores")
