"""POST /completion: llama.cpp's fields mean what the native ones mean, and its answers have its form."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from model_runner.contract import SamplingParams
from scheduler.interface import EngineRequest
from server.api.llama_cpp.answer import LlamaChunk, LlamaCompletion
from server.api.llama_cpp.schema import DEFAULTS, LlamaFields
from server.errors import RequestTimeoutError
from tests.server.fake_engine import FakeEngine, scripted
from tests.server.helpers import COMPLETIONS, client_of, requested, says
from tests.server.tiny_model import BOS, write_folder

PATH = "/completion"
NATIVE = {
    "model": "tiny", "prompt": "hi", "max_tokens": 5, "seed": 3,
    "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "sampler_order": "llama.cpp",
}  # fmt: skip
"""A completion with llama.cpp's defaults."""
OFF = {"top_k": 0, "top_p": 1, "min_p": 0}


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hi", "n_predict": 5, "seed": 3, **fields}


def events_of(text: str) -> list[dict[str, Any]]:
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def told(request: EngineRequest) -> tuple[Any, ...]:
    """The parts of an engine request that a body determines."""
    return request.prompt, request.sampling, request.max_tokens, len(request.choices), request.speculation


async def answered(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(PATH, json=body(**fields))
    assert response.status_code == 200, response.text
    return response.json()


async def refused(client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str) -> dict[str, Any]:
    response = await client.post(PATH, json=body(**fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["error_code"], error["code"]) == (param, code, 400)
    return error


@pytest.mark.parametrize(
    ("fields", "native"),
    [
        ({}, {}),
        ({"n_predict": None, "max_tokens": 7}, {"max_tokens": 7}),
        ({"n_predict": -1}, {"max_tokens": 254}),
        ({"n_predict": 0}, {"max_tokens": 0}),
        ({"n_cmpl": 3}, {"n": 3}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": -1}, {"temperature": 0}),
        ({"temperature": 1.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25},
         {"temperature": 1.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25}),
        ({"typical_p": 0.5, "top_n_sigma": 1.5}, {"typical_p": 0.5, "top_n_sigma": 1.5}),
        ({"xtc_probability": 0.5}, {"xtc_probability": 0.5, "xtc_threshold": 0.1}),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, {"xtc_probability": 0.5, "xtc_threshold": 0.2}),
        ({"repeat_penalty": 1.25, "repeat_last_n": -1}, {"repetition_penalty": 1.25}),
        ({"repeat_penalty": 1.25, "presence_penalty": 1, "repeat_last_n": 0}, {}),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, {"presence_penalty": 0.5, "frequency_penalty": 0.25}),
        ({"dry_multiplier": 0.5}, {"dry_multiplier": 0.5}),
        ({"dry_multiplier": 0.5, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 9,
          "dry_sequence_breakers": ["x"]},
         {"dry_multiplier": 0.5, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 9,
          "dry_sequence_breakers": ["x"]}),
        ({"mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.2},
         {"mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.2, "top_k": None, "top_p": None, "min_p": None,
          "sampler_order": None}),
        ({"samplers": ["top_p", "top_k", "temperature"]}, {"sampler_order": ["top_p", "top_k", "temperature"],
                                                          "min_p": 0}),
        ({"samplers": ["temperature", "typ_p", "xtc"], "typical_p": 0.5, "xtc_probability": 0.5},
         {**OFF, "sampler_order": ["temperature", "typical_p", "xtc"], "typical_p": 0.5, "xtc_probability": 0.5}),
        ({"samplers": ["top_k"], "temperature": 0.1, "dry_multiplier": 2, "presence_penalty": 1},
         {**OFF, "sampler_order": ["top_k"], "top_k": 40, "temperature": 1}),
        ({"samplers": ["penalties", "temperature"], "presence_penalty": 1},
         {**OFF, "sampler_order": ["temperature"], "presence_penalty": 1}),
        ({"logit_bias": [[5, 1.5], [6, -2], [5, 1]]}, {"logit_bias": {"5": 2.5, "6": -2}}),
        ({"logit_bias": {"5": 1.5}}, {"logit_bias": {"5": 1.5}}),
        ({"logit_bias": [["ab", 1]]}, {"logit_bias": {"97": 1, "98": 1}}),
        ({"logit_bias": {"ab": 1}}, {"logit_bias": {"97": 1, "98": 1}}),
        ({"logit_bias": [["5", 1]]}, {"logit_bias": {"53": 1}}),
        ({"grammar": 'root ::= "a" | "b"'}, {"guided_grammar": 'root ::= "a" | "b"'}),
        ({"json_schema": {"type": "integer"}},
         {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}}),
        ({"json_schema": {}}, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}),
        ({"n_probs": 3}, {"logprobs": 3}),
        ({"prompt": [104, 105]}, {}),
        ({"prompt": {"prompt_string": "hi"}}, {}),
        ({"prompt": [104, "i"]}, {}),
        ({"model": "tiny"}, {}),
    ],
)  # fmt: skip
async def test_fields_mean_what_the_native_ones_mean(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], native: dict[str, Any]
):
    expected = await requested(client, engine, COMPLETIONS, {**NATIVE, **native})
    assert told(await requested(client, engine, PATH, body(**fields))) == told(expected)


