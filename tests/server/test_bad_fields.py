"""Each field has its limits, each violation its own error, and nothing is ignored in silence."""

from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, completion, refused

pytestmark = pytest.mark.usefixtures("goes_on")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"temperature": 10**400}, "temperature", "decimal_above_max_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": 1.0}, "max_tokens", "invalid_type"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
        ({"n": True}, "n", "invalid_type"),
        ({"stream": 1}, "stream", "invalid_type"),
        ({"stream": "true"}, "stream", "invalid_type"),
        ({"stop": 3}, "stop", "invalid_type"),
        ({"stop": ["a", None]}, "stop[1]", "invalid_type"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5", "invalid_type"),
        ({"seed": 0.5}, "seed", "invalid_type"),
        ({"model": 3}, "model", "invalid_type"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [3]}, "messages[0]", "invalid_type"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text",
         "invalid_type"),
        ({"temperature": 200}, "temperature", "decimal_above_max_value"),
        ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
        ({"top_p": 1.1}, "top_p", "decimal_above_max_value"),
        ({"presence_penalty": -2.5}, "presence_penalty", "decimal_below_min_value"),
        ({"frequency_penalty": 3}, "frequency_penalty", "decimal_above_max_value"),
        ({"n": 10**9}, "n", "integer_above_max_value"),
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
        ({"seed": 2**63}, "seed", "integer_above_max_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "integer_above_max_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "decimal_above_max_value"),
        ({"logit_bias": {"320": 1}}, "logit_bias.320", "integer_above_max_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"07": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {str(i): 0 for i in range(2000)}}, "logit_bias", "object_above_max_properties"),
        ({"typical_p": 0}, "typical_p", "decimal_below_min_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
        ({"top_k": -2}, "top_k", "integer_below_min_value"),
        ({"min_tokens": 6}, "min_tokens", "integer_above_max_value"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "integer_below_min_value"),
        ({"stop": [str(i) for i in range(200)]}, "stop", "array_above_max_length"),
        ({"stop": ""}, "stop", "string_below_min_length"),
        ({"stop": ["a", ""]}, "stop[1]", "string_below_min_length"),
        ({"stop": "x" * 2000}, "stop", "string_above_max_length"),
        ({"learn": "no"}, "learn", "invalid_type"),
        ({"learn": 0}, "learn", "invalid_type"),
        ({"cache_salt": ""}, "cache_salt", "string_below_min_length"),
        ({"cache_salt": "x" * 129}, "cache_salt", "string_above_max_length"),
        ({"bad_words": [""]}, "bad_words[0]", "string_below_min_length"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty_array"),
        ({"allowed_token_ids": [5, 320]}, "allowed_token_ids[1]", "integer_above_max_value"),
        ({"allowed_token_ids": [301], "min_tokens": 1}, "allowed_token_ids", "invalid_value"),
        ({"allowed_token_ids": [120], "bad_words": ["x"]}, "allowed_token_ids", "invalid_value"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "integer_below_min_value"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids[0]", "integer_above_max_value"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "object_above_max_properties"),
        ({"metadata": {"k": "x" * 513}}, "metadata.k", "string_above_max_length"),
        ({"metadata": {"k" * 65: "x"}}, "metadata." + "k" * 64 + "...", "string_above_max_length"),
        ({"user": "x" * 65}, "user", "string_above_max_length"),
        ({"safety_identifier": "x" * 129}, "safety_identifier", "string_above_max_length"),
        ({"prompt_cache_key": "x" * 65}, "prompt_cache_key", "string_above_max_length"),
        ({"prompt_cache_options": {"mode": "x" * 65536}}, "prompt_cache_options", "invalid_value"),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url",
         "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages[0].content[0].type",
         "invalid_value"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f", "input": ""},
                                                             "function": {"name": "f", "arguments": ""}}]}]},
         "messages[0].tool_calls[0].function", "unknown_parameter"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge",
         "unknown_parameter"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "invalid_parameter_combination"),
        ({"top_logprobs": 1}, "top_logprobs", "invalid_value"),
        ({"max_completion_tokens": 3}, "max_tokens", "invalid_parameter_combination"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message",
         "invalid_parameter_combination"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "invalid_type"),
        ({"priority": 1}, "priority", "unsupported_value"),
        ({"store": 1}, "store", "invalid_type"),
        ({"service_tier": "cheap"}, "service_tier", "invalid_value"),
        ({"prompt_cache_retention": "25h"}, "prompt_cache_retention", "invalid_value"),
        ({"reasoning_effort": "lots"}, "reasoning_effort", "invalid_value"),
        ({"verbosity": 3}, "verbosity", "invalid_value"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_value"),
        ({"stream": True, "stream_options": {"include_obfuscation": 1}}, "stream_options.include_obfuscation",
         "invalid_type"),
        ({"speculation": True}, "speculation", "invalid_type"),
        ({"speculation": 3}, "speculation", "invalid_type"),
        ({"speculation": ["ngram"]}, "speculation", "invalid_type"),
        ({"speculation": "ngram"}, "speculation", "invalid_value"),
        ({"speculation": {"metod": "ngram"}}, "speculation.metod", "unknown_parameter"),
        ({"speculation": {"method": 1}}, "speculation.method", "invalid_type"),
        ({"speculation": {"method": "x" * 65}}, "speculation.method", "string_above_max_length"),
        ({"speculation": {"method": "medusa"}}, "speculation.method", "unsupported_value"),
        ({"speculation": {"method": "off"}}, "speculation.method", "unsupported_value"),
        ({"speculation": {"method": "medusa", "num_tokens": 0}}, "speculation.method", "unsupported_value"),
        ({"speculation": {"method": "prediction"}}, "speculation.method", "invalid_parameter_combination"),
        ({"speculation": {"num_tokens": 1.0}}, "speculation.num_tokens", "invalid_type"),
        ({"speculation": {"num_tokens": True}}, "speculation.num_tokens", "invalid_type"),
        ({"speculation": {"num_tokens": -1}}, "speculation.num_tokens", "integer_below_min_value"),
        ({"speculation": {"num_tokens": 65}}, "speculation.num_tokens", "integer_above_max_value"),
        ({"speculation": {"verify": "exact"}}, "speculation.verify", "invalid_value"),
        ({"speculation": {"verify": True}}, "speculation.verify", "invalid_value"),
        ({"contrastive": {}}, "contrastive", "unsupported_parameter"),
        ({"contrastive": True}, "contrastive", "invalid_type"),
        ({"contrastive": {"alfa": 0.1}}, "contrastive.alfa", "unknown_parameter"),
        ({"contrastive": {"alpha": 1.5}}, "contrastive.alpha", "decimal_above_max_value"),
        ({"contrastive": {"alpha": -0.1}}, "contrastive.alpha", "decimal_below_min_value"),
        ({"contrastive": {"alpha": "0.1"}}, "contrastive.alpha", "invalid_type"),
        ({"contrastive": {"beta": -1}}, "contrastive.beta", "decimal_below_min_value"),
        ({"contrastive": {"beta": 11}}, "contrastive.beta", "decimal_above_max_value"),
        ({"contrastive": {"expert_weight": 0}}, "contrastive.expert_weight", "decimal_below_min_value"),
        ({"contrastive": {"expert_weight": 12}}, "contrastive.expert_weight", "decimal_above_max_value"),
        ({"contrastive": {"temperature": 0}}, "contrastive.temperature", "decimal_below_min_value"),
        ({"contrastive": {"temperature": 1000}}, "contrastive.temperature", "decimal_above_max_value"),
        ({"contrastive": {"amateur": 3}}, "contrastive.amateur", "invalid_type"),
        ({"contrastive": {"amateur": ""}}, "contrastive.amateur", "string_below_min_length"),
        ({"contrastive": {}, "dola": {"layers": "low"}}, "contrastive", "invalid_parameter_combination"),
        ({"dola": "low"}, "dola", "invalid_type"),
        ({"dola": {}}, "dola.layers", "missing_required_parameter"),
        ({"dola": {"layers": "middle"}}, "dola.layers", "invalid_value"),
        ({"dola": {"layers": 3}}, "dola.layers", "invalid_type"),
        ({"dola": {"layers": []}}, "dola.layers", "empty_array"),
        ({"dola": {"layers": [0] * 257}}, "dola.layers", "array_above_max_length"),
        ({"dola": {"layers": [0, -1]}}, "dola.layers[1]", "integer_below_min_value"),
        ({"dola": {"layers": [0, 4]}}, "dola.layers[1]", "integer_above_max_value"),
        ({"dola": {"layers": [1.0]}}, "dola.layers[0]", "invalid_type"),
        ({"dola": {"layers": ["low"]}}, "dola.layers[0]", "invalid_type"),
        ({"dola": {"layers": "low", "alpha": 2}}, "dola.alpha", "decimal_above_max_value"),
        ({"prediction": "x"}, "prediction", "invalid_type"),
        ({"prediction": {"content": "x"}}, "prediction.type", "missing_required_parameter"),
        ({"prediction": {"type": "content"}}, "prediction.content", "missing_required_parameter"),
        ({"prediction": {"type": "content", "content": None}}, "prediction.content", "missing_required_parameter"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type", "invalid_value"),
        ({"prediction": {"type": "content", "content": []}}, "prediction.content", "empty_array"),
        ({"prediction": {"type": "content", "content": ["x"]}}, "prediction.content[0]", "invalid_type"),
        ({"prediction": {"type": "content", "content": "x" * 257}}, "prediction", "context_length_exceeded"),
        ({"prediction": {"type": "content", "content": "x" * 10**6}}, "prediction", "context_length_exceeded"),
    ],
)  # fmt: skip
async def test_fields_of_chat(client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    message = await refused(client, CHAT, chat(**fields), param, code)
    assert param.partition(".")[0].partition("[")[0] in message or code == "invalid_value"


async def test_all_strange_keys_of_logit_bias_are_named(client: httpx.AsyncClient):
    message = await refused(
        client, CHAT, chat(logit_bias={"bad": 1, "5": 1, "worse": 1}), "logit_bias", "invalid_value"
    )
    assert "'bad', 'worse'" in message


async def test_a_token_out_of_vocabulary_is_named_with_the_size_of_that(client: httpx.AsyncClient):
    message = await refused(client, CHAT, chat(logit_bias={"320": 1}), "logit_bias.320", "integer_above_max_value")
    assert "token 320 is out of vocabulary" in message
    assert "320 tokens" in message


async def test_messages_say_what_is_expected(client: httpx.AsyncClient):
    message = await refused(client, CHAT, chat(temperature=200), "temperature", "decimal_above_max_value")
    assert message == (
        "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 200 instead."
    )
    message = await refused(client, CHAT, chat(temprature=1), "temprature", "unknown_parameter")
    assert message == (
        "Unknown parameter: 'temprature'. Did you mean 'temperature'? A server started with --lenient ignores such "
        "fields, and reports them."
    )
    message = await refused(client, CHAT, chat(n="x"), "n", "invalid_type")
    assert message == "Invalid type for 'n': expected an integer, but got a string instead."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("web_search_options", {}),
        ("moderation", {"model": "x"}),
        ("best_of", 2),
        ("logits_processors", ["x"]),
        ("chat_template", "{{ messages }}"),
        ("documents", [{"text": "x"}]),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(client: httpx.AsyncClient, name: str, value: object):
    message = await refused(client, CHAT, chat(**{name: value}), name, "unsupported_parameter")
    assert f"'{name}'" in message
    assert (await client.post(CHAT, json=chat(**{name: None}))).status_code == 200


async def test_what_asks_for_nothing_is_accepted(client: httpx.AsyncClient, engine: FakeEngine):
    neutral = {
        "tool_choice": "none", "function_call": "auto", "response_format": {"type": "text"}, "modalities": ["text"],
        "use_beam_search": False, "best_of": 1, "early_stopping": False, "parallel_tool_calls": True, "store": False,
        "user": "u", "safety_identifier": "s", "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k",
        "prompt_cache_retention": "in_memory", "stop": [], "priority": 0,
    }  # fmt: skip
    for body in (chat(seed=1), chat(seed=1, **neutral)):
        assert (await client.post(CHAT, json=body)).status_code == 200
    assert engine.requests[0].sampling == engine.requests[1].sampling
    assert engine.requests[0].prompt == engine.requests[1].prompt


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": []}, "prompt", "empty_array"),
        ({"prompt": [[]]}, "prompt[0]", "empty_array"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type"),
        ({"prompt": [[1], [1, 320]]}, "prompt[1][1]", "integer_above_max_value"),
        ({"prompt": [1, 2, 99999]}, "prompt[2]", "integer_above_max_value"),
        ({"prompt": [-1]}, "prompt[0]", "integer_below_min_value"),
        ({"prompt": ["a"] * 1025}, "prompt", "array_above_max_length"),
        ({"prompt": ["a"] * 1000, "n": 2}, "n", "integer_above_max_value"),
        ({"logprobs": 21}, "logprobs", "integer_above_max_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"max_completion_tokens": 1}, "max_completion_tokens", "unknown_parameter"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction", "unknown_parameter"),
        ({"speculation": "on"}, "speculation", "invalid_value"),
        ({"speculation": {"method": "mtp"}}, "speculation.method", "unsupported_value"),
        ({"speculation": {"method": "prediction"}}, "speculation.method", "invalid_parameter_combination"),
    ],
)
async def test_fields_of_completions(client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    await refused(client, COMPLETIONS, completion(**fields), param, code)
