"""An agent of pydantic-ai on the embedded model."""

from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.served.conftest import Server

pydantic_ai = pytest.importorskip("pydantic_ai")
models = pytest.importorskip("pydantic_ai.models.openai")
providers = pytest.importorskip("pydantic_ai.providers.openai")
pytestmark = pytest.mark.embedded


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]
    degrees: Literal[1, 2, 3]


@pytest.fixture
async def model(server: Server) -> AsyncIterator[Any]:
    async with server.async_client() as client:
        provider = providers.OpenAIProvider(openai_client=client)
        yield models.OpenAIChatModel("SmolLM2-135M-Instruct", provider=provider)


def agent_of(model: Any, output: Any) -> Any:
    return pydantic_ai.Agent(
        model, output_type=output, instructions="Be brief.", system_prompt="Answer.",
        model_settings={"max_tokens": 120, "seed": 3},
    )  # fmt: skip


async def test_an_output_by_a_tool(model: Any) -> None:
    """It asks for a call of its own tool."""
    result = await agent_of(model, Weather).run("How cold is it in Oslo?")
    assert isinstance(result.output, Weather)


async def test_an_output_by_a_schema_beside_a_tool(model: Any) -> None:
    agent = agent_of(model, pydantic_ai.NativeOutput(Weather, strict=True))

    @agent.tool_plain
    def thermometer(city: Literal["Rome", "Oslo"]) -> int:
        """Tells the degrees."""
        return len(city)

    limits = pydantic_ai.UsageLimits(request_limit=8)
    try:
        result = await agent.run("How cold is it in Oslo?", usage_limits=limits)
    except pydantic_ai.exceptions.UsageLimitExceeded:
        return  # so small a model may go on to call; each of its calls was good
    assert isinstance(result.output, Weather)


async def test_streamed(model: Any) -> None:
    async with agent_of(model, Weather).run_stream("How cold is it in Oslo?") as result:
        assert isinstance(await result.get_output(), Weather)
