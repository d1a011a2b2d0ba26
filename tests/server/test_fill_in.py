"""Fill in the middle: a text with a gap is the prompt that the model's family was trained with, token by token."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tokenizers import AddedToken, normalizers

from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, scripted
from tests.server.helpers import COMPLETIONS, client_of, completion, events_of, refused, requested
from tests.server.tiny_model import BOS, END, EOS, byte_level_tokenizer, sentencepiece_tokenizer, write_folder

FIRST = 304
"""The id of the first token that a test adds; those after it follow."""
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")
PRE, SUF, MID = range(FIRST, FIRST + 3)
"""Ids of a family whose tokens were added in this order."""
FAMILIES = {
    "qwen": (QWEN, [PRE, *b"ab", SUF, *b"(x", MID], {*range(FIRST, FIRST + 6)}),
    "starcoder": (("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"), [PRE, *b"ab", SUF, *b"(x", MID],
                  {PRE, SUF, MID, FIRST + 3}),
    "santacoder": (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), [PRE, *b"ab", SUF, *b"(x", MID], {PRE, SUF, MID}),
    "deepseek": (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), [PRE, *b"ab", SUF, *b"(x", MID],
                 {PRE, SUF, MID}),
    "codellama": (("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), [PRE, *b"ab", SUF, *b"(x", MID],
                  {PRE, SUF, MID, FIRST + 3}),
    "glm": (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), [PRE, *b"ab", SUF, *b"(x", MID],
            {PRE, SUF, MID}),
    "seed-coder": (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), [SUF, *b"(x", PRE, *b"ab", MID],
                   {PRE, SUF, MID}),
    "codestral": (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), [SUF, *b"(x", PRE, *b"ab"], {PRE, SUF, MID}),
}  # fmt: skip
"""By name: its tokens, the prompt for `ab` before a gap and `(x` behind it, and what ends the middle."""


def write_coder(folder: Path, added: Sequence[str] = QWEN, *, is_special: bool = False) -> Path:
    """A model folder whose tokenizer has these tokens as well, from FIRST on."""
    write_folder(folder)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=is_special, normalized=False) for text in added])
    assert tokenizer.token_to_id(added[0]) == FIRST
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
async def coder(make_app: Callable[..., FastAPI], tmp_path: Path):
    async with client_of(make_app(write_coder(tmp_path / "coder"))) as client:
        yield client


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_special", [True, False])
async def test_each_family_has_its_own_order(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path, name: str, is_special: bool
):
    added, expected, ends = FAMILIES[name]
    async with client_of(make_app(write_coder(tmp_path / "m", added, is_special=is_special))) as client:
        asked = await requested(client, engine, COMPLETIONS, completion(prompt="ab", suffix="(x"))
        assert list(asked.prompt) == expected
        assert set(asked.sampling.stop_token_ids) == {*ends, EOS, END}
        plain = await requested(client, engine, COMPLETIONS, completion(prompt="ab"))
        assert (plain.prompt, set(plain.sampling.stop_token_ids)) == (tuple(b"ab"), {EOS, END})


async def test_the_answer_is_that_to_the_same_tokens(coder: httpx.AsyncClient):
    fields = {"seed": 7, "max_tokens": 9, "logprobs": 2}
    filled = (await coder.post(COMPLETIONS, json=completion(prompt="ab", suffix="(x", **fields))).json()
    given = (await coder.post(COMPLETIONS, json=completion(prompt=FAMILIES["qwen"][1], **fields))).json()
    assert filled["choices"] == given["choices"]
    assert filled["usage"]["prompt_tokens"] == 7
    streamed = await coder.post(COMPLETIONS, json=completion(prompt="ab", suffix="(x", stream=True, **fields))
    text = "".join(chunk["choices"][0]["text"] for chunk in events_of(streamed.text))
    assert text == filled["choices"][0]["text"]


async def test_texts_are_nothing_but_texts(coder: httpx.AsyncClient, engine: FakeEngine):
    """Code about tokenizers has their tokens written in it."""
    before, after = "a<|fim_middle|><|eos|>", "<|bos|><|file_sep|>b"
    asked = await requested(coder, engine, COMPLETIONS, completion(prompt=before, suffix=after))
    assert list(asked.prompt) == [PRE, *before.encode(), SUF, *after.encode(), MID]


async def test_a_prompt_of_tokens_and_several_prompts(coder: httpx.AsyncClient, engine: FakeEngine):
    await requested(coder, engine, COMPLETIONS, completion(prompt=[[65, BOS], [66]], suffix="x"))
    assert [list(one.prompt) for one in engine.requests] == [
        [PRE, 65, BOS, SUF, 120, MID],
        [PRE, 66, SUF, 120, MID],
    ]
    await refused(
        coder, COMPLETIONS, completion(prompt=[[65], [999]], suffix="x"), "prompt[1][0]", "integer_above_max_value"
    )
    asked = await requested(coder, engine, COMPLETIONS, completion(prompt="", suffix="x"))
    assert list(asked.prompt) == [PRE, SUF, 120, MID]


@pytest.mark.parametrize("token", [SUF, FIRST + 4, FIRST + 5, EOS])
async def test_what_ends_the_middle_ends_the_answer(coder: httpx.AsyncClient, engine: FakeEngine, token: int):
    engine.script = scripted([*b"hey", token, *b"more"])
    body = completion(prompt="a", suffix="b", max_tokens=8)
    (choice,) = (await coder.post(COMPLETIONS, json=body)).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hey", "stop", None)
    (choice,) = (await coder.post(COMPLETIONS, json={**body, "ignore_eos": True})).json()["choices"]
    assert choice["finish_reason"] == "length"


async def test_reports_are_of_the_whole_prompt(coder: httpx.AsyncClient):
    body = completion(prompt="ab", suffix="(x", prompt_logprobs=0, return_token_ids=True)
    (choice,) = (await coder.post(COMPLETIONS, json=body)).json()["choices"]
    assert choice["prompt_token_ids"] == FAMILIES["qwen"][1]
    assert len(choice["prompt_logprobs"]) == 7


async def test_guidance_goes_away_from_another_beginning(coder: httpx.AsyncClient, engine: FakeEngine):
    body = completion(prompt="ab", suffix="(x", guidance={"scale": 2, "negative_prompt": "c"})
    asked = await requested(coder, engine, COMPLETIONS, body)
    assert list(asked.guide) == [PRE, *b"c", SUF, *b"(x", MID]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"echo": True}, "suffix", "invalid_parameter_combination"),
        ({"truncate_prompt_tokens": 5}, "suffix", "invalid_parameter_combination"),
        ({"suffix": 3}, "suffix", "invalid_type"),
        ({"suffix": ["x"]}, "suffix", "invalid_type"),
        ({"prompt": "x" * 300}, "prompt", "context_length_exceeded"),
        ({"suffix": "x" * 300}, "prompt", "context_length_exceeded"),
    ],
)
async def test_what_does_not_go_together(coder: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    await refused(coder, COMPLETIONS, completion(**{"prompt": "ab", "suffix": "x", **fields}), param, code)


@pytest.mark.parametrize("suffix", ["", None])
async def test_an_empty_suffix_asks_for_nothing(coder: httpx.AsyncClient, engine: FakeEngine, suffix: str | None):
    body = completion(prompt="ab", suffix=suffix, echo=True)
    assert list((await requested(coder, engine, COMPLETIONS, body)).prompt) == [*b"ab"]


async def test_a_model_without_the_tokens_refuses_it(
    client: httpx.AsyncClient, coder: httpx.AsyncClient, make_app: Callable[..., FastAPI], tmp_path: Path
):
    message = await refused(client, COMPLETIONS, completion(suffix="x"), "suffix", "unsupported_parameter")
    assert "tokens for filling in the middle" in message
    async with client_of(make_app(write_coder(tmp_path / "part", QWEN[:2]))) as client_of_part:
        await refused(client_of_part, COMPLETIONS, completion(suffix="x"), "suffix", "unsupported_parameter")
    support = [
        (await one.get("/v1/capabilities")).json()["endpoints"][COMPLETIONS]["suffix"]["support"]
        for one in (client, coder)
    ]
    assert support == ["refused", "honoured"]


async def test_a_tokenizer_that_begins_texts_begins_the_prompt(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path
):
    folder = write_coder(tmp_path / "m")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [BOS], "tokens": ["<|bos|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    async with client_of(make_app(folder)) as client:
        asked = await requested(client, engine, COMPLETIONS, completion(prompt="ab", suffix="(x"))
        assert list(asked.prompt) == [BOS, *FAMILIES["qwen"][1]]


def test_a_tokenizer_without_special_beginnings():
    assert Tokenizer(sentencepiece_tokenizer(), {}, None).beginning_ids == []
    assert Tokenizer(byte_level_tokenizer(), {}, None).beginning_ids == []


def test_no_space_is_put_before_what_continues_a_text():
    """As Meta's reference does for Code Llama: the suffix is no new text."""
    model = sentencepiece_tokenizer()
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = Tokenizer(model, {}, None)
    space, letter, b = (model.token_to_id(text) for text in ("▁", "o", "b"))
    assert tokenizer.encode_literally("ob") == [space, letter, b]
    assert tokenizer.encode_literally("ob", continues=True) == [letter, b]
    assert tokenizer.encode_literally(" o", continues=True) == [space, letter]
