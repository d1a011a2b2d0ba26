"""Classifier-free guidance in the API: what the engine is asked for, and what is refused."""

from typing import Any

import httpx
import pytest

from model_runner.contract import Speculation
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, completion, refused, requested

SYSTEM = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "hi"}


async def test_in_a_completion_it_stands_in_place_of_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    negative = await requested(client, engine, COMPLETIONS, completion(prompt="rude"))
    guidance = {"scale": 1.5, "negative_prompt": "rude"}
    request = await requested(client, engine, COMPLETIONS, completion(prompt=["hi", "ho"], guidance=guidance, n=2))
    assert (request.sampling.guidance, request.guide) == (1.5, negative.prompt)
    assert [other.guide for other in engine.requests[-2:]] == [negative.prompt] * 2
    assert request.speculation == Speculation("auto")


async def test_in_a_chat_it_stands_in_place_of_the_system_message(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    negative = await requested(client, engine, CHAT, chat(messages=[{**SYSTEM, "content": "be rude"}, USER]))
    guidance = {"scale": 3, "negative_prompt": "be rude"}
    for messages in ([SYSTEM, USER], [USER], [{**SYSTEM, "role": "developer"}, USER]):
        request = await requested(client, engine, CHAT, chat(messages=messages, guidance=guidance))
        assert (request.sampling.guidance, request.guide) == (3.0, negative.prompt)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_left_out_it_is_the_last_token(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    body = (chat if path == CHAT else completion)(guidance={"scale": 0})
    request = await requested(client, engine, path, body)
    assert (request.sampling.guidance, request.guide) == (0.0, request.prompt[-1:])


async def test_a_scale_of_one_changes_nothing(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    request = await requested(client, engine, COMPLETIONS, completion(guidance={"scale": 1, "negative_prompt": "rude"}))
    assert (request.sampling.guidance, request.guide) == (None, ())


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"guidance": {}}, "guidance.scale", "missing_required_parameter"),
        ({"guidance": {"scale": -1}}, "guidance.scale", "decimal_below_min_value"),
        ({"guidance": {"scale": 101}}, "guidance.scale", "decimal_above_max_value"),
        ({"guidance": {"scale": "much"}}, "guidance.scale", "invalid_type"),
        ({"guidance": {"scale": 2, "negative_prompt": ""}}, "guidance.negative_prompt", "string_below_min_length"),
        ({"guidance": {"scale": 2, "negative": "x"}}, "guidance.negative", "unknown_parameter"),
        ({"guidance": 2}, "guidance", "invalid_type"),
        (
            {"guidance": {"scale": 2, "negative_prompt": "x" * 300}},
            "guidance.negative_prompt",
            "context_length_exceeded",
        ),
        ({"guidance": {"scale": 2}, "beam_search": {"width": 2}}, "guidance", "invalid_parameter_combination"),
        ({"guidance": {"scale": 2}, "use_beam_search": True}, "guidance", "invalid_parameter_combination"),
        ({"guidance": {"scale": 2}, "penalty_alpha": 0.6}, "guidance", "invalid_parameter_combination"),
        ({"guidance": {"scale": 2}, "dola": {"layers": "low"}}, "dola", "invalid_parameter_combination"),
    ],
)
async def test_what_is_refused(client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str) -> None:
    await refused(client, COMPLETIONS, completion(**fields), param, code)


async def test_a_pair_of_fields_excludes_each_other_once(client: httpx.AsyncClient) -> None:
    for fields in (await client.get("/v1/capabilities")).json()["endpoints"].values():
        for name, field in fields.items():
            assert len(field["excludes"]) == len(set(field["excludes"])), name
            assert all(name in fields[other]["excludes"] for other in field["excludes"])
