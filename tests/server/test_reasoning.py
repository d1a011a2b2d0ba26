"""Models that reason before they answer: how reasoning is returned; no constraint or stop string affects it."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.constraints.matching import accepts
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, events_of, joined, refused, requested, says, without_ids
from tests.server.test_tools import ROME, TIME, WEATHER, call_of
from tests.server.tiny_model import TEMPLATE, byte_level_tokenizer

ECHOING = TEMPLATE.replace(
    "{{ message.content | trim }}",
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content | trim }}",
)
"""The model opens its reasoning itself."""
OPENING = ECHOING.replace("<|start|>assistant\n{% endif -%}", "<|start|>assistant\n<think>\n{% endif -%}")
"""The prompt opens it."""
SWITCHED = ECHOING.replace(
    "<|start|>assistant\n{% endif -%}",
    "<|start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif -%}",
)
"""As Qwen's: the prompt may hold an empty one."""
THOUGHT = "Is it a <b>? 2 < 3."
COLOUR = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"]}
AS_COLOUR = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": COLOUR}}}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine.roomy()


async def answered(client: httpx.AsyncClient, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice of a whole answer, which is the same when it is streamed, and the usage."""
    body = chat(**{"max_tokens": 400, **fields})
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    streamed = await client.post(CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    (choice,) = response.json()["choices"]
    chunks = events_of(streamed.text)
    (ours,) = joined(chunks)
    assert without_ids(ours["message"]) == without_ids(choice["message"])
    assert ours["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["usage"] == response.json()["usage"]
    return choice, response.json()["usage"]


def thought_of(choice: dict[str, Any]) -> str | None:
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    return message.get("reasoning_content")


@pytest.mark.parametrize("per_step", [1, 3, 500])
@pytest.mark.parametrize(
    ("template", "text", "content", "thought"),
    [
        (ECHOING, f"<think>\n{THOUGHT}\n</think>\n\nBlue.", "Blue.", THOUGHT),
        (ECHOING, "Blue.", "Blue.", None),
        (ECHOING, "<think>\n\n</think>\n\nBlue.", "Blue.", None),
        (ECHOING, "Blue <think>x</think>", "Blue <think>x</think>", None),
        (OPENING, f"{THOUGHT}\n</think>\n\nBlue.", "Blue.", THOUGHT),
        (OPENING, f"{THOUGHT}</think>", "", THOUGHT),
        (OPENING, THOUGHT, "", THOUGHT),
    ],
)
async def test_reasoning_is_told_apart(
    client_with: Callable[..., httpx.AsyncClient],
    engine: FakeEngine,
    per_step: int,
    template: str,
    text: str,
    content: str,
    thought: str | None,
):
    engine.script, engine.tokens_per_step = says(text), per_step
    async with client_with(template) as client:
        choice, usage = await answered(client)
    assert choice["message"]["content"] == content
    assert thought_of(choice) == thought
    assert choice["finish_reason"] == "stop"
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert (counted > 0) == bool(thought)
    assert counted <= usage["completion_tokens"] == len(text) + 1
    if thought:
        assert counted >= len(thought)


async def test_reasoning_that_was_cut_off(client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine):
    engine.script = says(f"{THOUGHT}</think>Blue.")
    async with client_with(OPENING) as client:
        choice, usage = await answered(client, max_tokens=8)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert thought_of(choice) == THOUGHT[:8]
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= 8


async def test_stop_strings_count_in_the_answer_alone(
    client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine
):
    engine.script = says(f"{THOUGHT} Blue.</think>Green. Blue. Red.")
    async with client_with(OPENING) as client:
        choice, _ = await answered(client, stop="Blue")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Blue")
    assert choice["message"]["content"] == "Green. "
    assert thought_of(choice) == f"{THOUGHT} Blue."


async def test_a_model_that_may_also_not_think(client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine):
    """Where the prompt holds an empty reasoning, none is begun."""
    engine.script = says("Blue.")
    async with client_with(SWITCHED) as client:
        choice, _ = await answered(client, chat_template_kwargs={"enable_thinking": False}, **AS_COLOUR)
        assert (choice["message"]["content"], thought_of(choice)) == ("Blue.", None)
        assert not accepts(engine.requests[-1].sampling.grammar or "", "x</think>" + '{"c": "red"}')
        assert accepts(engine.requests[-1].sampling.grammar or "", '{"c": "red"}')


@pytest.mark.parametrize("fields", [{"separate_reasoning": False}, {"reasoning_format": "none"}])
async def test_reasoning_in_the_text_keeps_the_tag_that_the_prompt_has_written(
    client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine, fields: dict[str, Any]
):
    engine.script = says("x</think>Blue.")
    async with client_with(OPENING) as client:
        choice, _ = await answered(client, **fields)
        assert choice["message"]["content"] == "<think>\nx</think>Blue."
        begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>"}]
        choice, _ = await answered(client, messages=begun, continue_final_message=True, **fields)
        assert choice["message"]["content"] == "x</think>Blue."


async def test_the_setting_turns_it_off(client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine):
    engine.script = says("x</think>Blue.")
    async with client_with(OPENING, reasoning_parser="none") as client:
        choice, usage = await answered(client)
    assert (choice["message"]["content"], thought_of(choice)) == ("x</think>Blue.", None)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


RED = '{"c": "red"}'


@pytest.mark.parametrize(
    ("template", "fields", "accepted", "rejected"),
    [
        (OPENING, AS_COLOUR, [f"{THOUGHT}</think>{RED}", f"{THOUGHT}\n</think>\n\n{RED}", f"</think>{RED}"],
         [RED, THOUGHT, f"{THOUGHT}</think>", f"{THOUGHT}</think>Red.", f"x</think>{RED}x"]),
        (ECHOING, AS_COLOUR, [RED, f"<think>{THOUGHT}</think>{RED}", f"<think>\nx\n</think>\n\n{RED}"],
         [THOUGHT, f"<think>{THOUGHT}", f"x</think>{RED}", f"<think>x</think><think>y</think>{RED}"]),
        (OPENING, {"structured_outputs": {"choice": ["yes", "no"]}}, ["hm</think>yes", "hm\n</think>\n\nno"],
         ["yes", "hm</think>maybe"]),
        (OPENING, {"tools": [WEATHER, TIME], "tool_choice": "required"}, [f"{THOUGHT}</think>{ROME}"],
         [ROME, f"{THOUGHT}</think>Text.", f"{ROME}</think>"]),
        (OPENING, {"tools": [WEATHER, TIME]}, [f"x</think>{ROME}", "x</think>Text.", f"x</think>\n\nText.{ROME}"],
         ['x</think><tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>']),
        (ECHOING, {"tools": [WEATHER, TIME]}, [ROME, f"<think>x</think>{ROME}", "Text.", "<think>x</think>Text."], []),
        (OPENING, {"tools": [WEATHER], **AS_COLOUR}, [f"x</think>{ROME}", f"x</think>{RED}"], [RED, "x</think>Text."]),
    ],
)  # fmt: skip
async def test_only_what_comes_after_it_is_held(
    client_with: Callable[..., httpx.AsyncClient],
    engine: FakeEngine,
    template: str,
    fields: dict[str, Any],
    accepted: list[str],
    rejected: list[str],
):
    async with client_with(template) as client:
        grammar = (await requested(client, engine, CHAT, chat(**fields))).sampling.grammar
    assert grammar is not None
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in rejected if accepts(grammar, text)] == []


def continued(content: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    return chat(messages=messages, continue_final_message=True, **fields)


async def test_a_form_goes_on_with_the_text_that_is_there(
    client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine
):
    """The answer is the rest of the form, without reasoning, on a model that would think first."""
    engine.script = says('d"}')
    async with client_with(OPENING) as client:
        asked = continued('{"c": "re', **AS_COLOUR)
        sampling = (await requested(client, engine, CHAT, asked)).sampling
        assert sampling.grammar_prefix == '{"c": "re'
        assert accepts(sampling.grammar or "", RED)
        assert not accepts(sampling.grammar or "", f"x</think>{RED}")
        (choice,) = (await client.post(CHAT, json=asked)).json()["choices"]
        assert (choice["message"]["content"], thought_of(choice)) == ('d"}', None)
        new = (await requested(client, engine, CHAT, chat(**AS_COLOUR))).sampling
        assert new.grammar_prefix == ""


@pytest.mark.parametrize(
    ("content", "fields", "code"),
    [
        ('{"d": ', AS_COLOUR, "invalid_value"),
        ("Sure:", AS_COLOUR, "invalid_value"),
        ("y", {"structured_outputs": {"choice": ["no"]}}, "invalid_value"),
        ("x", {"tools": [WEATHER], "tool_choice": "required"}, "invalid_parameter_combination"),
        ("{", {"tools": [WEATHER], **AS_COLOUR}, "invalid_parameter_combination"),
    ],
)
async def test_a_text_that_begins_no_answer_of_the_form(
    client_with: Callable[..., httpx.AsyncClient], content: str, fields: dict[str, Any], code: str
):
    async with client_with(ECHOING) as client:
        await refused(client, CHAT, continued(content, **fields), "continue_final_message", code)


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_calls_after_reasoning(client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine, choice: str):
    engine.script = says(f"{THOUGHT}\n</think>\n\n{ROME}")
    async with client_with(OPENING) as client:
        found, usage = await answered(client, tools=[WEATHER, TIME], tool_choice=choice)
    assert found["finish_reason"] == "tool_calls"
    assert thought_of(found) == THOUGHT
    assert found["message"]["content"] is None
    assert without_ids(found["message"])["tool_calls"] == [call_of("weather", city="Rome")]
    assert usage["completion_tokens_details"]["reasoning_tokens"] < len(THOUGHT) + 12


async def test_a_call_within_the_reasoning_ends_it(client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine):
    """Models forget to."""
    engine.script = says(f"{THOUGHT}\n{ROME}")
    async with client_with(OPENING) as client:
        found, _ = await answered(client, tools=[WEATHER, TIME])
    assert thought_of(found) == THOUGHT
    assert without_ids(found["message"])["tool_calls"] == [call_of("weather", city="Rome")]


async def test_every_token_is_told_once(client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine):
    engine.script = says(f"{THOUGHT}\n</think>\n\nBlue. {ROME}")
    asked = chat(max_tokens=400, tools=[WEATHER], logprobs=True, return_token_ids=True)
    async with client_with(OPENING) as client:
        (whole,) = (await client.post(CHAT, json=asked)).json()["choices"]
        chunks = events_of((await client.post(CHAT, json={**asked, "stream": True})).text)
    generated = engine.script(engine.requests[-1], 0)
    assert whole["token_ids"] == generated
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == generated
    assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == len(generated)


async def test_reasoning_that_is_sent_back(client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine):
    """As this server has told it, by both names, or by either: a template that shows it is given it."""
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning_content": THOUGHT, "reasoning": THOUGHT,
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "time", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]  # fmt: skip
    async with client_with(ECHOING) as client:
        for left_out in ("", "reasoning", "reasoning_content"):
            said = {key: value for key, value in messages[1].items() if key != left_out}
            response = await client.post(CHAT, json=chat(messages=[messages[0], said, messages[2]]))
            assert response.status_code == 200
            assert "x-samewise-ignored" not in response.headers
            prompt = byte_level_tokenizer().decode(engine.requests[-1].prompt, skip_special_tokens=False)
            assert f"<think>\n{THOUGHT}\n</think>" in prompt
            assert json.dumps("time") in prompt
        for name in ("reasoning", "reasoning_content"):
            body = chat(messages=[{**messages[0], name: "x"}])
            await refused(client, CHAT, body, f"messages[0].{name}", "unknown_parameter")
