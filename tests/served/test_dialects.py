"""One conversation through every API: the same text, whole and streamed, with speculation and without, all at once."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from tests.served.conftest import Server

pytestmark = pytest.mark.embedded
MODEL = "SmolLM2-135M-Instruct"
SYSTEM = "You are a sailor."
TURNS = [
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A sailor, on my way to Oslo."},
    {"role": "user", "content": "Tell me of the sea, and of the sea again."},
]
MESSAGES: list[Any] = [{"role": "system", "content": SYSTEM}, *TURNS]
DRAWN = {"temperature": 0.8, "top_p": 0.95}
NUM_TOKENS = 40
WAYS = [{"speculation": "off"}, {"speculation": {"method": "auto"}}, {"speculation": {"method": "ngram"}}]


class Asking:
    """The conversation by each API, with OpenAI's client, Anthropic's or Ollama's."""

    def __init__(self, server: Server, prompt: list[int]) -> None:
        self.openai = openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=server.address, api_key="none", max_retries=0)
        self.ollama = ollama.AsyncClient(host=server.address)
        self._prompt = prompt

    def all(self, extra: dict[str, Any]) -> Iterator[Awaitable[str]]:
        """Each API, whole and streamed."""
        asks: list[Callable[[dict[str, Any]], Awaitable[str]]] = [
            self.chat, self.streamed_chat, self.response, self.streamed_response, self.message, self.streamed_message,
            self.completion, self.ollama_chat, self.streamed_ollama_chat,
        ]  # fmt: skip
        return (ask({"seed": 5, **extra}) for ask in asks)

    async def chat(self, extra: dict[str, Any]) -> str:
        answer = await self.openai.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=NUM_TOKENS, **DRAWN, extra_body=extra
        )
        return answer.choices[0].message.content or ""

    async def streamed_chat(self, extra: dict[str, Any]) -> str:
        chunks = await self.openai.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=NUM_TOKENS, **DRAWN, extra_body=extra, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def response(self, extra: dict[str, Any]) -> str:
        answer = await self.openai.responses.create(
            model=MODEL, instructions=SYSTEM, input=TURNS, max_output_tokens=NUM_TOKENS, **DRAWN, extra_body=extra
        )
        return answer.output_text

    async def streamed_response(self, extra: dict[str, Any]) -> str:
        events = await self.openai.responses.create(
            model=MODEL, input=MESSAGES, max_output_tokens=NUM_TOKENS, **DRAWN, extra_body=extra, stream=True
        )
        return "".join([event.delta async for event in events if event.type == "response.output_text.delta"])

    async def message(self, extra: dict[str, Any]) -> str:
        answer = await self.anthropic.messages.create(
            model=MODEL, system=SYSTEM, messages=TURNS, max_tokens=NUM_TOKENS, extra_body={**DRAWN, **extra}
        )
        return "".join(block.text for block in answer.content if block.type == "text")

    async def streamed_message(self, extra: dict[str, Any]) -> str:
        async with self.anthropic.messages.stream(
            model=MODEL, system=SYSTEM, messages=TURNS, max_tokens=NUM_TOKENS, extra_body={**DRAWN, **extra}
        ) as stream:
            return "".join([text async for text in stream.text_stream])

    async def ollama_chat(self, extra: dict[str, Any]) -> str:
        options = {**DRAWN, "top_k": 0, "num_predict": NUM_TOKENS, "seed": extra["seed"]}
        return (await self.ollama.chat(MODEL, MESSAGES, options=options)).message.content or ""

    async def streamed_ollama_chat(self, extra: dict[str, Any]) -> str:
        options = {**DRAWN, "top_k": 0, "num_predict": NUM_TOKENS, "seed": extra["seed"]}
        parts = await self.ollama.chat(f"{MODEL}:latest", MESSAGES, options=options, stream=True)
        return "".join([part.message.content or "" async for part in parts])

    async def completion(self, extra: dict[str, Any]) -> str:
        answer = await self.openai.completions.create(
            model=MODEL, prompt=self._prompt, max_tokens=NUM_TOKENS, **DRAWN, extra_body=extra
        )
        return answer.choices[0].text


@pytest.fixture
def asking(server: Server) -> Asking:
    asked = {"model": MODEL, "messages": MESSAGES, "add_generation_prompt": True}
    return Asking(server, httpx.post(f"{server.address}/tokenize", json=asked).json()["tokens"])


async def test_the_same_conversation_is_the_same_text(asking: Asking) -> None:
    async with asking.openai, asking.anthropic, asking.ollama:
        alone = await asking.chat({"seed": 5})
        crowd = await asyncio.gather(*(ask for way in WAYS for ask in asking.all(way)))
        other = await asking.message({"seed": 6})
    assert alone
    assert set(crowd) == {alone}
    assert other != alone
