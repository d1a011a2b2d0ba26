"""Fields of other servers: honoured as this server's own spelling, reported, or refused; and null, which is absent."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from scheduler.interface import EngineRequest
from server.api.body_worker import COSTLY
from server.api.capabilities import bodies_of
from server.api.dialects import DIALECTS
from server.api.fields.foreign import ForeignFields
from server.api.fields.rules import RequestModel, names_of, relations_of
from server.api.fields.structured import CONSTRAINT_FIELDS
from server.generation.prompt import MAX_OTHER_ROLES
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, events_of, refused, says
from tests.server.test_hints import check_reported
from tests.server.test_reasoning import SWITCHED, THOUGHT, answered, thought_of
from tests.server.tiny_model import BOS, TEMPLATE

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TEXT_OF_SCHEMA = '{"type": "object"}'
GBNF = 'root ::= "yes" | "no"'
ALWAYS_SAME = {"seed": 1}
Fields = dict[str, Any]

OF_BOTH: list[tuple[Fields, Fields]] = [
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"response_format": NAMED}),
    ({"response_format": {"type": "json_object", "schema": {}}}, {"response_format": {"type": "json_object"}}),
    ({"json_schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
    ({"json_schema": TEXT_OF_SCHEMA}, {"structured_outputs": {"json": TEXT_OF_SCHEMA}}),
    ({"regex": "[ab]+"}, {"structured_outputs": {"regex": "[ab]+"}}),
    ({"grammar": GBNF}, {"structured_outputs": {"grammar": GBNF}}),
    ({"grammar": 'start: "a"'}, {"structured_outputs": {"grammar": 'start: "a"'}}),
    ({"grammar": "", "ignore_eos": True}, {"ignore_eos": True}),
    ({"ebnf": GBNF}, {"structured_outputs": {"grammar": GBNF}}),
    ({"no_stop_trim": True, "stop": "c"}, {"include_stop_str_in_output": True, "stop": "c"}),
    ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, {"truncate_prompt_tokens": 2}),
    ({"rid": "mine"}, {"request_id": "mine"}),
    ({"spaces_between_special_tokens": False}, {}),
    ({"cache_prompt": True}, {}),
    ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"repeat_penalty": 1.2, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"repeat_penalty": 1.2, "presence_penalty": 1, "repeat_last_n": 0}, {}),
    ({"typ_p": 0.5}, {"typical_p": 0.5}),
    ({"samplers": ["penalties", "top_k", "min_p", "temperature"], "top_k": 5, "top_p": 0.5, "min_p": 0.1},
     {"sampler_order": ["top_k", "min_p", "temperature"], "top_k": 5, "top_p": 1, "min_p": 0.1}),
    ({"samplers": [], "repeat_penalty": 1.2, "temperature": 0.5}, {"temperature": 1}),
]  # fmt: skip
OF_CHAT: list[tuple[Fields, Fields]] = [
    *OF_BOTH,
    ({"n_predict": 3, "max_tokens": None}, {"max_tokens": 3}),
    ({"num_predict": 3.0, "max_tokens": None}, {"max_tokens": 3}),
    ({"max_tokens": 3, "max_completion_tokens": 3, "n_predict": 3}, {"max_tokens": 3}),
    ({"n_predict": -1, "num_predict": 0, "max_tokens": None}, {"max_tokens": None}),
    ({"n_probs": 2}, {"logprobs": True, "top_logprobs": 2}),
    ({"n_probs": 0}, {}),
    ({"reasoning_budget": 3}, {"thinking_token_budget": 3}),
    ({"reasoning_budget": -1}, {}),
    ({"think": False}, {"thinking": {"type": "disabled"}}),
    ({"think": True}, {"thinking": {"type": "enabled"}}),
    ({"think": "high"}, {"reasoning_effort": "high"}),
    ({"enable_thinking": False}, {"thinking": {"type": "disabled"}}),
    ({"thinking_budget": 3}, {"thinking_token_budget": 3}),
    ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
    ({"reasoning": {"enabled": False}}, {"thinking": {"type": "disabled"}}),
    ({"reasoning": {"max_tokens": 3}}, {"thinking_token_budget": 3}),
    ({"reasoning": {"effort": "low", "exclude": True}}, {"reasoning_effort": "low", "include_reasoning": False}),
    ({"reasoning_format": "hidden"}, {"include_reasoning": False}),
    ({"reasoning_format": "none"}, {"separate_reasoning": False}),
    ({"reasoning_format": "deepseek"}, {}),
    ({"add_special_tokens": False}, {}),
]  # fmt: skip
"""Fields of other servers, and the same in this server's own."""


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine.roomy()
    engine.script = says(f"<think>\n{THOUGHT}\n</think>\n\nabcdef")
    return engine


