"""A step may bring several tokens at once: everything is then as if they had come one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from scheduler.interface import FinishReason, RequestOutput
from server.generation.choice import ChoiceText
from server.generation.events import ChoiceEnd, OutputToken
from server.generation.planning.plan import OutputOptions
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, make_logprobs, scripted
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, events_of
from tests.server.test_endpoints import read_metrics
from tests.server.tiny_model import BOS, END, EOS, byte_level_tokenizer

GROUPS = (1, 2, 5)
TOKENIZER = Tokenizer(byte_level_tokenizer(), {}, None)
STOPS = ["你", "a", "ab", "b\n", "the", "é😀", "low", " ", "bab"]
TOKENS = st.lists(
    st.sampled_from([*"你好é😀 abab\n".encode(), 256, 257, 258, 261, 0xFF, BOS, END]) | st.integers(0, 319),
    min_size=1,
    max_size=24,
)
FIELDS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 24),
        "stop": st.lists(st.sampled_from(STOPS), max_size=4),
        "stop_token_ids": st.lists(st.sampled_from([ord("b"), 257, BOS]), max_size=2),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
        "min_tokens": st.sampled_from([0, 1]),
    }
)
QUICKLY = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def grouped(tokens: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens in pieces of the sizes, over and over."""
    groups, rest = [], list(tokens)
    while rest:
        size = sizes[len(groups) % len(sizes)]
        groups.append(tuple(rest[:size]))
        rest = rest[size:]
    return groups


def outputs_of(tokens: Sequence[int], sizes: Sequence[int], stop_ids: Sequence[int]) -> list[RequestOutput]:
    """As a scheduler hands them out: cut behind the first stop token, the last one with its reason."""
    stop = next((index for index, token in enumerate(tokens) if token in stop_ids), None)
    kept = tokens if stop is None else tokens[: stop + 1]
    outputs: list[RequestOutput] = []
    for group in grouped(kept, sizes):
        position = sum(len(output.tokens) for output in outputs)
        logprobs = tuple(make_logprobs(token, position + i, 2, 320) for i, token in enumerate(group))
        ends = position + len(group) == len(kept)
        reason = None if not ends else FinishReason.LENGTH if stop is None else FinishReason.STOP
        stop_id = kept[-1] if ends and stop is not None else None
        outputs.append(RequestOutput("r", 0, group, logprobs, finish_reason=reason, stop_token_id=stop_id))
    return outputs


def follow(outputs: Sequence[RequestOutput], options: OutputOptions) -> tuple[str, list[OutputToken], int, Any, Any]:
    """Text, tokens with offsets and logprobs, their number, and how it ended."""
    choice = ChoiceText(TOKENIZER, [65], options)
    text, tokens, end = "", [], ChoiceEnd(0, None)
    for output in outputs:
        for event in choice.push(output):
            if isinstance(event, ChoiceEnd):
                end = event
            else:
                text += event.text
                tokens += event.tokens
        if choice.has_ended:
            break
    return text, tokens, choice.num_tokens, end.reason, end.stop_reason


@given(
    tokens=TOKENS,
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    stop_ids=st.sets(st.sampled_from([EOS, END, BOS, ord("b")])),
    options=st.builds(
        OutputOptions,
        stop=st.lists(st.sampled_from(STOPS), max_size=4).map(tuple),
        include_stop=st.booleans(),
        min_tokens=st.integers(0, 6),
        skip_special_tokens=st.booleans(),
        eos_token_ids=st.sampled_from([(), (EOS, END)]),
        reports_tokens=st.just(True),
    ),
)
@example(tokens=[*b"xyab"], sizes=[2], stop_ids=set(), options=OutputOptions(stop=("ab",), reports_tokens=True))
def test_a_choice_does_not_depend_on_how_its_tokens_were_cut(
    tokens: list[int], sizes: list[int], stop_ids: set[int], options: OutputOptions
):
    one_by_one = follow(outputs_of(tokens, [1], sorted(stop_ids)), options)
    assert follow(outputs_of(tokens, sizes, sorted(stop_ids)), options) == one_by_one
    assert len(one_by_one[1]) == one_by_one[2]
    assert all(token.offset <= len(one_by_one[0]) for token in one_by_one[1])


