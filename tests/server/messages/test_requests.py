"""Fields of requests: prompts and constraints, and fields that are ignored and reported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.constraints.matching import accepts
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of, requested
from tests.server.messages.reading import COUNT, MESSAGES, message, refused
from tests.server.messages.test_answers import TOOLS
from tests.server.test_hints import check_reported
from tests.server.test_reasoning import COLOUR, OPENING, SWITCHED
from tests.server.test_tools import WITH_TOOLS, written
from tests.server.tiny_model import TEMPLATE, byte_level_tokenizer, write_folder

HI = {"role": "user", "content": "hi"}
MARK = {"type": "ephemeral", "ttl": "5m"}
TIME = written("time", city="x")
TWICE = f"{TIME}\n{TIME}"
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def use(name: str, made: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": made, "name": name, "input": arguments}


def result(made: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": made, "content": content, **fields}


def shown(engine: FakeEngine) -> str:
    """The last prompt."""
    return byte_level_tokenizer().decode(engine.requests[-1].prompt, skip_special_tokens=False)


def turns(*messages: tuple[str, str]) -> str:
    """A prompt of the tiny template."""
    return "".join(f"<|start|>{role}\n{content}<|end|>\n" for role, content in messages) + "<|start|>assistant\n"


async def prompt_of(client: httpx.AsyncClient, engine: FakeEngine, **fields: Any) -> str:
    await requested(client, engine, MESSAGES, message(**fields))
    return shown(engine)


@pytest.fixture
def of_template(make_app: Callable[..., FastAPI], tmp_path: Path) -> Callable[[str], httpx.AsyncClient]:
    return lambda template: client_of(make_app(write_folder(tmp_path / "m", template=template)))


# -- the conversation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [("user", "hi")]),
        ({"system": "Be brief."}, [("system", "Be brief."), ("user", "hi")]),
        ({"system": [text("a", cache_control=MARK), text("b")]}, [("system", "a\nb"), ("user", "hi")]),
        ({"system": []}, [("user", "hi")]),
        ({"messages": [HI, {"role": "system", "content": "now"}, HI]},
         [("user", "hi"), ("system", "now"), ("user", "hi")]),
        ({"messages": [{"role": "user", "content": [text("a"), text("b", cache_control=MARK)]}]}, [("user", "a\nb")]),
        ({"messages": [HI, {"role": "assistant", "content": []}, HI]},
         [("user", "hi"), ("assistant", ""), ("user", "hi")]),
    ],
)  # fmt: skip
async def test_texts(client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], expected: Any):
    assert await prompt_of(client, engine, **fields) == turns(*expected)


async def test_results_follow_their_calls_in_the_order_of_the_calls(client: httpx.AsyncClient, engine: FakeEngine):
    calls = {"role": "assistant", "content": [text("So."), use("weather", "a", city="Rome"), use("time", "b")]}
    answers = [text("And?"), result("b", [text("5"), text("pm")]), result("a", "sun", cache_control=MARK)]
    history = [HI, calls, {"role": "user", "content": answers}]
    spelled = "\n".join([written("weather", city="Rome"), written("time")])
    expected = [
        ("user", "hi"),
        ("assistant", f"{spelled}\n\nSo."),
        ("tool", "sun"),
        ("tool", "5\npm"),
        ("user", "And?"),
    ]
    prompt = await prompt_of(client, engine, messages=history, tools=TOOLS, tool_choice={"type": "none"})
    assert prompt.replace("\n\n", "\n") == turns(*expected).replace("\n\n", "\n")


async def test_a_last_message_of_the_assistant_is_continued(client: httpx.AsyncClient, engine: FakeEngine):
    messages = [HI, {"role": "assistant", "content": "The answer is ("}]
    prompt = await prompt_of(client, engine, messages=messages)
    assert prompt.endswith("<|start|>assistant\nThe answer is (")


@pytest.mark.parametrize("content", ["", [], None, [text("")]])
async def test_an_empty_last_message_of_the_assistant_asks_for_an_answer(
    client: httpx.AsyncClient, engine: FakeEngine, content: Any
):
    prompt = await prompt_of(client, engine, messages=[HI, {"role": "assistant", "content": content}])
    assert prompt == await prompt_of(client, engine, messages=[HI])
    await refused(client, message(messages=[{"role": "assistant", "content": content}]), "messages[0].content",
                  "invalid_value")  # fmt: skip


async def test_blocks_of_other_apis(client: httpx.AsyncClient, engine: FakeEngine):
    """Texts under OpenAI's names are shown; calls of tools that another server ran are reported."""
    said = [
        {"type": "output_text", "text": "x"},
        {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "a", "content": []},
    ]
    asked = [{"type": "input_text", "text": "hi"}]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said, "tool_calls": []}, HI]
    response = await client.post(MESSAGES, json=message(messages=messages))
    paths = ["messages[1].content[1]", "messages[1].content[2]", "messages[1].tool_calls"]
    check_reported(response, response.json(), paths)
    plain = [HI, {"role": "assistant", "content": "x"}, HI]
    assert shown(engine) == await prompt_of(client, engine, messages=plain)


