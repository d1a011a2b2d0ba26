"""Prompts and token details repeated in an answer: limited in size, and built once for all choices."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.generation.planning.limits import MAX_ANSWER_MIB
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, error_of
from tests.server.responses.calling import RESPONSES, asking
from tests.server.test_streams import events

LONG = "the low " * 3000
"""A text of 9,000 tokens."""
LETTERS = [*range(ord("a"), ord("z") + 1)]
"""All that the model writes."""
REPEATED = {"echo": True, "logprobs": 2, "prompt_logprobs": 3, "return_token_ids": True}


@pytest.fixture(autouse=True)
def large(engine: FakeEngine) -> None:
    engine.info_ = replace(engine.info_, max_model_len=100_000, num_blocks=10_000)


@pytest.fixture
async def client(make_app: Callable[..., FastAPI]) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app()) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (COMPLETIONS, completion(prompt=LONG, prompt_logprobs=20, n=8), "prompt_logprobs", ("'n' (8)", "(1)")),
        (COMPLETIONS, completion(prompt=[LONG] * 3, prompt_logprobs=20, n=2), "prompt_logprobs", ("'n' (2)", "(3)")),
        (COMPLETIONS, completion(prompt=LONG, echo=True, logprobs=5, n=16), "logprobs", ("'echo' 1)", "'n' (16)")),
        (COMPLETIONS, completion(prompt=LONG, echo=True, logprobs=5, n=16, stream=True), "logprobs", ("'echo' 1)",)),
        (COMPLETIONS, completion(prompt="\x01" * 90_000, echo=True, n=128), "echo", ("'echo' 66", "'n' (128)")),
        (COMPLETIONS, completion(logprobs=5, best_of=20, n=1, max_tokens=9000), "logprobs", ("'best_of' (20)",)),
        (CHAT, chat(logprobs=True, top_logprobs=20, n=8, max_tokens=9000), "top_logprobs", ("'max_tokens' (9000)",)),
        (CHAT, chat(return_token_ids=True, n=64, max_tokens=90_000), "return_token_ids", ("'n' (64)",)),
        (RESPONSES, asking(stream=True, top_logprobs=20, max_output_tokens=90_000), "top_logprobs", ("(90000)",)),
    ],
)
async def test_answers_that_could_be_too_large_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any], param: str, said: tuple[str, ...]
):
    error = error_of(await client.post(path, json=body))
    assert (error["param"], error["code"]) == (param, "invalid_parameter_combination")
    assert f"this server allows {MAX_ANSWER_MIB} MiB" in error["message"]
    assert all(text in error["message"] for text in said), error["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion(prompt=LONG, prompt_logprobs=20)),
        (COMPLETIONS, completion(prompt=LONG, echo=True, n=8)),
        (CHAT, chat(messages=[{"role": "user", "content": LONG}], prompt_logprobs=20, n=8)),
        (CHAT, chat(logprobs=True, top_logprobs=20, n=8, max_tokens=9000, stream=True, stop_token_ids=LETTERS)),
    ],
)
async def test_what_is_told_once_or_as_it_comes_counts_once_or_not_at_all(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
):
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text


async def test_without_max_tokens_an_answer_is_as_long_as_it_may_be_and_says_so(
    client: httpx.AsyncClient, make_app: Callable[..., FastAPI], engine: FakeEngine
):
    body = chat(logprobs=True, top_logprobs=20, n=8, stop_token_ids=LETTERS) | {"max_tokens": None}
    answer = (await client.post(CHAT, json=body)).json()
    (request,) = engine.requests
    assert 8 * request.max_tokens * 21 * 80 <= MAX_ANSWER_MIB << 20 < 8 * (request.max_tokens + 1) * 21 * 80
    (warning,) = answer["warnings"]
    assert warning["path"] == "max_completion_tokens"
    assert str(request.max_tokens) in warning["reason"]
    async with client_of(make_app(strict=True)) as strict:
        assert error_of(await strict.post(CHAT, json=body))["param"] == "max_completion_tokens"


async def test_the_part_of_a_prompt_is_made_once_for_all_choices(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    told = 0
    token_text = Tokenizer.token_text

    def counted(tokenizer: Tokenizer, token: int) -> str:
        nonlocal told
        told += 1
        return token_text(tokenizer, token)

    monkeypatch.setattr(Tokenizer, "token_text", counted)
    numbers = {}
    for stream in (False, True):
        fields = REPEATED if not stream else {**REPEATED, "prompt_logprobs": None}
        for n in (1, 8):
            told = 0
            answer = await client.post(COMPLETIONS, json=completion(prompt=LONG, n=n, stream=stream, **fields))
            assert answer.status_code == 200
            numbers[stream, n] = told
    for stream in (False, True):
        assert numbers[stream, 8] - numbers[stream, 1] == 7 * 5 * 4  # choices, tokens, texts of a token


@pytest.mark.parametrize("prompt", ['the lowé "\\\n\x01\u2028 🌸', [116, 0xC3, 104], ["a", "the low"]])
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_each_choice_repeats_the_same_of_its_prompt(client: httpx.AsyncClient, prompt: Any, max_tokens: int):
    body = completion(prompt=prompt, max_tokens=max_tokens, **REPEATED)
    plain = (await client.post(COMPLETIONS, json=completion(prompt=prompt, max_tokens=max_tokens, n=3, seed=1))).json()
    echoed = (await client.post(COMPLETIONS, json={**body, "n": 3, "seed": 1})).json()
    chunks = await events(client, COMPLETIONS, {**body, "n": 3, "seed": 1, "prompt_logprobs": None})
    prompts = prompt if isinstance(prompt[0], str) and isinstance(prompt, list) else [prompt]
    for index, (choice, own) in enumerate(zip(echoed["choices"], plain["choices"], strict=True)):
        written = prompts[index // 3]
        echo = written if isinstance(written, str) else bytes(written).decode(errors="replace")
        assert choice["index"] == index
        assert choice["text"] == echo + own["text"]
        first = echoed["choices"][index // 3 * 3]
        ids, logprobs = choice["prompt_token_ids"], choice["logprobs"]
        assert ids == first["prompt_token_ids"]
        assert choice["prompt_logprobs"] == first["prompt_logprobs"]
        assert len(choice["prompt_logprobs"]) == len(ids)
        assert {len(values) for values in logprobs.values()} == {len(ids) + max_tokens}
        assert logprobs["text_offset"][len(ids) :] == [len(echo) + place for place in range(max_tokens)]
        assert {name: values[: len(ids)] for name, values in logprobs.items()} == {
            name: values[: len(ids)] for name, values in first["logprobs"].items()
        }
        streamed = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(chunk["text"] for chunk in streamed) == choice["text"]
        for name, values in logprobs.items():
            assert [value for chunk in streamed for value in chunk["logprobs"][name]] == values
        assert streamed[0]["prompt_token_ids"] == ids
