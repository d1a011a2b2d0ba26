"""Several models behind one address, of which two fit into memory: real engines, in processes of their own."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import openai
import pytest

from bench import tiny_models
from tests import tiny_vocabulary
from tests.served.conftest import Server, stream_texts
from tests.served.memory_group import memory_group

TINY = {"dense": "llama", "mixture": "mixtral"}
EMBEDDED = "SmolLM2-135M-Instruct"
NUM_CLIENTS = 16
NUM_REQUESTS = 80
PROMPTS = tuple("a b c d e f g h "[: 2 * length] for length in range(1, 9))
MAX_TOKENS = 12
LONG = 600
"""Tokens of streams that run while something happens."""
Answers = Mapping[tuple[str, str], str]
"""Texts by model and prompt."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The model to serve under each name."""
    parent = tmp_path_factory.mktemp("several")
    for name, kind in TINY.items():
        tiny_models.write_tiny_model(kind, parent / name)
        tiny_vocabulary.tokenizer(tiny_models.VOCAB_SIZE).save(str(parent / name / "tokenizer.json"))
    return {name: str(parent / name) for name in TINY} | {"embedded": EMBEDDED}


@pytest.fixture(scope="module")
def alone(folders: Mapping[str, str], server: Server) -> Answers:
    """The answers of servers that have one model each."""
    found = _answers(server, EMBEDDED, "embedded")
    for name in TINY:
        tiny = Server(folders[name], "--served-model-name", name)
        found |= _answers(tiny, name, name)
        assert tiny.terminate() == 0
    assert len(set(found.values())) > len(found) / 2
    return found


def _answers(server: Server, model: str, name: str) -> dict[tuple[str, str], str]:
    texts = asyncio.run(stream_texts(server, model, PROMPTS, MAX_TOKENS))
    return {(name, prompt): text for prompt, (text, _) in zip(PROMPTS, texts, strict=True)}


@pytest.fixture(scope="module")
def several(folders: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    lines = ["memory_gib: 3.4", "models:", *(f"  - {{name: {name}, path: {path}}}" for name, path in folders.items())]
    settings = tmp_path_factory.mktemp("settings") / "several.yaml"
    settings.write_text("\n".join(lines))
    server = Server("--config", str(settings))
    yield server
    assert server.terminate() == 0


async def test_crowds_get_the_answers_of_a_model_alone(several: Server, alone: Answers) -> None:
    """Before and after models were unloaded and loaded again, streamed and whole; no request is cut or lost."""
    chance = random.Random(1)
    asked = [chance.choice(list(alone)) for _ in range(NUM_REQUESTS)]
    answers: dict[int, str] = {}

    async def work(client: openai.AsyncOpenAI) -> None:
        while asked:
            name, prompt = asked.pop()
            number = len(asked)
            text = await _complete(client, name, prompt, is_streamed=number % 2 == 0)
            assert text == alone[name, prompt], (name, prompt)
            answers[number] = text

    async with several.async_client() as client:
        await asyncio.gather(*(work(client) for _ in range(NUM_CLIENTS)))
    assert len(answers) == NUM_REQUESTS
    assert several.metric("model_loads_total") < NUM_REQUESTS / 5


async def _complete(client: openai.AsyncOpenAI, name: str, prompt: str, *, is_streamed: bool) -> str:
    fields = {"seed": PROMPTS.index(prompt), "max_tokens": MAX_TOKENS, "extra_body": {"ignore_eos": True}}
    if not is_streamed:
        return (await client.completions.create(model=name, prompt=prompt, **fields)).choices[0].text
    stream = await client.completions.create(model=name, prompt=prompt, stream=True, **fields)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def test_killing_all_engines_changes_no_stream(several: Server) -> None:
    """Two of them run models; a third may wait for the next load."""
    prompts = PROMPTS[:4]
    undisturbed = [await stream_texts(several, name, prompts, LONG) for name in TINY]
    begun = [asyncio.Event() for _ in TINY]
    streams = [
        asyncio.create_task(stream_texts(several, name, prompts, LONG, event))
        for name, event in zip(TINY, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    for pid in several.engine_pids:
        os.kill(pid, signal.SIGKILL)
    assert await asyncio.gather(*streams) == undisturbed
    assert several.metric("engine_restarts_total") >= len(TINY)


async def test_only_as_many_are_loaded_as_the_machine_holds(folders: Mapping[str, str], tmp_path: Path) -> None:
    """The limit holds what the documentation says: `memory_gib`, in which one model fits, and the server itself.

    All at once would be too much, and the kernel would kill one of the processes.
    """
    memory_gib = 0.25
    entries = [{"name": f"m{number}", "path": folders["dense"], "load": "demand"} for number in range(4)]
    settings = tmp_path / "settings.yaml"
    settings.write_text(json.dumps({"memory_gib": memory_gib, "page": False, "models": entries}))
    with memory_group(int((memory_gib + 0.5) * (1 << 30))) as group:
        server = Server("--config", str(settings), "--kv-cache-gib", "0.01", begins=group.command)
        try:
            async with server.async_client() as client:
                asked = [_complete(client, entry["name"], PROMPTS[3], is_streamed=False) for entry in entries]
                texts = await asyncio.gather(*asked)
            assert server.metric("model_loads_total") == len(entries)
            assert server.metric("engine_restarts_total") == 0
        finally:
            ended = server.terminate()
        assert (ended, group.num_killed) == (0, 0)
    assert len(set(texts)) == 1
