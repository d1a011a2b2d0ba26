"""`penalty_alpha`: what it asks the engine for, and what it cannot go together with."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from model_runner.contract import SamplingParams
from tests.server import helpers
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, refused
from tests.server.tiny_model import END, EOS, write_folder

SEARCH = SamplingParams(temperature=0.0, penalty_alpha=0.6, top_k=4, stop_token_ids=(EOS, END))


async def asked(client: httpx.AsyncClient, engine: FakeEngine, **fields: Any) -> SamplingParams:
    """The engine's sampling parameters for a request, without the drawn seed."""
    request = await helpers.requested(client, engine, COMPLETIONS, completion(**fields))
    return replace(request.sampling, seed=0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"penalty_alpha": 0.6}, SEARCH),
        ({"penalty_alpha": 0.6, "top_k": 9, "temperature": 0}, replace(SEARCH, top_k=9)),
        ({"penalty_alpha": 1, "top_k": 1, "top_p": 1, "min_p": 0, "typical_p": 1, "speculation": "off"},
         replace(SEARCH, penalty_alpha=1.0, top_k=1)),
        ({"penalty_alpha": 0.6, "repetition_penalty": 1.5, "logprobs": 2, "min_tokens": 3, "bad_words": ["a"]},
         replace(SEARCH, repetition_penalty=1.5, logprobs=2, min_tokens=3, bad_words=((97,), (32, 97)))),
        ({"penalty_alpha": 0, "top_k": 9}, SamplingParams(top_k=9, stop_token_ids=(EOS, END))),
        ({"penalty_alpha": 0, "top_k": 0}, SamplingParams(stop_token_ids=(EOS, END))),
    ],
)  # fmt: skip
async def test_what_the_engine_is_asked_for(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], expected: SamplingParams
):
    assert await asked(client, engine, **fields) == expected


async def test_defaults_of_the_model_for_draws_do_not_matter_and_penalties_do(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path
):
    draws = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "typical_p": 0.5, "penalty_alpha": 0.3}
    folder = write_folder(tmp_path / "m", generation={**draws, "repetition_penalty": 1.25})
    async with client_of(make_app(folder)) as client:
        assert await asked(client, engine, penalty_alpha=0.6) == replace(SEARCH, repetition_penalty=1.25)
        assert (await asked(client, engine)).penalty_alpha == 0


@pytest.mark.parametrize("speculation", ["off", "lookahead"])
async def test_the_default_speculation_of_the_server_is_left_out(
    make_app: Callable[..., FastAPI], engine: FakeEngine, speculation: str
):
    async with client_of(make_app(speculation=speculation)) as client:
        await asked(client, engine, penalty_alpha=0.6)
        assert engine.requests[-1].speculation is None
        await asked(client, engine, penalty_alpha=0)
        assert (engine.requests[-1].speculation is None) == (speculation == "off")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"penalty_alpha": 1.1}, "penalty_alpha", "decimal_above_max_value"),
        ({"penalty_alpha": -0.1}, "penalty_alpha", "decimal_below_min_value"),
        ({"penalty_alpha": "0.6"}, "penalty_alpha", "invalid_type"),
        ({"penalty_alpha": True}, "penalty_alpha", "invalid_type"),
        ({"penalty_alpha": 0.6, "top_k": 0}, "top_k", "integer_below_min_value"),
        ({"penalty_alpha": 0.6, "top_k": -1}, "top_k", "integer_below_min_value"),
        ({"penalty_alpha": 0.6, "top_k": 65}, "top_k", "integer_above_max_value"),
        *(({"penalty_alpha": 0.6, **other}, "penalty_alpha", "invalid_parameter_combination")
          for other in ({"temperature": 0.5}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.9},
                        {"speculation": {}}, {"speculation": {"method": "lookahead"}},
                        {"prediction": {"type": "content", "content": "x"}})),
    ],
)  # fmt: skip
async def test_what_it_cannot_go_together_with(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str
):
    message = await refused(client, CHAT, chat(**fields), param, code)
    assert all(f"'{name}'" in message for name in fields) or len(fields) == 1


async def test_more_candidates_than_a_step_holds(client: httpx.AsyncClient, engine: FakeEngine):
    engine.info_ = replace(engine.info_, max_num_batched_tokens=8)
    assert (await asked(client, engine, penalty_alpha=0.5, top_k=7)).num_candidates == 7
    body = completion(penalty_alpha=0.5, top_k=8)
    message = await refused(client, COMPLETIONS, body, "top_k", "integer_above_max_value")
    assert "<= 7" in message


async def test_candidates_need_room_in_memory_but_not_in_the_context(
    strict_client: httpx.AsyncClient, client: httpx.AsyncClient, engine: FakeEngine
):
    body = {"prompt": [65] * 240, "max_tokens": 16, "penalty_alpha": 0.5, "top_k": 9}
    await asked(client, engine, **body)
    engine.info_ = replace(engine.info_, num_blocks=16)  # as many places as the context has
    message = await refused(strict_client, COMPLETIONS, completion(**body), "prompt", "context_length_exceeded")
    assert "holds 247 tokens" in message
    await asked(client, engine, **{**body, "max_tokens": 7})
    await asked(client, engine, **{**body, "max_tokens": None, "truncate_prompt_tokens": -1})
    request = engine.requests[-1]
    assert len(request.prompt) + request.max_tokens == 247
    await asked(client, engine, **{**body, "penalty_alpha": 0})


async def test_capabilities_name_what_it_excludes(client: httpx.AsyncClient):
    fields = (await client.get("/v1/capabilities")).json()["endpoints"][CHAT]
    assert {"temperature", "speculation", "use_beam_search"} <= set(fields["penalty_alpha"]["excludes"])
    assert "penalty_alpha" in fields["temperature"]["excludes"]
