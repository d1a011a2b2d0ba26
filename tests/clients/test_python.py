"""Frameworks for Python, each through every API that it speaks: a tool is called, and the next turn remembers it."""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.clients.scripted_model import FIRST, SECOND, Serve

CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "secret.txt"}}\n</tool_call>'
SAID, AGAIN = "It says word-heliotrope.", "Again: word-heliotrope."


@pytest.fixture
def address(serve: Serve) -> str:
    return serve(CALL)


def read_file(path: str) -> str:
    """Reads a file."""
    assert path == "secret.txt"
    return "word-heliotrope\n"


@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def test_openai_agents(address: str, api: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        model = getattr(agents, api)(model="tiny", openai_client=client)
        agent = agents.Agent(name="Reader", model=model, tools=[agents.function_tool(read_file)])
        first = await agents.Runner.run(agent, FIRST)
        assert first.final_output == SAID
        streamed = agents.Runner.run_streamed(agent, [*first.to_input_list(), {"role": "user", "content": SECOND}])
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == AGAIN


def _langchain_models(address: str) -> dict[str, Callable[[], Any]]:
    def of_openai(**fields: Any) -> Any:
        chat = pytest.importorskip("langchain_openai").ChatOpenAI
        return chat(base_url=f"{address}/v1", api_key="none", model="tiny", max_retries=0, **fields)

    def of_anthropic() -> Any:
        chat = pytest.importorskip("langchain_anthropic").ChatAnthropic
        return chat(base_url=address, api_key="none", model="tiny", max_retries=0)

    return {
        "chat": of_openai,
        "responses": lambda: of_openai(use_responses_api=True),
        "responses, by id": lambda: of_openai(use_responses_api=True, use_previous_response_id=True),
        "messages": of_anthropic,
    }


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses", "responses, by id", "messages"])
def test_langchain(address: str, api: str, is_streamed: bool) -> None:
    messages = pytest.importorskip("langchain_core.messages")
    model = _langchain_models(address)[api]().bind_tools([read_file])

    def ask(history: list[Any]) -> Any:
        if not is_streamed:
            return model.invoke(history)
        first, *others = model.stream(history)
        return sum(others, first)

    history = [messages.HumanMessage(FIRST)]
    for answer in (SAID, AGAIN):
        said = ask(history)
        while said.tool_calls:
            (call,) = said.tool_calls
            history += [said, messages.ToolMessage(read_file(**call["args"]), tool_call_id=call["id"])]
            said = ask(history)
        assert said.text == answer
        history += [said, messages.HumanMessage(SECOND)]


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_pydantic_ai(address: str, api: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models, providers = (
        {name: pytest.importorskip(f"pydantic_ai.{kind}.{name}") for name in ("openai", "anthropic")}
        for kind in ("models", "providers")
    )
    of_openai = providers["openai"].OpenAIProvider(base_url=f"{address}/v1", api_key="none")
    of_anthropic = providers["anthropic"].AnthropicProvider(base_url=address, api_key="none")
    kind, provider = {
        "chat": (models["openai"].OpenAIChatModel, of_openai),
        "responses": (models["openai"].OpenAIResponsesModel, of_openai),
        "messages": (models["anthropic"].AnthropicModel, of_anthropic),
    }[api]
    model = kind("tiny", provider=provider)
    agent = pydantic_ai.Agent(model, tools=[read_file])
    first = await agent.run(FIRST)
    assert first.output == SAID
    async with agent.run_stream(SECOND, message_history=first.all_messages()) as second:
        assert await second.get_output() == AGAIN


@pytest.mark.parametrize("name", ["openai/tiny", "anthropic/tiny", "openai/responses/tiny"])
def test_litellm(address: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "true")  # or it asks the network
    litellm = pytest.importorskip("litellm")
    base = address if name.startswith("anthropic") else f"{address}/v1"
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools = [{"type": "function", "function": {"name": "read_file", "parameters": parameters}}]

    def ask() -> Any:
        answer = litellm.completion(model=name, api_base=base, api_key="none", messages=messages, tools=tools)
        messages.append(answer.choices[0].message)
        return messages[-1]

    messages: list[Any] = [{"role": "user", "content": FIRST}]
    (call,) = ask().tool_calls
    content = read_file("secret.txt")
    messages.append({"role": "tool", "tool_call_id": call.id, "name": "read_file", "content": content})
    assert ask().content == SAID
    messages.append({"role": "user", "content": SECOND})
    assert ask().content == AGAIN