@pytest.mark.parametrize("content", [[use("time", "a")], [text("x"), use("time", "a")], [{"type": "thinking",
                                     "thinking": "hm"}]])  # fmt: skip
async def test_what_cannot_be_continued_is_refused(client: httpx.AsyncClient, content: Any):
    messages = [HI, {"role": "assistant", "content": content}]
    await refused(client, message(messages=messages), "messages[1].content", "invalid_value")


async def test_thinking_that_the_template_does_not_show_is_reported_where_it_stands(client: httpx.AsyncClient):
    said = [text("x"), {"type": "thinking", "thinking": "hm", "signature": "abc"}]
    messages = [HI, {"role": "assistant", "content": said}, HI]
    response = await client.post(MESSAGES, json=message(system="s", messages=messages))
    check_reported(response, response.json(), ["messages[1].content[1].thinking"])


async def test_thinking_that_only_another_server_can_read_is_reported(thinking: httpx.AsyncClient):
    said = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "", "signature": "x"},
        {"type": "thinking", "thinking": "", "signature": ""},
        text("x"),
    ]
    messages = [HI, {"role": "assistant", "content": said}, HI]
    response = await thinking.post(MESSAGES, json=message(messages=messages))
    check_reported(response, response.json(), ["messages[1].content[0]", "messages[1].content[1].signature"])


# -- tools -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    [
        (None, ["Hm.", TIME], []),
        ({"type": "auto"}, ["Hm.", TWICE], [written("time")]),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["Hm.", TIME], [TWICE]),
        ({"type": "any"}, [TIME, TWICE], ["Hm.", written("tide", city="x")]),
        ({"type": "any", "disable_parallel_tool_use": True}, [TIME], [TWICE]),
        ({"type": "tool", "name": "time"}, [TIME, TWICE], ["Hm.", written("weather", city="x")]),
    ],
)
async def test_what_answers_are_held_to(
    client: httpx.AsyncClient, engine: FakeEngine, choice: Any, good: list[str], bad: list[str]
):
    request = await requested(client, engine, MESSAGES, message(tools=TOOLS, tool_choice=choice))
    grammar = request.sampling.grammar
    assert grammar is not None
    assert all(accepts(grammar, answer) for answer in good)
    assert not any(accepts(grammar, answer) for answer in bad)


@pytest.mark.parametrize(
    "fields", [{"tools": []}, {"tools": None}, {"tools": TOOLS, "tool_choice": {"type": "none"}},
               {"tools": [], "tool_choice": {"type": "auto"}}],
)  # fmt: skip
async def test_no_tools(client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]):
    assert await prompt_of(client, engine, **fields) == turns(("user", "hi"))
    assert engine.requests[-1].sampling.grammar is None