@pytest.fixture
async def thinker(client_with: Callable[..., httpx.AsyncClient]) -> Any:
    """A model that thinks, with a switch for that."""
    async with client_with(SWITCHED) as client:
        yield client


def bare(request: EngineRequest) -> EngineRequest:
    return replace(request, request_id="")


async def told(client: httpx.AsyncClient, path: str, body: Fields) -> tuple[Fields, list[str]]:
    """An answer's content without id and time, and the warnings in its stream's first chunk."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    chunks = events_of((await client.post(path, json={**body, "stream": True})).text)
    assert len({chunk["id"].removesuffix("mine") for chunk in chunks}) == 1
    answer = {name: value for name, value in response.json().items() if name not in ("id", "created", "warnings")}
    paths = [warning["path"] for warning in response.json().get("warnings", [])]
    assert [warning["path"] for warning in chunks[0].get("warnings", [])] == paths
    return answer, [path.partition(".")[0] for path in paths]


@pytest.mark.parametrize(("foreign", "own"), OF_CHAT)
async def test_chat_means_the_same(thinker: httpx.AsyncClient, engine: FakeEngine, foreign: Fields, own: Fields):
    answers = [
        await told(thinker, CHAT, chat(**{"max_tokens": 90, **ALWAYS_SAME, **fields})) for fields in (foreign, own)
    ]
    assert answers[0][0] == answers[1][0]
    assert [bare(request) for request in engine.requests[:2]] == [bare(request) for request in engine.requests[2:]]
    for (_, reported), fields in zip(answers, (foreign, own), strict=True):
        assert set(reported) <= set(fields), "what is reported has the name that the client gave it"
    assert len(answers[0][1]) == len(answers[1][1])


@pytest.mark.parametrize(("foreign", "own"), OF_BOTH)
async def test_completions_mean_the_same(client: httpx.AsyncClient, engine: FakeEngine, foreign: Fields, own: Fields):
    answers = [await told(client, COMPLETIONS, completion(**ALWAYS_SAME, **fields)) for fields in (foreign, own)]
    assert answers[0] == answers[1]
    assert [bare(request) for request in engine.requests[:2]] == [bare(request) for request in engine.requests[2:]]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_other_apis_mean_the_same(client: httpx.AsyncClient, engine: FakeEngine, path: str):
    body = {"input": "hi", "max_output_tokens": 5} if path == "/v1/responses" else chat(max_tokens=5)
    for fields in ({"regex": "[ab]+"}, {"guided_regex": "[ab]+"}):
        assert (await client.post(path, json={"model": "tiny", **body, "seed": 1, **fields})).status_code == 200
    assert bare(engine.requests[0]) == bare(engine.requests[1])


def test_every_form_is_checked_in_a_worker():
    """Whatever it is called: compiling it may take long."""
    assert [name for name in CONSTRAINT_FIELDS if not COSTLY.search(f'{{"{name}":"x"}}'.encode())] == []
    assert not COSTLY.search(b'{"messages":[{"role":"user","content":"A regex, or a grammar?"}]}')


HINTS: list[tuple[str, object, object]] = [
    ("keep_alive", "5m", None), ("keep_alive", -1, None), ("provider", {"order": ["x"]}, {}),
    ("models", ["a", "b"], []), ("route", "fallback", ""), ("session_id", "s", ""), ("data_parallel_rank", 1, None),
    ("id_slot", 0, -1), ("kv_transfer_params", {"do_remote_decode": True}, {}), ("ec_transfer_params", {"a": 1}, {}),
    ("bootstrap_host", "h", None), ("bootstrap_port", 1, None), ("bootstrap_room", 1, None),
    ("mm_processor_kwargs", {"num_crops": 4}, {}), ("media_io_kwargs", {"video": {}}, {}),
    ("usage", {"include": True}, {}), ("transforms", ["middle-out"], []), ("stream_interval", 4, 1),
    ("timings_per_token", True, False), ("return_progress", True, False), ("n_keep", 5, 0), ("n_discard", 5, 0),
    ("stream_reasoning", False, True), ("num_ctx", 8192.0, None), ("num_keep", 24, 0), ("num_batch", 512, None),
    ("num_gpu", 20, -1), ("main_gpu", 1, 0), ("num_thread", 2, 0), ("draft_num_predict", 4, None),
    ("use_mmap", False, True), ("use_mlock", True, False), ("numa", True, False), ("low_vram", True, False),
    ("f16_kv", False, True), ("tfs_z", 0.5, 1), ("penalize_newline", False, True), ("n_indent", 4, 0),
    ("min_keep", 5, 0), ("dynatemp_range", 0.5, 0), ("adaptive_target", 0.5, -1), ("t_max_prompt_ms", 500, 0),
    ("t_max_predict_ms", 500, 0), ("post_sampling_probs", True, False), ("parse_tool_calls", False, True),
    ("guided_decoding_backend", "outlines", "auto"),
]  # fmt: skip
"""A field, a value that is reported, and one that asks for nothing."""


@pytest.mark.parametrize(("name", "value", "neutral"), HINTS)
async def test_hints_are_reported_and_change_nothing(
    client: httpx.AsyncClient, strict_client: httpx.AsyncClient, engine: FakeEngine, name: str, value: object,
    neutral: object,
):  # fmt: skip
    for fields, paths in (({name: value}, [name]), ({name: neutral}, []), ({}, [])):
        response = await client.post(CHAT, json=chat(seed=1, **fields))
        check_reported(response, response.json(), paths)
    assert len({bare(request) for request in engine.requests}) == 1
    await refused(strict_client, CHAT, chat(**{name: value}), name, "unsupported_parameter")
    assert (await strict_client.post(CHAT, json=chat(**{name: neutral}))).status_code == 200


def test_every_hint_is_tested():
    hints = {name for name, relations in relations_of(ForeignFields).items() if relations.hint}
    assert hints - {"n_probs", "reasoning_budget"} | {"stream_reasoning"} == {name for name, _, _ in HINTS}


@pytest.mark.parametrize(
    ("path", "body", "within"),
    [
        (CHAT, chat(), ""),
        (COMPLETIONS, completion(), ""),
        ("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 5}, ""),
        ("/v1/messages", chat(), ""),
        ("/completion", {"prompt": "hi", "n_predict": 5}, ""),
        ("/api/chat", chat(stream=False, max_tokens=None), "options."),
        ("/api/generate", {"model": "tiny", "prompt": "hi", "stream": False}, "options."),
    ],
)
async def test_every_api_takes_the_samplers_of_other_servers(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: Fields, within: str
):
    """Names with an equal are honoured, and all others are reported, by their path."""
    honoured = {"repeat_penalty": 1.5, "repetition_penalty": 1.5, "samplers": ["penalties", "top_k", "mine"]}
    no_equal = {
        "tfs_z": 0.5, "num_batch": 512, "use_mmap": False, "min_keep": 3, "dynatemp_range": 0.5, "n_keep": 3,
        "dynatemp_exponent": 2, "t_max_predict_ms": 100, "post_sampling_probs": True, "parse_tool_calls": False,
        "guided_decoding_backend": "outlines", "repeat_last_n": 64,
    }  # fmt: skip
    sent = {**honoured, **no_equal, "top_k": 7, "top_p": 0.5, "seed": 1}
    max_tokens = {"num_predict": 5} if within else {}
    response = await client.post(path, json={**body, **({"options": {**sent, **max_tokens}} if within else sent)})
    assert response.status_code == 200, response.text
    reported = {warning["path"] for warning in response.json()["warnings"]}
    assert reported == {within + name for name in (*no_equal, "samplers[2]") if name != "dynatemp_exponent"}
    assert set(response.headers["x-samewise-ignored"].split(", ")) == reported
    sampling = engine.requests[-1].sampling
    assert (sampling.repetition_penalty, sampling.top_k, sampling.top_p) == (1.5, 7, 1.0)


REFUSED: list[tuple[Fields, str, str]] = [
    ({"options": {"num_ctx": 9}}, "options", "unsupported_parameter"),
    ({"plugins": [{"id": "web"}]}, "plugins", "unsupported_parameter"),
    ({"lora": [{"id": 0}]}, "lora", "unsupported_parameter"),
    ({"lora_path": "x"}, "lora_path", "unsupported_parameter"),
    ({"custom_logit_processor": "x"}, "custom_logit_processor", "unsupported_parameter"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "unsupported_parameter"),
    ({"repetition_detection": {"min_count": 2}}, "repetition_detection", "unsupported_parameter"),
    ({"stop_regex": "a+"}, "stop_regex", "unsupported_parameter"),
    ({"return_hidden_states": True}, "return_hidden_states", "unsupported_parameter"),
    ({"reasoning_format": "deepseek-legacy"}, "reasoning_format", "unsupported_value"),
    ({"think": "a lot"}, "think", "invalid_value"),
    ({"think": 3}, "think", "invalid_type"),
    ({"reasoning": {"efort": "low"}}, "reasoning.efort", "unknown_parameter"),
    ({"reasoning": {"max_tokens": 0}}, "reasoning.max_tokens", "integer_below_min_value"),
    ({"regex": "(?=a)"}, "regex", "invalid_value"),
    ({"regex": 3}, "regex", "invalid_type"),
    ({"grammar": "x ::= y"}, "grammar", "invalid_value"),
    ({"ebnf": "nothing"}, "ebnf", "invalid_value"),
    ({"json_schema": "{"}, "json_schema", "invalid_value"),
    ({"json_schema": [1]}, "json_schema", "invalid_type"),
    ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema", "invalid_type"),
    ({"truncation_side": "right"}, "truncation_side", "invalid_value"),
    ({"truncate_prompt_tokens": 2, "truncation_side": "middle"}, "truncation_side", "invalid_value"),
    ({"request_id": "a b"}, "request_id", "invalid_value"),
    ({"request_id": "x" * 129}, "request_id", "string_above_max_length"),
    ({"rid": ["a"]}, "rid", "invalid_type"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "invalid_value"),
    ({"logprobs": True, "logprob_token_ids": [320]}, "logprob_token_ids[0]", "integer_above_max_value"),
    ({"logprobs": True, "logprob_token_ids": [-1]}, "logprob_token_ids[0]", "integer_below_min_value"),
    ({"logprobs": True, "logprob_token_ids": [1] * 129}, "logprob_token_ids", "array_above_max_length"),
    ({"kv_transfer_params": {"a": "x" * 70000}}, "kv_transfer_params", "invalid_value"),
    ({"keep_alive": "x" * 70000}, "keep_alive", "invalid_value"),
]
CONTRADICTIONS: list[tuple[Fields, str]] = [
    ({"regex": "a", "grammar": GBNF}, "regex"),
    ({"json_schema": SCHEMA, "guided_regex": "a"}, "guided_regex"),
    ({"json_schema": SCHEMA, "ignore_eos": True}, "json_schema"),
    ({"think": True, "thinking": {"type": "disabled"}}, "think"),
    ({"think": True, "enable_thinking": False}, "enable_thinking"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
    ({"thinking_budget": 3, "thinking_token_budget": 4}, "thinking_budget"),
    ({"no_stop_trim": True, "include_stop_str_in_output": False}, "no_stop_trim"),
    ({"rid": "a", "request_id": "b"}, "rid"),
    ({"cache_prompt": False, "cache_salt": "x"}, "cache_prompt"),
    ({"include_reasoning": False, "separate_reasoning": False}, "separate_reasoning"),
    ({"reasoning": {"exclude": True}, "reasoning_format": "raw"}, "reasoning_format"),
    ({"reasoning": {"exclude": True}, "include_reasoning": True}, "reasoning.exclude"),
    ({"reasoning_format": "hidden", "include_reasoning": True}, "reasoning_format"),
    ({"reasoning_format": "none", "separate_reasoning": True}, "reasoning_format"),
    ({"reasoning_format": "none", "tools": [{"type": "function", "function": {"name": "f"}}]}, "reasoning_format"),
    ({"separate_reasoning": False, "tools": [{"type": "function", "function": {"name": "f"}}]}, "separate_reasoning"),
]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [*REFUSED, *((fields, param, "invalid_parameter_combination") for fields, param in CONTRADICTIONS)],
)
async def test_what_is_refused_has_the_client_s_name(
    client: httpx.AsyncClient, engine: FakeEngine, fields: Fields, param: str, code: str
):
    await refused(client, CHAT, chat(**fields), param, code)
    assert engine.requests == []


async def test_the_same_wish_may_be_said_twice(client: httpx.AsyncClient):
    fields = {"think": True, "enable_thinking": True, "reasoning_effort": "low", "reasoning": {"effort": "low"}}
    same = {"rid": "a", "request_id": "a", "reasoning_format": "auto", "include_reasoning": True}
    assert (await client.post(CHAT, json=chat(**fields, **same))).status_code == 200


async def test_the_reasoning_is_left_out(thinker: httpx.AsyncClient):
    shown, usage = await answered(thinker)
    hidden, its_usage = await answered(thinker, include_reasoning=False)
    assert (thought_of(shown), thought_of(hidden)) == (THOUGHT, None)
    assert shown["message"]["content"] == hidden["message"]["content"] == "abcdef"
    assert usage == its_usage, "it was written, and counts"


async def test_the_logprobs_of_a_reasoning_that_is_left_out(thinker: httpx.AsyncClient):
    body = chat(max_tokens=90, include_reasoning=False, logprobs=True, return_token_ids=True, seed=1)
    (choice,) = (await thinker.post(CHAT, json=body)).json()["choices"]
    chunks = events_of((await thinker.post(CHAT, json={**body, "stream": True})).text)
    entries = [
        entry for chunk in chunks for one in chunk["choices"] if one["logprobs"] for entry in one["logprobs"]["content"]
    ]
    assert entries == choice["logprobs"]["content"]
    assert not any("reasoning" in one["delta"] for chunk in chunks for one in chunk["choices"])


async def test_the_reasoning_stays_in_the_content(thinker: httpx.AsyncClient):
    choice, usage = await answered(thinker, separate_reasoning=False)
    assert choice["message"]["content"] == f"<think>\n{THOUGHT}\n</think>\n\nabcdef"
    assert thought_of(choice) is None
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_a_prompt_is_cut_at_either_end(client: httpx.AsyncClient, engine: FakeEngine):
    for side, kept in (("left", b"ef"), ("right", b"ab")):
        body = completion(prompt="abcdef", truncate_prompt_tokens=2, truncation_side=side, echo=True)
        answer = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["text"]
        assert bytes(engine.requests[-1].prompt) == kept
        assert answer.startswith(kept.decode())


async def test_no_cached_prefix_is_used(client: httpx.AsyncClient, engine: FakeEngine):
    for value in (False, False, True):
        assert (await client.post(CHAT, json=chat(cache_prompt=value))).status_code == 200
    salts = [request.cache_salt for request in engine.requests]
    assert salts[0] != salts[1]
    assert "" not in salts[:2]
    assert salts[2] == ""


async def test_a_request_s_own_id(client: httpx.AsyncClient, engine: FakeEngine):
    """Two requests may have the same one at a time."""
    for path, body, prefix in ((CHAT, chat, "chatcmpl-"), (COMPLETIONS, completion, "cmpl-")):
        for _ in range(2):
            answer = (await client.post(path, json=body(request_id="mine"))).json()
            assert answer["id"] == f"{prefix}mine"
    assert len({request.request_id for request in engine.requests}) == 4
    assert (await client.get("/v1/requests/cmpl-mine")).json()["answer_id"] == "cmpl-mine"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/embeddings"])
async def test_an_own_id_where_ids_are_the_server_s(client: httpx.AsyncClient, path: str):
    response = await client.post(path, json={**WITHOUT_MODEL[path], "model": "tiny", "request_id": "mine"})
    check_reported(response, response.json(), ["request_id"])


@pytest.mark.parametrize(
    ("messages", "fields", "begun"),
    [
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "Well, "}], {}, "Well, "),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "Well, "}],
         {"continue_final_message": True}, "Well, "),
        ([{"role": "user", "content": "I am"}], {"continue_final_message": True}, "I am"),
        ([{"role": "user", "content": "x"}], {}, ""),
    ],
)  # fmt: skip
async def test_a_chat_s_echo(
    client: httpx.AsyncClient, engine: FakeEngine, messages: list[Fields], fields: Fields, begun: str
):
    engine.script = says("abc")
    plain, _ = await answered(client, messages=messages, **fields)
    echoed, _ = await answered(client, messages=messages, echo=True, n=1, **fields)
    assert echoed["message"]["content"] == begun + plain["message"]["content"]


async def test_special_tokens_around_a_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    encode = Tokenizer.encode

    def with_bos(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        return [BOS] * add_special_tokens + encode(self, text, add_special_tokens=False)

    monkeypatch.setattr(Tokenizer, "encode", with_bos)
    for path, body, default in ((CHAT, chat, False), (COMPLETIONS, completion, True)):
        for value, adds in ((None, default), (True, True), (False, False)):
            response = await client.post(path, json=body(add_special_tokens=value))
            check_reported(response, response.json(), [])
            assert (engine.requests[-1].prompt[0] == BOS) == adds
    response = await client.post(COMPLETIONS, json=completion(prompt=[1, 2], add_special_tokens=True))
    check_reported(response, response.json(), ["add_special_tokens"])


async def test_tokens_by_their_ids(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = says("ab")
    body = chat(logprobs=True, top_logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True)
    choice = (await client.post(CHAT, json=body)).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert entries[0]["bytes"] == [ord("a")]
    assert entries[0]["top_logprobs"][0]["token"].startswith("token_id:")
    body = completion(logprobs=1, echo=True, return_token_ids=True, return_tokens_as_token_ids=True)
    choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
    expected = [f"token_id:{token}" for token in [*choice["prompt_token_ids"], *choice["token_ids"]]]
    assert choice["logprobs"]["tokens"] == expected
    assert [next(iter(top)) for top in choice["logprobs"]["top_logprobs"][1:]] == expected[1:]


async def test_listed_tokens_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine):
    for path, body in ((CHAT, chat(logprobs=True)), (COMPLETIONS, completion(logprobs=0))):
        assert (await client.post(path, json={**body, "logprob_token_ids": [7, 5]})).status_code == 200
        assert engine.requests[-1].sampling.logprob_token_ids == (7, 5)


async def test_the_token_that_came_is_reported_with_the_listed_ones(client: httpx.AsyncClient):
    asked = {"logprobs": True, "top_logprobs": 5, "logprob_token_ids": [0], "return_tokens_as_token_ids": True}
    response = await client.post(CHAT, json=chat(**asked, max_tokens=1))
    (entry,) = response.json()["choices"][0]["logprobs"]["content"]
    assert entry["token"] in [one["token"] for one in entry["top_logprobs"]]
    assert response.headers["x-samewise-ignored"] == "top_logprobs"


OWN_TEMPLATE = """{% for message in messages %}{% if message.role == 'critic' %}!{{ message.content }}
{% elif message.role in ('user', 'assistant') %}{{ message.role }}:{{ message.content }}
{% endif %}{% endfor %}"""
STRICT_TEMPLATE = "{% for message in messages %}{% if message.role not in ('user', 'critic') %}" + (
    "{{ raise_exception('No such role: ' ~ message.role) }}{% endif %}{{ message.role ~ message.content }}{% endfor %}"
)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize(
    ("template", "role", "error", "reported"),
    [
        (OWN_TEMPLATE, "critic", None, []),
        (OWN_TEMPLATE, "robot", "does not show messages of this role", []),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "robot", "does not show messages of this role", []),
        (STRICT_TEMPLATE, "critic", None, []),
        (STRICT_TEMPLATE, "robot", "No such role: robot", []),
        (TEMPLATE, "robot", None, ["messages[1].role"]),
    ],
)
async def test_roles_are_those_of_the_template(
    client_with: Callable[..., httpx.AsyncClient], template: str, role: str, error: str | None, reported: list[str],
    path: str,
):  # fmt: skip
    messages = [{"role": "user", "content": "x"}, {"role": role, "content": "y"}, {"role": "user", "content": ""}]
    body = {"model": "tiny", "messages": messages}
    async with client_with(template) as client:
        if error is not None:
            assert error in await refused(client, path, body, "messages[1].role", "invalid_value")
            return
        response = await client.post(path, json=body)
        check_reported(response, response.json(), reported)


async def test_each_further_role_costs_renderings_and_there_are_few(
    client_with: Callable[..., httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
):
    counted: list[int] = []
    render = ChatTemplate.render

    def note(self: ChatTemplate, messages: Sequence[Fields], **how: Any) -> str:
        counted.append(len(messages))
        return render(self, messages, **how)

    monkeypatch.setattr(ChatTemplate, "render", note)
    async with client_with(TEMPLATE) as client:
        for num, status in ((MAX_OTHER_ROLES, 200), (MAX_OTHER_ROLES + 1, 400), (20, 400)):
            counted.clear()
            roles = ["user", *(f"role{index}" for index in range(num))]
            messages = [{"role": role, "content": "x"} for role in roles]
            assert (await client.post(CHAT, json=chat(messages=messages))).status_code == status
            assert len(counted) < 4 * MAX_OTHER_ROLES + 4
        await refused(client, CHAT, chat(messages=messages), "messages", "invalid_value")


async def test_a_strict_server_takes_only_roles_that_the_template_names(
    client_with: Callable[..., httpx.AsyncClient],
):
    messages = [{"role": "user", "content": "x"}, {"role": "robot", "content": "y"}]
    async with client_with(TEMPLATE, strict=True) as client:
        await refused(client, CHAT, chat(messages=messages), "messages[1].role", "unsupported_parameter")


async def test_variables_that_the_template_does_not_have(client_with: Callable[..., httpx.AsyncClient]):
    kwargs = {"enable_thinking": False, "mood": 1, "tone": None}
    async with client_with(SWITCHED) as client:
        response = await client.post(CHAT, json=chat(chat_template_kwargs=kwargs))
        check_reported(response, response.json(), ["chat_template_kwargs.mood"])
    async with client_with(SWITCHED, strict=True) as client:
        path = "chat_template_kwargs.mood"
        await refused(client, CHAT, chat(chat_template_kwargs=kwargs), path, "unsupported_parameter")


WITHOUT_MODEL: dict[str, Fields] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/responses/compact": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"input": "hi"},
}


@pytest.mark.parametrize("missing", [{}, {"model": None}])
@pytest.mark.parametrize("path", WITHOUT_MODEL)
async def test_a_request_without_a_model_gets_the_only_one(
    client: httpx.AsyncClient, strict_client: httpx.AsyncClient, engine: FakeEngine, path: str, missing: Fields
):
    engine.script = says("abc")
    body = {**WITHOUT_MODEL[path], **missing}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.json().get("model", "tiny") == "tiny"
    assert response.headers["x-samewise-ignored"] == "model"
    assert (await client.post(path, json={**body, "model": "other"})).status_code == 404
    assert (await strict_client.post(path, json=body)).status_code == 400
    assert (await strict_client.post(path, json={**body, "model": "tiny"})).status_code == 200


async def test_a_lenient_server_reports_unknown_fields(make_app: Callable[..., FastAPI], engine: FakeEngine):
    unknown = {"temprature": 1, "stream_options": {"include_usge": True}, "tols": None}
    async with client_of(make_app(lenient=True)) as client:
        chunks = events_of((await client.post(CHAT, json=chat(stream=True, **unknown))).text)
        reasons = {warning["path"]: warning["reason"] for warning in chunks[0]["warnings"]}
        assert reasons == {
            "stream_options.include_usge": "Unknown field; ignored. Did you mean 'include_usage'?",
            "temprature": "Unknown field; ignored. Did you mean 'temperature'?",
        }
        for path, body in WITHOUT_MODEL.items():
            response = await client.post(path, json={**body, "model": "tiny", "x-y": 1})
            assert (response.status_code, response.headers["x-samewise-ignored"]) == (200, "x-y"), path
        response = await client.post("/detokenize", json={"tokens": [1], "x-y": 1})
        assert response.headers["x-samewise-ignored"] == response.json()["warnings"][0]["path"] == "x-y"
        assert (await client.post(CHAT, json=chat(temperature=3))).status_code == 400


def models_of(model: type[RequestModel]) -> Iterator[type[RequestModel]]:
    """It, and all that are made of it."""
    if not model.__name__.startswith("_"):
        yield model
    for inner in model.__subclasses__():
        yield from models_of(inner)


def problems_of(model: type[RequestModel], value: Fields) -> object:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        return [(one["type"], one["loc"]) for one in error.errors()]


@pytest.mark.parametrize("model", sorted({*models_of(RequestModel)}, key=lambda one: one.__module__ + one.__name__))
def test_null_is_absent_in_every_object(model: type[RequestModel]):
    """For known and unknown names, and for required fields, too."""
    nothing = problems_of(model, {})
    assert problems_of(model, dict.fromkeys([*names_of(model), "unheard_of"])) == nothing
    for name in names_of(model):
        assert problems_of(model, {name: None}) == nothing


@pytest.mark.parametrize("path", [path for path in WITHOUT_MODEL if path in bodies_of(DIALECTS)])
async def test_null_is_absent_on_every_route(client: httpx.AsyncClient, engine: FakeEngine, path: str):
    engine.script = says("abc")
    body = {**WITHOUT_MODEL[path], "model": "tiny", "unheard_of": None}
    names = names_of(bodies_of(DIALECTS)[path])
    nulls = {name: None for name in names if name not in body}
    assert (await client.post(path, json=body)).status_code == 200
    before = len(engine.requests)
    response = await client.post(path, json={**body, **nulls})
    assert response.status_code == 200, response.text
    assert "x-samewise-ignored" not in response.headers
    for first, second in zip(engine.requests[:before], engine.requests[before:], strict=True):
        assert replace(bare(first), sampling=replace(first.sampling, seed=0)) == replace(
            bare(second), sampling=replace(second.sampling, seed=0)
        )


def test_no_tokenizer_s_special_tokens_are_spaced(tokenizer: Tokenizer):
    """So that `spaces_between_special_tokens` has no effect."""
    first, second = sorted(tokenizer.special_ids)[:2]
    apart = [tokenizer.decode([one], skip_special_tokens=False) for one in (first, second)]
    assert tokenizer.decode([first, second], skip_special_tokens=False) == "".join(apart)
