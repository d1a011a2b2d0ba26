"""The request field for speculation, the resulting engine parameters, and the answer's report."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai import OpenAI

from model_runner.contract import Speculation
from model_runner.runner_interface import SpeculationStats
from scheduler.interface import EngineStats
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, scripted
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, events_of, refused, requested
from tests.server.test_endpoints import read_metrics

BOTH = pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion)], ids=["chat", "text"])
AUTO = Speculation("auto")
LOW = {"type": "content", "content": "the low"}
LOW_TOKENS = (257, 32, 260)


def predicted(**changes: Any) -> Speculation:
    return replace(Speculation("prediction", prediction=LOW_TOKENS), **changes)


async def told(client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]) -> Speculation | None:
    """The engine's speculation parameters for a request."""
    return (await requested(client, engine, path, body)).speculation


@BOTH
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, AUTO),
        ("off", None),
        ({}, AUTO),
        ({"num_tokens": 0}, None),
        ({"method": "suffix", "num_tokens": 0, "verify": "typical"}, None),
        ({"method": None, "num_tokens": None, "verify": None}, AUTO),
        ({"method": "auto"}, AUTO),
        ({"method": "lookahead"}, Speculation("lookahead")),
        ({"method": "ngram"}, Speculation("suffix")),
        ({"num_tokens": 64}, Speculation("auto", 64)),
        ({"verify": "rejection"}, Speculation("auto", None, "rejection")),
        ({"method": "suffix", "num_tokens": 1, "verify": "typical"}, Speculation("suffix", 1, "typical")),
    ],
)
async def test_the_field_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, make: Callable[..., dict], asked: object, expected: object
):
    assert await told(client, engine, path, make(speculation=asked)) == expected


@pytest.mark.parametrize(
    ("setting", "silent", "empty"),
    [
        ("auto", AUTO, AUTO),
        ("lookahead", Speculation("lookahead"), Speculation("lookahead")),
        ("off", None, AUTO),
        ("prediction", None, AUTO),
    ],
)
async def test_the_servers_default(
    make_app: Callable[..., FastAPI], engine: FakeEngine, setting: str, silent: object, empty: object
):
    async with client_of(make_app(speculation=setting)) as client:
        assert await told(client, engine, CHAT, chat()) == silent
        assert await told(client, engine, CHAT, chat(speculation={})) == empty
        assert await told(client, engine, CHAT, chat(speculation={"method": "suffix"})) == Speculation("suffix")
        assert await told(client, engine, CHAT, chat(prediction=LOW)) == predicted()
        answer = (await client.get("/v1/capabilities")).json()
    default = "off" if silent is None else silent.method
    assert answer["speculation"]["default"] == default
    field = answer["endpoints"][CHAT]["speculation"]["default"]
    assert field == ("off" if silent is None else {"method": default})


async def test_several_prompts_and_choices_share_it(client: httpx.AsyncClient, engine: FakeEngine):
    await client.post(COMPLETIONS, json=completion(prompt=["a", "b"], n=2, speculation={"method": "lookahead"}))
    assert [request.speculation for request in engine.requests] == [Speculation("lookahead")] * 2


async def test_messages_list_what_is_there(client: httpx.AsyncClient):
    async def message(method: str) -> str:
        body = chat(speculation={"method": method})
        return await refused(client, CHAT, body, "speculation.method", "unsupported_value")

    there = "Supported values are: 'auto', 'lookahead', 'prediction', 'suffix'."
    assert await message("look-ahead") == (
        "Unsupported value: 'speculation.method' does not support 'look-ahead' with this server. "
        f"Did you mean 'lookahead'? {there}"
    )
    assert "Use 'suffix', or 'draft_model'" in await message("early_exit")
    assert await message("hydra") == (
        f"Unsupported value: 'speculation.method' does not support 'hydra' with this server. {there}"
    )
    text = await refused(client, CHAT, chat(speculation=3), "speculation", "invalid_type")
    assert text == "Invalid type for 'speculation': expected a string or an object, but got an integer instead."


async def test_an_engine_without_speculation(make_app: Callable[..., FastAPI], engine: FakeEngine):
    engine.info_ = replace(engine.info_, speculation_methods=())
    async with client_of(make_app()) as client:
        for asked in (None, "off", {"num_tokens": 0}):
            assert await told(client, engine, CHAT, chat(speculation=asked)) is None
        for asked in ({}, {"method": "auto"}, {"verify": "typical"}):
            text = await refused(client, CHAT, chat(speculation=asked), "speculation.method", "unsupported_value")
            assert text.endswith("This server has no speculation method.")
        await refused(client, CHAT, chat(prediction=LOW), "prediction", "unsupported_parameter")
        assert (await client.get("/v1/capabilities")).json()["speculation"]["default"] == "off"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, predicted()),
        ({}, predicted()),
        ({"num_tokens": 4}, predicted(num_tokens=4)),
        ({"verify": "rejection"}, predicted(verify="rejection")),
        ({"method": "prediction"}, predicted()),
        ({"method": "auto", "num_tokens": 9}, predicted(method="auto", num_tokens=9)),
    ],
)
async def test_a_prediction_rides_along(
    client: httpx.AsyncClient, engine: FakeEngine, asked: object, expected: Speculation
):
    assert await told(client, engine, CHAT, chat(prediction=LOW, speculation=asked)) == expected