async def test_tools_are_told_as_they_are_to_chat_completions(
    of_template: Callable[[str], httpx.AsyncClient], engine: FakeEngine
):
    extras = {"type": "custom", "cache_control": MARK, "eager_input_streaming": True, "defer_loading": False}
    ours = [{**TOOLS[0], **extras}]
    function = {"name": "weather", "description": "Looks.", "parameters": TOOLS[0]["input_schema"]}
    async with of_template(WITH_TOOLS) as client:
        response = await client.post(MESSAGES, json=message(tools=ours))
        check_reported(response, response.json(), [])
        prompt = engine.requests[-1].prompt
        theirs = await requested(client, engine, CHAT, chat(tools=[{"type": "function", "function": function}]))
    assert prompt == theirs.prompt


async def test_a_tool_is_told_of_when_it_was_found(of_template: Callable[[str], httpx.AsyncClient], engine: FakeEngine):
    tools = [TOOLS[0], {**TOOLS[1], "defer_loading": True}]
    find = {"role": "assistant", "content": [use("search", "s")]}
    found = {"role": "user", "content": [result("s", [{"type": "tool_reference", "tool_name": "time"}])]}
    async with of_template(WITH_TOOLS) as client:
        assert '"time"' not in await prompt_of(client, engine, tools=tools)
        assert '"time"' in await prompt_of(client, engine, tools=tools, messages=[HI, find, found])
        assert '"time"' in await prompt_of(client, engine, tools=tools, tool_choice={"type": "tool", "name": "time"})
        search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search"}
        assert '"time"' in await prompt_of(client, engine, tools=[*tools, search])


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_no_tool_can_be_forced_while_all_are_deferred(client: httpx.AsyncClient, path: str):
    asked = message(tools=[{**TOOLS[0], "defer_loading": True}], tool_choice={"type": "any"})
    await refused(client, asked, "tool_choice", "invalid_value", path)


async def test_a_reference_to_no_tool_is_left_out_and_reported(client: httpx.AsyncClient, engine: FakeEngine):
    found = [{"type": "tool_reference", "tool_name": name} for name in ("time", "nobody")]
    asked = [HI, {"role": "assistant", "content": [use("search", "s")]}]
    said = {"role": "user", "content": [text("so"), result("s", found)]}
    response = await client.post(MESSAGES, json=message(tools=TOOLS, messages=[*asked, said]))
    check_reported(response, response.json(), ["messages[2].content[1].content[1].tool_name"])
    assert "The tool time can be called now.<|end|>" in shown(engine)


async def test_what_is_cut_off_is_not_counted(client: httpx.AsyncClient):
    long = message(messages=[{"role": "user", "content": "x" * 5000}])
    for keep, counted in ((5, 5), (-1, 4095)):
        response = await client.post(COUNT, json={**long, "truncate_prompt_tokens": keep})
        assert response.json()["input_tokens"] == counted


@pytest.mark.parametrize("kind", ["array", 5, ["string", "null"]])
async def test_arguments_are_an_object_whatever_their_schema_says(client: httpx.AsyncClient, kind: Any):
    tool = {"name": "f", "input_schema": {"type": kind, "additionalProperties": True}}
    response = await client.post(MESSAGES, json=message(tools=[tool]))
    check_reported(response, response.json(), ["tools[0].input_schema.type"])
    strict = message(tools=[{**tool, "strict": True}])
    await refused(client, strict, "tools[0].input_schema.type", "invalid_value")


async def test_thinking_is_never_summarized(of_template: Callable[[str], httpx.AsyncClient]):
    async with of_template(SWITCHED) as client:
        response = await client.post(MESSAGES, json=message(thinking={"type": "adaptive", "display": "summarized"}))
    check_reported(response, response.json(), ["thinking.display"])


