"""All endpoints but the two that generate; keys, logs and metrics."""

import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer as TokenizerModel
from tokenizers.processors import TemplateProcessing

from scheduler.interface import EngineRequest, EngineStats
from server import __version__
from server.api.chat.schema import ChatCompletionRequest
from server.engine.client import (
    EngineState,
    EngineUnavailableError,
    QueueFullError,
    RequestFailedError,
)
from server.errors import RequestTimeoutError
from server.logs import JSONFormatter, TextFormatter
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, error_of, events_of
from tests.server.tiny_model import BOS, END, EOS, START, write_folder


async def test_probes(client: httpx.AsyncClient):
    assert (await client.get("/health")).json() == {"status": "ok"}
    for ask in (client.get("/ready"), client.get("/ping"), client.post("/ping", content=b"anything")):
        assert (await ask).json() == {"status": "ready"}
    assert (await client.get("/version")).json() == {"version": __version__}
    assert (await client.get("/docs")).status_code == 200


async def test_ping_says_whether_requests_are_answered(client: httpx.AsyncClient, engine: FakeEngine):
    engine.state = EngineState.RESTARTING
    for ask in (client.get("/ping"), client.post("/ping")):
        error_of(await ask, 503, "server_error")


async def test_load_is_the_number_of_requests_that_somebody_waits_for(
    make_app: Callable[..., FastAPI], engine: FakeEngine
):
    loads: list[int] = []
    app = make_app()

    def script(request: EngineRequest, choice: int) -> list[int]:
        loads.append(app.state.services.models.default.timelines.num_awaited)
        return [ord("a")] * request.max_tokens

    engine.script = script
    async with client_of(app) as client:
        assert (await client.get("/load")).json() == {"server_load": 0}
        await asyncio.gather(client.post(CHAT, json=chat(n=2)), client.post(COMPLETIONS, json=completion()))
        assert max(loads) == 2, "two requests of three choices"
        await app.state.services.loopback.post(CHAT, json.dumps(chat()).encode(), "")
        assert loads[-1] == 0, "one in the background"
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_models(client: httpx.AsyncClient):
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 256)
    assert (card["root"], card["parent"], card["permission"]) == ("tiny", None, [])
    assert (await client.get("/v1/models/tiny")).json() == card
    error = (await client.get("/v1/models/meta/llama")).json()["error"]
    assert "`meta/llama`" in error["message"]


async def test_served_model_name(make_app: Callable[..., FastAPI]):
    async with client_of(make_app(served_model_name="org/name")) as client:
        assert (await client.get("/v1/models/org/name")).json()["id"] == "org/name"
        assert (await client.post(CHAT, json=chat(model="org/name"))).json()["model"] == "org/name"
        assert (await client.post(CHAT, json=chat())).status_code == 404


async def test_tokenize(client: httpx.AsyncClient):
    answer = (await client.post("/tokenize", json={"prompt": "the é", "return_token_strs": True})).json()
    assert answer == {
        "count": 3, "max_model_len": 256, "tokens": [257, 32, 261], "token_strs": ["the", "Ġ", "Ã©"],
    }  # fmt: skip
    assert (await client.post("/tokenize", json={"prompt": "a"})).json()["token_strs"] is None
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    assert tokens == [START, *b"user\na", END, ord("\n")]
    text = (await client.post("/detokenize", json={"tokens": tokens})).json()
    assert text == dict.fromkeys(("prompt", "content"), "<|start|>user\na<|end|>\n")
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": "", "content": ""}


SPELLED = [*b"a<|start|>"]
CALLED = {"type": "function", "function": {"name": "see", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"content": "a<|start|>"}, [97, START]),
        ({"content": "a<|start|>", "parse_special": True}, [97, START]),
        ({"content": "a<|start|>", "parse_special": False}, SPELLED),
        ({"prompt": "a<|start|>", "parse_special": False}, SPELLED),
        ({"content": ""}, []),
        ({"content": "é", "with_pieces": True}, [{"id": 261, "piece": "é"}]),
        ({"content": "日", "with_pieces": True}, [{"id": byte, "piece": [byte]} for byte in "日".encode()]),
    ],
)
async def test_tokenize_as_llama_cpp_does(client: httpx.AsyncClient, fields: dict[str, Any], tokens: list[Any]):
    answer = (await client.post("/tokenize", json=fields)).json()
    assert (answer["tokens"], answer["count"]) == (tokens, len(tokens))