def joined(chunks: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """A stream's chunks joined by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            _add(choices.setdefault(choice["index"], {}), choice)
    return choices


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Texts and lists go one after the other; of the rest the last counts."""
    for name, value in part.items():
        if isinstance(value, dict):
            _add(whole.setdefault(name, {}), value)
        elif name in APPENDED and value is not None:
            whole[name] = whole.get(name, type(value)()) + value
        elif value is not None:
            whole[name] = value


APPENDED = ("text", "content", "token_ids", "tokens", "token_logprobs", "top_logprobs", "text_offset")


async def everything(client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """All that can be seen of a request, whole and streamed, but what differs each time."""
    engine.requests.clear()
    whole = (await client.post(path, json=body)).json()
    assert "error" not in whole, whole
    response = await client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    chunks = events_of(response.text)
    assert chunks[-1]["usage"] == whole["usage"]
    same = {name: value for name, value in whole.items() if name not in {"id", "created"}}
    return {**same, "streamed": joined(chunks)}


async def compare(make_app: Callable[..., FastAPI], engine: FakeEngine, path: str, body: dict[str, Any]) -> None:
    found = []
    async with client_of(make_app()) as client:
        for engine.tokens_per_step in GROUPS:
            found.append(await everything(client, engine, path, body))
    assert found[1] == found[0]
    assert found[2] == found[0]


@QUICKLY
@given(tokens=st.lists(TOKENS, min_size=1, max_size=3), fields=FIELDS)
async def test_chat(make_app: Callable[..., FastAPI], engine: FakeEngine, tokens: list[list[int]], fields: dict):
    engine.script = scripted(*tokens)
    body = chat(**fields, n=3, seed=1, logprobs=True, top_logprobs=2, return_token_ids=True)
    await compare(make_app, engine, CHAT, body)


@QUICKLY
@given(tokens=st.lists(TOKENS, min_size=1, max_size=3), fields=FIELDS, echo=st.booleans())
async def test_completions(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tokens: list[list[int]], fields: dict, echo: bool
):
    engine.script = scripted(*tokens)
    prompts = [[0xC3, 0xA9, *b" the"], [0xE4]]  # the second begins a character that the output may complete
    body = completion(**fields, prompt=prompts, n=2, seed=1, logprobs=2, echo=echo, return_token_ids=True)
    await compare(make_app, engine, COMPLETIONS, body)


async def test_prompt_logprobs_come_first(client: httpx.AsyncClient, engine: FakeEngine):
    found = []
    for engine.tokens_per_step in GROUPS:
        answer = (await client.post(CHAT, json=chat(n=2, seed=1, prompt_logprobs=1, logprobs=True))).json()
        found.append((answer["prompt_logprobs"], answer["choices"]))
    assert found[1] == found[0] == found[2]


@pytest.mark.parametrize("group", GROUPS)
async def test_a_stop_string_in_the_middle_of_a_step(client: httpx.AsyncClient, engine: FakeEngine, group: int):
    """`wo t` ends with the ninth token: nothing that came behind it in its step is seen anywhere."""
    engine.script, engine.tokens_per_step = scripted(b"one two three"), group
    body = chat(max_tokens=50, stop="wo t", logprobs=True, return_token_ids=True, n=2)
    answer = (await client.post(CHAT, json=body)).json()
    for choice in answer["choices"]:
        assert choice["message"]["content"] == "one t"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "wo t")
        assert choice["token_ids"] == [*b"one two t"]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [*"one two t"]
    assert answer["usage"]["completion_tokens"] == 18
    assert sorted(choice for _, choice in engine.aborted) == [0, 1]
    assert (await read_metrics(client))["samewise:generation_tokens_total"] == 18


@pytest.mark.parametrize("group", GROUPS)
async def test_min_tokens_in_the_middle_of_a_step(client: httpx.AsyncClient, engine: FakeEngine, group: int):
    engine.script, engine.tokens_per_step = scripted(b"ab"), group
    answer = (await client.post(CHAT, json=chat(max_tokens=9, stop="b", min_tokens=4))).json()
    assert answer["choices"][0]["message"]["content"] == "ababa"
    assert answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("group", GROUPS)
async def test_the_limit_goes_before_what_the_step_brought_beyond_it(
    client: httpx.AsyncClient, engine: FakeEngine, group: int
):
    """A stop string that is complete with the last token allowed still counts."""
    engine.script, engine.tokens_per_step = scripted(b"abcdefgh"), group
    answer = (await client.post(CHAT, json=chat(max_tokens=5, stop="de"))).json()
    assert answer["choices"][0]["message"]["content"] == "abc"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert engine.aborted == []
    answer = (await client.post(CHAT, json=chat(max_tokens=5, stop="ef"))).json()
    assert answer["choices"][0]["message"]["content"] == "abcde"
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("group", GROUPS)
async def test_no_chunk_ends_inside_a_character_or_a_stop_string(
    client: httpx.AsyncClient, engine: FakeEngine, group: int
):
    engine.script, engine.tokens_per_step = scripted([*"é你 STO STOP x".encode()]), group
    response = await client.post(CHAT, json=chat(max_tokens=40, stop="STOP", stream=True))
    deltas = [choice["delta"] for chunk in events_of(response.text) for choice in chunk["choices"]]
    texts = [delta.get("content", "") for delta in deltas]
    assert "".join(texts) == "é你 STO "
    assert not any("\ufffd" in text or text.endswith(("S", "ST", "STO")) for text in texts)