async def test_a_token_that_is_ruled_out(client: httpx.AsyncClient, engine: FakeEngine):
    asked = await requested(client, engine, PATH, body(logit_bias=[[5, False], ["a", False]]))
    assert asked.sampling.logit_bias == ((5, float("-inf")), (97, float("-inf")))


async def test_the_defaults_of_the_model_do_not_count(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Any
):
    own = {"temperature": 0.1, "top_k": 3, "repetition_penalty": 1.5, "epsilon_cutoff": 0.1, "stop_strings": ["x"]}
    async with client_of(make_app(write_folder(tmp_path / "m", generation=own))) as client:
        asked = await requested(client, engine, PATH, body())
    plain = SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=3, stop_token_ids=asked.sampling.stop_token_ids,
        sampler_order=asked.sampling.sampler_order,
    )  # fmt: skip
    assert asked.sampling == plain


@pytest.mark.parametrize("seed", [-1, 2**32 - 1, None])
async def test_a_seed_is_drawn_and_told(client: httpx.AsyncClient, engine: FakeEngine, seed: int | None):
    first, second = [await answered(client, seed=seed) for _ in range(2)]
    seeds = [one["generation_settings"]["seed"] for one in (first, second)]
    assert seeds == [one.sampling.seed for one in engine.requests]
    assert seeds[0] != seeds[1]
    assert (await answered(client, seed=seeds[0]))["content"] == first["content"]


async def test_a_whole_answer(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script, engine.num_cached = says("one\ntwo"), 1
    answer = await answered(client, n_predict=20, stop=["w"], return_tokens=True, n_probs=2)
    msgspec.convert(answer, LlamaCompletion)
    assert {name: value for name, value in answer.items() if not isinstance(value, dict | list)} == {
        "index": 0, "content": "one\nt", "id_slot": -1, "stop": True, "model": "tiny", "tokens_predicted": 6,
        "tokens_evaluated": 2, "prompt": "hi", "has_new_line": True, "truncated": False, "stop_type": "word",
        "stopping_word": "w", "tokens_cached": 1,
    }  # fmt: skip
    assert answer["tokens"] == [*b"one\ntw"]
    assert answer["timings"]["predicted_n"] == 6
    assert (answer["timings"]["cache_n"], answer["timings"]["prompt_n"]) == (1, 1)
    native = {**NATIVE, "max_tokens": 20, "stop": ["w"], "logprobs": 2}
    (choice,) = (await client.post(COMPLETIONS, json=native)).json()["choices"]
    assert choice["text"] == answer["content"]
    probabilities = answer["completion_probabilities"]
    assert [one["logprob"] for one in probabilities] == choice["logprobs"]["token_logprobs"]
    assert [one["token"] for one in probabilities] == ["o", "n", "e", "\n", "t", "w"]
    assert all(len(one["top_logprobs"]) == 2 for one in probabilities)


@pytest.mark.parametrize(
    ("fields", "stop_type", "truncated"),
    [
        ({}, "eos", False),
        ({"n_predict": 2}, "limit", False),
        ({"n_predict": -1, "ignore_eos": True}, "limit", True),
        ({"n_predict": 300, "ignore_eos": True}, "limit", True),
        ({"stop": ["e"]}, "word", False),
    ],
)
async def test_how_it_ended(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], stop_type: str, truncated: bool
):
    engine.script = says("hey")
    answer = await answered(client, **fields)
    assert (answer["stop_type"], answer["truncated"]) == (stop_type, truncated)


@pytest.mark.parametrize("fields", [{}, {"n_cmpl": 2}, {"prompt": ["a", [5, 6]]}, {"stop": ["e"], "n_probs": 1}])
async def test_a_stream_is_the_whole_answer(client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]):
    engine.script = says("ye\ns, é", "no")
    whole = await answered(client, n_predict=20, return_tokens=True, **fields)
    whole = whole if isinstance(whole, list) else [whole]
    streamed = await client.post(PATH, json=body(n_predict=20, stream=True, **fields))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = events_of(streamed.text)
    for one in whole:
        mine = [event for event in events if event["index"] == one["index"]]
        *chunks, last = mine
        for chunk in chunks:
            msgspec.convert(chunk, LlamaChunk)
        msgspec.convert(last, LlamaCompletion)
        assert "".join(chunk["content"] for chunk in chunks) == one["content"]
        assert [token for chunk in chunks for token in chunk["tokens"]] == one["tokens"]
        told_of = [entry for chunk in chunks for entry in chunk.get("completion_probabilities", [])]
        assert told_of == one.get("completion_probabilities", [])
        varies = {"content", "tokens", "timings", "generation_settings", "completion_probabilities"}
        assert {k: v for k, v in last.items() if k not in varies} == {k: v for k, v in one.items() if k not in varies}
        assert (last["content"], last["tokens"]) == ("", [])