async def test_a_field_that_every_request_has_is_not_said_to_be_extra(make_app: Callable[..., FastAPI], tmp_path: Path):
    async with client_of(make_app(write_folder(tmp_path / "m", template=None))) as client:
        needed = await refused(client, message(), "messages", "unsupported_parameter")
        extra = await refused(client, message(compaction={}), "compaction", "unsupported_parameter")
    assert "Extra inputs" not in needed
    assert extra.startswith("compaction: Extra inputs are not permitted.")


async def test_a_forced_call_does_not_go_on_with_a_text(client: httpx.AsyncClient):
    begun = [HI, {"role": "assistant", "content": "a"}]
    asked = message(messages=begun, tools=TOOLS, tool_choice={"type": "any"})
    told = await refused(client, asked, "messages[1]", "invalid_parameter_combination")
    assert "'tool_choice'" in told


async def test_a_tool_of_anthropic_s_is_left_out_and_reported(client: httpx.AsyncClient, engine: FakeEngine):
    response = await client.post(MESSAGES, json=message(tools=[SEARCH, TOOLS[0]]))
    check_reported(response, response.json(), ["tools[0]"])
    assert "web_search" not in shown(engine)
    assert '"weather"' in shown(engine)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
        ({"tools": [SEARCH, TOOLS[0]], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice",
         "unsupported_value"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "tide"}}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name", "missing_required_parameter"),
        ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "tool_choice.type", "invalid_value"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1]", "invalid_value"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "missing_required_parameter"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{**TOOLS[0], "parameters": {}}]}, "tools[0].parameters", "unknown_parameter"),
        ({"tools": [{**TOOLS[0], "name": "a b"}]}, "tools[0].name", "invalid_value"),
        ({"tools": [{**TOOLS[0], "strict": True, "input_schema": {"type": "object", "not": {}}}]},
         "tools[0].input_schema.not", "invalid_value"),
        ({"tools": TOOLS, "ignore_eos": True}, "tools", "invalid_parameter_combination"),
    ],
)  # fmt: skip
async def test_bad_tools(client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    await refused(client, message(**fields), param, code)


# -- thinking and form -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "is_off"),
    [(None, False), ({"type": "disabled"}, True), ({"type": "adaptive", "display": "omitted"}, False),
     ({"type": "enabled", "budget_tokens": 7}, False)],
)  # fmt: skip
async def test_thinking_turns_the_template_s_switch(
    of_template: Callable[[str], httpx.AsyncClient], engine: FakeEngine, asked: Any, is_off: bool
):
    async with of_template(SWITCHED) as client:
        response = await client.post(MESSAGES, json=message(thinking=asked))
    check_reported(response, response.json(), [])
    assert shown(engine).endswith("</think>\n\n") == is_off
    bound = engine.requests[-1].sampling.thinking
    assert (None if bound is None else bound.max_tokens) == (asked or {}).get("budget_tokens")


async def test_a_template_without_a_switch(client: httpx.AsyncClient):
    response = await client.post(MESSAGES, json=message(thinking={"type": "adaptive"}, output_config={"effort": "low"}))
    check_reported(response, response.json(), ["thinking", "output_config.effort"])


async def test_effort_is_given_to_a_template_that_has_such_a_variable(
    of_template: Callable[[str], httpx.AsyncClient], engine: FakeEngine
):
    async with of_template("{{ reasoning_effort }}" + TEMPLATE) as client:
        response = await client.post(MESSAGES, json=message(output_config={"effort": "xhigh"}))
    check_reported(response, response.json(), [])
    assert shown(engine).startswith("xhigh<|start|>")


@pytest.mark.parametrize("name", ["output_config", "output_format", "structured_outputs"])
async def test_a_form(client: httpx.AsyncClient, engine: FakeEngine, name: str):
    form = {"type": "json_schema", "schema": COLOUR}
    asked = {"output_config": {"format": form}, "output_format": form, "structured_outputs": {"json": COLOUR}}
    request = await requested(client, engine, MESSAGES, message(**{name: asked[name]}))
    grammar = request.sampling.grammar
    assert grammar is not None
    assert accepts(grammar, '{"c": "red"}')
    assert not accepts(grammar, '{"c": "green"}')