@pytest.mark.parametrize(
    ("fields", "adds"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": "a", "add_special": False}, False),
        ({"prompt": "a", "add_special_tokens": False, "add_special": False}, False),
        ({"content": "a"}, False),
        ({"content": "a", "add_special": True}, True),
        ({"content": "a", "add_special": True, "parse_special": False}, True),
        ({"content": "a", "add_special_tokens": True}, True),
        ({"messages": [{"role": "user", "content": "a"}]}, False),
        ({"messages": [{"role": "user", "content": "a"}], "add_special": True}, True),
    ],
)
async def test_tokens_that_begin_every_text(make_app, tmp_path: Path, fields: dict[str, Any], adds: bool):
    folder = write_folder(tmp_path / "m")
    model = TokenizerModel.from_file(str(folder / "tokenizer.json"))
    model.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    model.save(str(folder / "tokenizer.json"))
    async with client_of(make_app(folder)) as client:
        tokens = (await client.post("/tokenize", json=fields)).json()["tokens"]
    assert tokens.count(BOS) == (tokens[0] == BOS) == adds


@pytest.mark.parametrize("tools", [[CALLED], [], None])
async def test_tokens_of_messages_with_tools_are_those_of_the_chat(
    client: httpx.AsyncClient, engine: FakeEngine, tools: list[dict[str, Any]] | None
):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": tools}
    engine.info_ = replace(engine.info_, max_model_len=4096)
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    assert (await client.post(CHAT, json={**body, "max_tokens": 1})).status_code == 200
    assert tuple(tokens) == engine.requests[-1].prompt
    assert (b"see" in bytes(token for token in tokens if token < 256)) == bool(tools)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "content": "a"}, "prompt"),
        ("/tokenize", {"content": "a", "messages": [{"role": "user", "content": "a"}]}, "content"),
        ("/tokenize", {"content": ["a"]}, "content"),
        ("/tokenize", {"content": "a", "tools": [CALLED]}, "tools"),
        ("/tokenize", {"content": "a", "add_special": True, "add_special_tokens": False}, "add_special"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "parse_special": False}, "parse_special"),
        ("/detokenize", {"tokens": [1, 320]}, "tokens[1]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": 3}, "model"),
    ],
)
async def test_tokenizer_errors(client: httpx.AsyncClient, path: str, body: dict, param: str):
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert (await client.post(path, json={**body, "model": "x"})).status_code in {400, 404}