async def test_timings_with_every_chunk(client: httpx.AsyncClient):
    events = events_of((await client.post(PATH, json=body(stream=True, timings_per_token=True))).text)
    assert [event["timings"]["predicted_n"] for event in events] == [1, 2, 3, 4, 5, 5]
    events = events_of((await client.post(PATH, json=body(stream=True))).text)
    assert ["timings" in event for event in events] == [False] * 5 + [True]


@pytest.mark.parametrize("stream", [False, True])
async def test_only_some_properties(client: httpx.AsyncClient, stream: bool):
    fields = ["content", "generation_settings/n_predict", "generation_settings/none", "tokens/x", "nothing"]
    response = await client.post(PATH, json=body(response_fields=fields, stream=stream, id_slot=2))
    answer = events_of(response.text)[-1] if stream else response.json()
    expected = {"content": "" if stream else answer["content"], "generation_settings/n_predict": 5}
    if not stream:
        expected["warnings"] = [{"path": "id_slot", "reason": "There are no fixed slots."}]
    assert answer == expected


async def test_prompts_of_every_shape(client: httpx.AsyncClient, engine: FakeEngine):
    prompts = ["hi", [1, 2], [BOS, "the<|bos|>", 7], {"prompt_string": "x"}]
    answer = await answered(client, prompt=prompts)
    assert [one["index"] for one in answer] == [0, 1, 2, 3]
    assert [list(one.prompt) for one in engine.requests] == [
        [*b"hi"], [1, 2], [BOS, 257, BOS, 7], [*b"x"],
    ]  # fmt: skip
    assert len({one["generation_settings"]["seed"] for one in answer}) == 1
    assert isinstance(await answered(client, prompt=["hi"]), dict)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"id_slot": 2}, "id_slot"),
        ({"n_keep": 5}, "n_keep"),
        ({"n_discard": 5}, "n_discard"),
        ({"t_max_predict_ms": 500}, "t_max_predict_ms"),
        ({"t_max_prompt_ms": 500}, "t_max_prompt_ms"),
        ({"return_progress": True}, "return_progress"),
        ({"sse_ping_interval": 3}, "sse_ping_interval"),
        ({"repeat_penalty": 1.1}, "repeat_last_n"),
        ({"frequency_penalty": 0.5, "repeat_last_n": -1}, "repeat_last_n"),
        ({"samplers": ["top_k", "infill"]}, "samplers[1]"),
        ({"samplers": ["tfs_z", "top_k"]}, "samplers[0]"),
        ({"dynatemp_range": 0.5}, "dynatemp_range"),
        ({"num_ctx": 4096.0}, "num_ctx"),
        ({"mirostat": 2, "top_k": 5}, "top_k"),
        ({"n_predict": 300}, "n_predict"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema.uniqueItems"),
    ],
)
async def test_what_is_done_otherwise_is_reported(
    client: httpx.AsyncClient, strict_client: httpx.AsyncClient, fields: dict[str, Any], path: str
):
    response = await client.post(PATH, json=body(**fields))
    assert [warning["path"] for warning in response.json()["warnings"]] == [path]
    assert response.headers["x-samewise-ignored"] == path
    events = events_of((await client.post(PATH, json=body(stream=True, **fields))).text)
    assert [[one["path"] for one in event.get("warnings", [])] for event in events[:2]] == [[path], []]
    assert (await strict_client.post(PATH, json=body(**fields))).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"id_slot": -1, "n_keep": -1, "n_discard": 0, "t_max_predict_ms": 0, "sse_ping_interval": -1},
        {"cache_prompt": False, "n_cache_reuse": 5, "backend_sampling": True, "dynatemp_exponent": 2.0},
        {"dynatemp_range": 0.0, "n_indent": 0, "min_keep": 0, "post_sampling_probs": False, "lora": []},
        {"repeat_last_n": 5, "return_progress": False, "grammar": "", "mirostat": 0, "logit_bias": [], "stop": []},
        dict.fromkeys(LlamaFields.model_fields) | {"n_predict": 5, "seed": 3},
        {**DEFAULTS, "n_predict": 5, "seed": 3},
        {"repetition_penalty": 1.0, "max_tokens": 5, "num_predict": 5},
    ],
)
async def test_what_asks_for_nothing_changes_nothing(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
):
    plain = await requested(client, engine, PATH, body())
    response = await client.post(PATH, json=body(**fields))
    assert "warnings" not in response.json()
    assert told(engine.requests[-1]) == told(plain)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"lora": [{"id": 0, "scale": 1}]}, "lora", "unsupported_parameter"),
        ({"mirostat": 1}, "mirostat", "unsupported_value"),
        ({"samplers": ["top_k", "penalties"]}, "samplers", "unsupported_value"),
        ({"samplers": ["dry", "penalties"]}, "samplers", "unsupported_value"),
        ({"samplers": ["typ_p", "typical_p"]}, "samplers[1]", "invalid_value"),
        ({"samplers": "kt"}, "samplers", "invalid_type"),
        ({"n_predikt": 5}, "n_predikt", "unknown_parameter"),
        ({"n_predict": -2}, "n_predict", "integer_below_min_value"),
        ({"n_predict": 1, "max_tokens": 2}, "max_tokens", "invalid_parameter_combination"),
        ({"n_cmpl": 129}, "n_cmpl", "integer_above_max_value"),
        ({"temperature": 2.5}, "temperature", "decimal_above_max_value"),
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"top_p": 2}, "top_p", "decimal_above_max_value"),
        ({"n_probs": 21}, "n_probs", "integer_above_max_value"),
        ({"seed": -2}, "seed", "integer_below_min_value"),
        ({"logit_bias": [[5]]}, "logit_bias[0]", "invalid_value"),
        ({"logit_bias": [[5, True]]}, "logit_bias[0]", "invalid_value"),
        ({"logit_bias": [["", 1]]}, "logit_bias[0]", "invalid_value"),
        ({"logit_bias": [[320, 1]]}, "logit_bias.320", "integer_above_max_value"),
        ({"logit_bias": {"5": 200}}, "logit_bias.5", "decimal_above_max_value"),
        ({"grammar": 'root ::= ('}, "grammar", "invalid_value"),
        ({"grammar": 'root ::= "a"', "json_schema": {"type": "null"}}, "grammar", "invalid_parameter_combination"),
        ({"json_schema": {"type": "null"}, "ignore_eos": True}, "json_schema", "invalid_parameter_combination"),
        ({"stop": "x"}, "stop", "invalid_type"),
        ({"prompt": []}, "prompt", "empty_array"),
        ({"prompt": 3}, "prompt", "invalid_type"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": [1, True]}, "prompt[1]", "invalid_type"),
        ({"prompt": [1, 320]}, "prompt[1]", "integer_above_max_value"),
        ({"prompt": ["a", [320, "b"]]}, "prompt[1][0]", "integer_above_max_value"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "prompt.multimodal_data",
         "unsupported_parameter"),
        ({"prompt": ["x" * 300]}, "prompt[0]", "context_length_exceeded"),
        ({"prompt": [1, "x" * 300]}, "prompt", "context_length_exceeded"),
        ({"model": "other"}, "model", "model_not_found"),
    ],
)  # fmt: skip
async def test_what_is_refused(client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    response = await client.post(PATH, json=body(**fields))
    error = response.json()["error"]
    assert (error["param"], error["error_code"]) == (param, code), error
    assert error["code"] == response.status_code == (404 if code == "model_not_found" else 400)


async def test_errors_have_its_form(client: httpx.AsyncClient, engine: FakeEngine, make_with_keys: Callable[..., Any]):
    error = await refused(client, {"prompt": "x" * 300}, "prompt", "context_length_exceeded")
    assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", 300, 256)
    engine.fail_after, engine.failure = 2, RequestTimeoutError("too long")
    *_, last = events_of((await client.post(PATH, json=body(stream=True))).text)
    assert last == {"error": {"code": 504, "message": "too long", "type": "server_error"}}
    async with client_of(make_with_keys({"ann": {}})) as with_keys:
        error = (await with_keys.post(PATH, json=body())).json()["error"]
        assert (error["code"], error["type"]) == (401, "authentication_error")


async def test_a_large_answer_is_bounded(client: httpx.AsyncClient, engine: FakeEngine):
    engine.info_ = replace(engine.info_, max_model_len=1 << 20, num_blocks=1 << 20)
    response = await client.post(PATH, json=body(prompt="x" * 560_000, n_cmpl=128))
    assert response.json()["error"]["error_code"] == "invalid_parameter_combination"
    fine = body(prompt="x" * 560_000, n_cmpl=128, response_fields=["stop"])
    engine.script = scripted([301])
    assert (await client.post(PATH, json=fine)).json() == [{"stop": True}] * 128


async def test_its_defaults_are_described(client: httpx.AsyncClient):
    fields = (await client.get("/v1/capabilities")).json()["endpoints"][PATH]
    assert {name: fields[name]["default"] for name in DEFAULTS} == DEFAULTS