async def test_what_of_a_form_cannot_be_enforced_is_reported(client: httpx.AsyncClient):
    schema = {"type": "object", "properties": {"b": {"not": {}}}, "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    response = await client.post(MESSAGES, json=message(output_config={"format": form}))
    check_reported(response, response.json(), ["output_config.format.schema.properties.b.not"])


# -- other fields ------------------------------------------------------------------------------------------------------


async def test_extensions_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine):
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 11,
        "cache_salt": "x", "speculation": {"method": "ngram"}, "guidance": {"scale": 2},
    }  # fmt: skip
    request = await requested(client, engine, MESSAGES, message(**fields))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.seed, request.cache_salt) == (1.1, 11, "x")
    assert request.speculation is not None
    assert sampling.guidance is not None


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        ({"metadata": {"user_id": '{"a": 1}'}, "service_tier": "auto", "cache_control": MARK}, []),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, []),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, ["context_management"]),
        ({"thread": None, "container": None, "mcp_servers": []}, []),
        ({"speed": "fast", "inference_geo": "eu"}, ["speed", "inference_geo"]),
        ({"cache_control": {**MARK, "scope": "global"}}, ["cache_control.scope"]),
        ({"messages": [{**HI, "name": "Ann"}]}, ["messages[0].name"]),
        ({"tools": [TOOLS[0]], "tool_choice": {"type": "any"}, "stop_sequences": ["x"]}, ["stop_sequences"]),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, ["output_config.task_budget"]),
    ],
)
async def test_what_is_reported(
    client: httpx.AsyncClient, make_app: Callable[..., FastAPI], fields: dict[str, Any], paths: list[str]
):
    response = await client.post(MESSAGES, json=message(**fields))
    check_reported(response, response.json(), paths)
    async with client_of(make_app(strict=True)) as strict:
        if paths:
            await refused(strict, message(**fields), paths[0], "unsupported_parameter")
        else:
            assert (await strict.post(MESSAGES, json=message(**fields))).status_code == 200