async def test_tokenizer_info(client: httpx.AsyncClient):
    info = (await client.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<|bos|>", "<|eos|>", None)
    assert info["eos_token_ids"] == [EOS, END]
    assert info["vocab_size"] == 304
    assert "messages" in info["chat_template"]


async def test_tokenizer_info_has_the_model_s_configuration(make_app: Callable[..., FastAPI], tmp_path: Path):
    folder = write_folder(tmp_path / "m")
    said = {
        **{"tokenizer_class": "Tiny", "add_bos_token": False, "added_tokens_decoder": {"300": {"content": "<|bos|>"}}},
        **{"model_max_length": 10**30, "vocab_file": "/home/somebody/vocab", "name_or_path": "/home/somebody"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    async with client_of(make_app(folder)) as client:
        info = (await client.get("/tokenizer_info")).json()
    assert {name: info[name] for name in ("add_bos_token", "added_tokens_decoder", "model_max_length")} == {
        "add_bos_token": False, "added_tokens_decoder": {"300": {"content": "<|bos|>"}}, "model_max_length": 256,
    }  # fmt: skip
    assert "somebody" not in json.dumps(info)


async def test_model_without_a_chat_template(make_app, tmp_path: Path):
    async with client_of(make_app(write_folder(tmp_path / "m", template=None))) as client:
        error = (await client.post(CHAT, json=chat())).json()["error"]
        assert "no chat template" in error["message"]
        assert (await client.post(COMPLETIONS, json=completion())).status_code == 200
        assert (await client.get("/v1/capabilities")).json()["chat"] is False


async def test_named_templates_of_the_configuration(make_app, engine: FakeEngine, tmp_path: Path):
    folder = write_folder(tmp_path / "m", template=None)
    entry = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    async with client_of(make_app(folder)) as client:
        assert (await client.post(CHAT, json=chat())).status_code == 200
    assert bytes(engine.requests[-1].prompt) == b"hi!"


async def test_capabilities_name_every_field(client: httpx.AsyncClient):
    answer = (await client.get("/v1/capabilities")).json()
    fields = answer["endpoints"][CHAT]
    assert set(fields) == set(ChatCompletionRequest.model_fields)
    assert fields["temperature"]["support"] == "honoured"
    assert fields["temperature"]["default"] == 1
    number, null = fields["temperature"]["values"]["anyOf"]
    assert (number["minimum"], number["maximum"], null) == (0, 2, {"type": "null"})
    assert fields["messages"]["required"]
    assert fields["tools"]["support"] == "honoured"
    assert fields["tool_choice"]["requires"] == ["tools"]
    assert fields["audio"]["support"] == "refused"
    assert fields["user"]["support"] == "no_effect"
    assert fields["prompt_logprobs"]["excludes"] == ["stream"]
    assert fields["top_logprobs"]["requires"] == ["logprobs"]
    assert answer["endpoints"][COMPLETIONS]["max_tokens"]["default"] == 16
    assert answer["chat_template_variables"] == ["tone"]
    assert answer["speculation"] == {
        "methods": ["auto", "lookahead", "prediction", "suffix"], "default": "auto", "max_num_tokens": 16,
    }  # fmt: skip
    assert fields["speculation"]["default"] == {"method": "auto"}
    assert fields["prediction"]["support"] == "honoured"
    assert "$ref" not in json.dumps(answer)


async def test_refused_fields_say_so(client: httpx.AsyncClient):
    """The capabilities are true: what is called refused is refused, what has no effect is not."""
    fields = (await client.get("/v1/capabilities")).json()["endpoints"][CHAT]
    refused = [name for name, field in fields.items() if field["support"] == "refused"]
    assert len(refused) == 17
    of_the_models: dict[str, Any] = {"contrastive": {}, "dola": {"layers": "low"}}
    for name in refused:
        error = (await client.post(CHAT, json=chat(**{name: of_the_models.get(name, {"x": 1})}))).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


KEYED_PATHS = ("/load", "/v1/models", "/v1/capabilities", "/tokenizer_info", "/nowhere", "/metrics")


async def test_keys(make_app: Callable[..., FastAPI], tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    (tmp_path / "keys").write_text("first-key\n\n  second-key \n")
    app = make_app(api_key="main-key", api_keys_file=tmp_path / "keys")
    await app.state.services.models.default.fingerprint.wait_known()
    async with client_of(app) as client:
        for path in ("/health", "/ready", "/ping", "/version", "/openapi.json"):
            assert (await client.get(path)).status_code == 200
        for path in KEYED_PATHS:
            response = await client.get(path)
            assert response.status_code == 401
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", None)
            assert error["message"].startswith("You didn't provide an API key.")
        for wrong in ("Bearer wrong-key", "Bearer main-key2", "Bearer main-ke", "bearer MAIN-KEY"):
            response = await client.get("/v1/models", headers={"authorization": wrong})
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert wrong.split()[1] not in response.text
        for no_key in ("Basic main-key", "Bearer ", "main-key"):
            response = await client.get("/v1/models", headers={"authorization": no_key})
            assert response.json()["error"]["code"] is None
        for key in ("main-key", "first-key", "second-key"):
            assert (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == 200
    assert "-key" not in caplog.text


async def test_a_key_tells_who_the_client_is_and_does_not_go_further(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path
):
    (tmp_path / "keys").write_text("first-key\nsecond-key\n")
    async with client_of(make_app(api_keys_file=tmp_path / "keys")) as client:
        for key in ("first-key", "second-key", "first-key"):
            response = await client.post(CHAT, json=chat(), headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 200
    first, second, again = (request.client for request in engine.requests)
    assert first
    assert first == again != second
    assert "-key" not in repr(engine.requests)


async def test_without_keys_nobody_can_tell_clients_apart(client: httpx.AsyncClient, engine: FakeEngine):
    await client.post(CHAT, json=chat(), headers={"authorization": "Bearer any"})
    assert engine.requests[-1].client == ""


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_keys_lets_nobody_in_by_accident(make_app, tmp_path: Path, content: str):
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ValueError, match="has no API key"):
        make_app(api_keys_file=tmp_path / "keys")
    with pytest.raises(ValueError, match="empty"):
        make_app(api_key="  ")


async def read_metrics(client: httpx.AsyncClient) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    return {
        sample.name + "".join(f",{value}" for key, value in sample.labels.items() if key != "model_name"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics(client: httpx.AsyncClient, engine: FakeEngine):
    await client.post(CHAT, json=chat(n=2))
    await client.post(COMPLETIONS, json=completion(prompt=["a", "b"], stop="a" * 9, stream=True))
    await client.get("/nowhere")
    seen = await read_metrics(client)
    prompts = sum(len(request.prompt) for request in engine.requests)
    assert seen["samewise:num_requests_running"] == 3
    assert seen["samewise:kv_cache_usage_perc"] == 0.5
    assert seen["samewise:prefix_cache_queries_total"] == 10
    assert seen["samewise:prefix_cache_hits_total"] == 4
    assert seen["samewise:num_preemptions_total"] == 0
    assert seen["samewise:out_of_memory_steps_total"] == 0
    assert seen["samewise:engine_restarts_total"] == 2
    assert seen["samewise:prompt_tokens_total"] == prompts
    assert seen["samewise:generation_tokens_total"] == 20
    assert seen["samewise:request_success_total,length"] == 4
    assert seen["samewise:time_to_first_token_seconds_count"] == 2
    assert seen["samewise:inter_token_latency_seconds_count"] == 16
    assert seen["samewise:e2e_request_latency_seconds_count"] == 3
    assert seen["samewise:request_generation_tokens_sum"] == 20
    assert seen[f"samewise:http_requests_total,{CHAT},POST,200"] == 1
    assert seen["samewise:http_requests_total,unmatched,GET,404"] == 1


async def test_metrics_leave_out_what_the_engine_does_not_take(client: httpx.AsyncClient, engine: FakeEngine):
    engine.refuse = QueueFullError()
    assert (await client.post(CHAT, json=chat(n=2))).status_code == 429
    seen = await read_metrics(client)
    assert seen["samewise:prompt_tokens_total"] == 0
    for name in ("request_prompt_tokens", "request_params_max_tokens", "request_params_n"):
        assert seen[f"samewise:{name}_count"] == 0


async def test_metrics_of_an_engine_that_restarts(client: httpx.AsyncClient, engine: FakeEngine):
    engine.state, engine.num_held, engine.stats = EngineState.RESTARTING, 3, EngineStats(num_waiting=4)
    seen = await read_metrics(client)
    assert seen["samewise:num_requests_waiting"] == 7
    assert seen["samewise:num_requests_held"] == 3
    states = {state.value: seen[f"samewise:engine_state,{state.value}"] for state in EngineState}
    assert states == {"unloaded": 0, "starting": 0, "ready": 0, "restarting": 1, "draining": 0, "failed": 0}


def test_metrics_of_two_applications_are_their_own(make_app: Callable[..., FastAPI]):
    make_app()
    make_app()  # a registry that they shared would refuse the second


async def test_access_line(make_app: Callable[..., FastAPI], caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    secret = completion(prompt="my secret", stop="never")
    async with client_of(make_app()) as client:
        response = await client.post(COMPLETIONS, json=secret)
        (line,) = [record for record in caplog.records if record.name == "samewise.access"]
        assert line.request_id == response.headers["x-request-id"]
        assert (line.route, line.status, line.tokens_in, line.tokens_out) == (COMPLETIONS, 200, 9, 5)
        assert 0 <= line.ttft_s <= line.duration_s
        await client.post(COMPLETIONS, json={**secret, "temperature": 9})
    everything = "\n".join(json.dumps(record.__dict__, default=str) for record in caplog.records)
    assert "my secret" not in everything
    caplog.clear()
    async with client_of(make_app(log_prompts=True)) as client:
        text = (await client.post(COMPLETIONS, json=secret)).json()["choices"][0]["text"]
    (line,) = [record for record in caplog.records if record.name == "samewise.access"]
    assert (line.prompt, line.output) == ("my secret", text)


async def test_unhandled_exception_is_logged_with_its_request(client, engine: FakeEngine, caplog):
    engine.refuse = ZeroDivisionError("a bug")
    response = await client.post(CHAT, json=chat())
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.request_id == response.headers["x-request-id"]
    assert "a bug" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "level"),
    [
        (RequestFailedError("it crashed."), 500, logging.ERROR),
        (EngineUnavailableError("it failed"), 503, logging.WARNING),
        (RequestTimeoutError("too long"), 504, logging.WARNING),
        (ZeroDivisionError("a bug"), 500, logging.ERROR),
    ],
)
async def test_failures_are_logged_and_counted(make_app, engine, caplog, failure, status, level, stream):
    """Also those in the middle of a stream, whose own status says that all is well."""
    caplog.set_level(logging.INFO)
    engine.fail_after, engine.failure = 2, failure
    async with client_of(make_app()) as client:
        response = await client.post(CHAT, json=chat(n=2, stream=stream))
        seen = await read_metrics(client)
    assert response.status_code == (200 if stream else status)
    error = (events_of(response.text)[-1] if stream else response.json())["error"]
    request_id, (engine_id,) = response.headers["x-request-id"], [request.request_id for request in engine.requests]
    assert (f"The request's id is {request_id}." in error["message"]) == (status == 500)
    ours = [record for record in caplog.records if record.name.startswith("samewise")]  # others export old spans
    (line,) = [record for record in ours if record.levelno >= logging.WARNING]
    assert (line.levelno, line.request_id, line.answer_id) == (level, request_id, engine_id.removesuffix("-0"))
    (access,) = [record for record in caplog.records if record.name == "samewise.access" and record.route == CHAT]
    assert (access.answer_id, access.stream_error) == (line.answer_id, status if stream else None)
    reason = "timeout" if status == 504 else "error"
    assert seen[f"samewise:request_success_total,{reason}"] == 2
    assert sum(value for name, value in seen.items() if name.startswith("samewise:request_success_total")) == 2


async def test_probes_of_an_engine_that_is_not_ready_do_not_fill_the_log(make_app, engine, caplog):
    caplog.set_level(logging.INFO, "samewise")
    engine.state = EngineState.STARTING
    async with client_of(make_app()) as client:
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post(CHAT, json=chat())).status_code == 503
    names = [record.name for record in caplog.records if record.name.startswith("samewise")]
    assert names == ["samewise.http", "samewise.access"]


async def test_choices_that_nobody_wants_any_more_are_counted(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = lambda request, choice: [65, 301] if choice == 0 else [65]
    engine.step_delay_s = 0.02
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.post(CHAT, json=chat(n=3, max_tokens=200)), 0.3)
    engine.step_delay_s = 0
    seen = await read_metrics(client)
    assert (seen["samewise:request_success_total,stop"], seen["samewise:request_success_total,abort"]) == (1, 2)


@pytest.mark.parametrize("formatter", [JSONFormatter(), TextFormatter()])
def test_log_lines(formatter: logging.Formatter):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("x")
    logger.addHandler(handler)
    logger.info("said %s", "é\nfake", extra={"request_id": "r1", "prompt": "a b\nc", "ttft_s": None})
    if isinstance(formatter, JSONFormatter):
        line = json.loads(stream.getvalue())
        assert (line["message"], line["request_id"], line["prompt"]) == ("said é\nfake", "r1", "a b\nc")
        assert stream.getvalue().count("\n") == 1
    else:
        assert "said \\xe9\\nfake" in stream.getvalue()
        assert 'request_id=r1 prompt="a b\\nc"' in stream.getvalue()
        assert stream.getvalue().count("\n") == 1
    assert "ttft_s" not in stream.getvalue()


def test_the_http_side_never_imports_the_model_side_nor_an_http_client():
    heavy = {"torch", "transformers", "huggingface_hub", "httpx"}
    code = f"import sys, server.app; print({heavy} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