@pytest.mark.parametrize(
    "asked", ["off", {"num_tokens": 0}, {"method": "lookahead"}, {"method": "auto", "num_tokens": 0}]
)
async def test_a_prediction_that_nothing_follows_is_refused(client: httpx.AsyncClient, asked: object):
    body = chat(prediction=LOW, speculation=asked)
    message = await refused(client, CHAT, body, "prediction", "invalid_parameter_combination")
    assert "'prediction'" in message
    assert "'speculation'" in message


async def test_a_misspelt_method_is_told_before_what_it_does_not_go_with(client: httpx.AsyncClient):
    body = chat(prediction=LOW, speculation={"method": "predicton"})
    message = await refused(client, CHAT, body, "speculation.method", "unsupported_value")
    assert "Did you mean 'prediction'?" in message


async def test_the_prediction_is_tokenised_as_plain_text(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
):
    async def tokens(content: object) -> tuple[int, ...]:
        speculation = await told(client, engine, CHAT, chat(prediction={"type": "content", "content": content}))
        assert speculation is not None
        return speculation.prediction

    assert await tokens("the low") == LOW_TOKENS
    assert await tokens([{"type": "text", "text": "the"}, {"type": "text", "text": "low"}]) == (257, 10, 260)
    assert await tokens("") == ()
    longest = await tokens("x" * 256)
    assert len(longest) == engine.info_.max_model_len
    assert tokenizer.decode(longest, skip_special_tokens=False) == "x" * 256


async def test_a_prediction_has_only_tokens_that_the_model_has(client: httpx.AsyncClient, engine: FakeEngine):
    engine.info_ = replace(engine.info_, vocab_size=304)
    body = chat(prediction={"type": "content", "content": "a<|end|>"})
    assert (await client.post(CHAT, json=body)).status_code == 200
    engine.info_ = replace(engine.info_, vocab_size=303)
    body["messages"] = [{"role": "user", "content": "a"}]
    text = (await client.post(CHAT, json=body)).json()["error"]["message"]
    assert "which the model does not have" in text


async def test_truncation_of_the_prompt_does_not_excuse_a_long_prediction(client: httpx.AsyncClient):
    body = chat(prediction={"type": "content", "content": "x" * 10**5}, truncate_prompt_tokens=3)
    await refused(client, CHAT, body, "prediction", "context_length_exceeded")


@BOTH
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, None),
        ("off", None),
        ({"verify": "match"}, None),
        ({"verify": "typical", "num_tokens": 0}, None),
        ({"verify": "rejection"}, "rejection"),
        ({"verify": "typical"}, "typical"),
    ],
)
async def test_the_answer_says_how_it_was_verified(
    client: httpx.AsyncClient, path: str, make: Callable[..., dict], stream: bool, asked: object, expected: str | None
):
    response = await client.post(path, json=make(speculation=asked, stream=stream))
    parts = events_of(response.text) if stream else [response.json()]
    assert [part.get("verification") for part in parts] == [expected] * len(parts)
    assert all(("verification" in part) == (expected is not None) for part in parts)


def details(usage: dict[str, Any]) -> tuple[int, int]:
    counts = usage["completion_tokens_details"]
    return counts["accepted_prediction_tokens"], counts["rejected_prediction_tokens"]


@BOTH
async def test_usage_counts_drafts_over_all_choices(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, make: Callable[..., dict]
):
    """Steps of 3, 3 and 1 tokens, each with 3 drafts: the last step has room for one of the accepted two."""
    engine.tokens_per_step, engine.counts_drafts = 3, True
    body = make(max_tokens=7, n=2)
    assert details((await client.post(path, json=body)).json()["usage"]) == (2 * 5, 2 * 4)
    response = await client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert details(events_of(response.text)[-1]["usage"]) == (2 * 5, 2 * 4)


async def test_usage_of_several_prompts(client: httpx.AsyncClient, engine: FakeEngine):
    engine.tokens_per_step, engine.counts_drafts = 3, True
    answer = (await client.post(COMPLETIONS, json=completion(prompt=["a", "b"], max_tokens=7))).json()
    assert details(answer["usage"]) == (2 * 5, 2 * 4)