async def test_what_a_coding_agent_sends(of_template: Callable[[str], httpx.AsyncClient], engine: FakeEngine):
    """Claude Code, in short: none of it is refused, and only what this template has no place for is reported."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **TOOLS[0]["input_schema"]}
    body = message(
        stream=True,
        system=[text("billing"), text("You are an agent.", cache_control=MARK)],
        messages=[
            HI,
            {"role": "system", "content": [text("# Rules", cache_control=MARK)]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "", "signature": ""}, use("time", "b"), use("weather", "a"),
            ]},
            {"role": "user", "content": [result("a", "sun"), result("b", [text("5")], is_error=False), text("So?")]},
        ],
        tools=[{**TOOLS[0], "input_schema": schema}, TOOLS[1], {**TOOLS[1], "name": "later", "defer_loading": True}],
        metadata={"user_id": '{"device": "x"}'},
        thinking={"type": "adaptive", "display": "omitted"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )  # fmt: skip
    async with of_template(SWITCHED) as client:
        response = await client.post(f"{MESSAGES}?beta=true", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-samewise-ignored"] == "output_config.effort"
    assert shown(engine).index("<|start|>tool\n5") < shown(engine).index("<|start|>tool\nsun")


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_tokens": None}, "max_tokens", "missing_required_parameter"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
        ({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content", "invalid_type"),
        (block(type="video", source={}), "messages[0].content[0].type", "invalid_value"),
        (block(text="x"), "messages[0].content[0].type", "missing_required_parameter"),
        (block(type="text"), "messages[0].content[0].text", "missing_required_parameter"),
        (block(type="tool_use", id="a", name="b", input={}), "messages[0].content[0].type", "invalid_value"),
        (block(type="tool_result"), "messages[0].content[0].tool_use_id", "missing_required_parameter"),
        (block(**result("a", [{"type": "video", "source": {}}])), "messages[0].content[0].content[0].type",
         "invalid_value"),
        (block(**result("a", "x", is_error="yes")), "messages[0].content[0].is_error", "invalid_type"),
        (block(**text("x", cache_control={"type": "forever"})), "messages[0].content[0].cache_control.type",
         "invalid_value"),
        ({"messages": [{"role": "system", "content": [result("a", "x")]}]}, "messages[0].content[0].type",
         "invalid_value"),
        ({"system": 3}, "system", "invalid_type"),
        ({"system": [{"type": "image"}]}, "system[0].type", "invalid_value"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "missing_required_parameter"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "invalid_value"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}, "thinking_token_budget": 6}, "thinking_token_budget",
         "invalid_parameter_combination"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort", "invalid_value"),
        ({"output_config": {"format": {"type": "json"}}}, "output_config.format.type", "invalid_value"),
        ({"output_config": {"format": {"type": "json_schema", "schema": COLOUR}}, "guided_regex": "a"},
         "output_config", "invalid_parameter_combination"),
        ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs.json.type", "invalid_value"),
        ({"stop_sequences": "x"}, "stop_sequences", "invalid_type"),
        ({"stop_sequences": ["x"], "stop": ["y"]}, "stop_sequences", "invalid_parameter_combination"),
        ({"metadata": "x"}, "metadata", "invalid_type"),
        ({"service_tier": "flex"}, "service_tier", "invalid_value"),
        ({"mcp_servers": [{}]}, "mcp_servers", "unsupported_parameter"),
        ({"container": "x"}, "container", "unsupported_parameter"),
        ({"max_token": 3}, "max_token", "unknown_parameter"),
        ({"n": 2}, "n", "unknown_parameter"),
        ({"beam_search": {"width": 2, "num_return": 2}}, "beam_search.num_return", "integer_above_max_value"),
        ({"chat_template_kwargs": "mood"}, "chat_template_kwargs", "invalid_type"),
    ],
)  # fmt: skip
async def test_bad_fields(client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    await refused(client, message(**fields), param, code)


# -- counting ----------------------------------------------------------------------------------------------------------


async def test_tokens_are_counted_as_they_are_computed(client: httpx.AsyncClient, engine: FakeEngine):
    asked = {"system": "s", "tools": TOOLS, "messages": [HI, {"role": "assistant", "content": "So"}], "model": "tiny"}
    response = await client.post(COUNT, json=asked)
    request = await requested(client, engine, MESSAGES, {**asked, "max_tokens": 3})
    assert response.json() == {"input_tokens": len(request.prompt)}


async def test_more_tokens_than_there_is_room_for_are_counted(client: httpx.AsyncClient):
    long = {"role": "user", "content": "x" * 5000}
    assert (await client.post(COUNT, json={"model": "tiny", "messages": [long]})).json()["input_tokens"] > 5000


async def test_counting_reports_and_refuses_as_well(client: httpx.AsyncClient):
    asked = {"model": "tiny", "messages": [HI]}
    response = await client.post(COUNT, json={**asked, "tools": [SEARCH]})
    check_reported(response, response.json(), ["tools[0]"])
    await refused(client, {**asked, "mesages": []}, "mesages", "unknown_parameter", COUNT)
    await refused(client, {"model": "tiny"}, "messages", "missing_required_parameter", COUNT)
    bad = {"structured_outputs": {"whitespace_pattern": "(", "json": {}}}
    await refused(client, {**asked, **bad}, "structured_outputs.whitespace_pattern", "invalid_value", COUNT)


async def test_prompts_that_open_the_thinking_are_counted_so(
    of_template: Callable[[str], httpx.AsyncClient], engine: FakeEngine
):
    async with of_template(OPENING) as client:
        count = (await client.post(COUNT, json={"model": "tiny", "messages": [HI]})).json()["input_tokens"]
        assert count == len((await requested(client, engine, MESSAGES, message())).prompt)