async def test_usage_so_far(client: httpx.AsyncClient, engine: FakeEngine):
    engine.tokens_per_step, engine.counts_drafts = 3, True
    options = {"continuous_usage_stats": True, "include_usage": True}
    response = await client.post(COMPLETIONS, json=completion(max_tokens=7, stream=True, stream_options=options))
    assert [details(chunk["usage"]) for chunk in events_of(response.text)] == [(2, 1), (4, 2), (5, 4), (5, 4)]


async def test_drafts_behind_a_stop_string_are_no_output(client: httpx.AsyncClient, engine: FakeEngine):
    """The second step is `defgh`: the first four are accepted drafts, and only `d` belongs to the answer."""
    engine.tokens_per_step, engine.counts_drafts, engine.script = 5, True, scripted(b"ababcdefgh")
    answer = (await client.post(CHAT, json=chat(max_tokens=30, stop="d", return_token_ids=True))).json()
    assert answer["choices"][0]["message"]["content"] == "ababc"
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"]) == 6
    assert details(answer["usage"]) == (4 + 1, 1 + 1 + 3)


async def test_metrics_by_method_and_position(client: httpx.AsyncClient, engine: FakeEngine):
    ngram = SpeculationStats("ngram", 30, (8, 4, 1), (10, 8, 4), 10, 23, draft_s=0.5, verify_s=2.25)
    suffix = SpeculationStats("suffix", 2, (2,), (2,), 2, 4, draft_s=0.125, verify_s=0.25)
    engine.stats = EngineStats(speculation=(ngram, suffix))
    seen = {name: value for name, value in (await read_metrics(client)).items() if "spec_decode" in name}
    prefix = "samewise:spec_decode_"
    assert seen == {
        **{f"{prefix}{name}_total,ngram": value for name, value in {
            "num_drafts": 10, "num_emitted_tokens": 23, "num_draft_tokens": 30, "num_accepted_tokens": 13,
            "draft_seconds": 0.5, "verify_seconds": 2.25,
        }.items()},
        **{f"{prefix}{name}_total,suffix": value for name, value in {
            "num_drafts": 2, "num_emitted_tokens": 4, "num_draft_tokens": 2, "num_accepted_tokens": 2,
            "draft_seconds": 0.125, "verify_seconds": 0.25,
        }.items()},
        **{f"{prefix}num_accepted_tokens_per_pos_total,ngram,{i}": n for i, n in enumerate((8, 4, 1))},
        **{f"{prefix}num_draft_tokens_per_pos_total,ngram,{i}": n for i, n in enumerate((10, 8, 4))},
        f"{prefix}num_accepted_tokens_per_pos_total,suffix,0": 2,
        f"{prefix}num_draft_tokens_per_pos_total,suffix,0": 2,
    }  # fmt: skip


async def test_without_speculation_there_is_nothing_to_count(client: httpx.AsyncClient):
    assert not [name for name in await read_metrics(client) if "spec_decode" in name]


async def test_the_document_shows_examples(client: httpx.AsyncClient):
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    fields = schemas["ChatCompletionRequest"]["properties"]
    for name in ("speculation", "prediction"):
        for example in fields[name]["examples"]:
            assert (await client.post(CHAT, json=chat(**{name: example}))).status_code == 200
    assert "verification" in schemas["ChatCompletion"]["properties"]
    assert "verification" not in schemas["ChatCompletion"]["required"]
    assert "prediction" not in schemas["CompletionRequest"]["properties"]


def test_official_client(openai_client: OpenAI, engine: FakeEngine):
    engine.tokens_per_step, engine.counts_drafts = 3, True
    answer = openai_client.chat.completions.create(
        **chat(max_tokens=7, n=2), prediction=LOW, extra_body={"speculation": {"num_tokens": 5, "verify": "typical"}}
    )
    assert engine.requests[-1].speculation == predicted(num_tokens=5, verify="typical")
    assert answer.verification == "typical"
    counts = answer.usage.completion_tokens_details
    assert (counts.accepted_prediction_tokens, counts.rejected_prediction_tokens) == (10, 8)
    parts = [{"type": "text", "text": "the low"}]
    stream = openai_client.chat.completions.create(
        **chat(max_tokens=7), prediction={"type": "content", "content": parts}, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *_, last = list(stream)
    assert engine.requests[-1].speculation == predicted()
    assert last.usage.completion_tokens_details.accepted_prediction_tokens == 5
    text = openai_client.completions.create(**completion(), extra_body={"speculation": "off"})
    assert engine.requests[-1].speculation is None
    assert not hasattr(text, "verification")
