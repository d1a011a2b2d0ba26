"""A model with recurrent layers, served: states are no part of what a restart needs."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import tiny_models
from tests import tiny_vocabulary
from tests.served.conftest import Server, stream_texts

NUM_STREAMS = 24


@pytest.fixture
def recurrent_server(tmp_path: Path) -> Iterator[Server]:
    tiny_models.write_tiny_model("qwen3_5_text", tmp_path)
    tiny_vocabulary.tokenizer(tiny_models.VOCAB_SIZE).save(str(tmp_path / "tokenizer.json"))
    running = Server("--served-model-name", "recurrent", "--state-snapshot-every", "64", str(tmp_path))
    yield running
    assert running.terminate() == 0


async def test_killing_the_engine_changes_no_stream(recurrent_server: Server) -> None:
    prompts = ["a b c " * (10 + 3 * index) for index in range(NUM_STREAMS)]
    undisturbed = await stream_texts(recurrent_server, "recurrent", prompts, 60)
    begun = asyncio.Event()
    streams = asyncio.create_task(stream_texts(recurrent_server, "recurrent", prompts, 60, begun))
    await begun.wait()
    os.kill(recurrent_server.engine_pid, signal.SIGKILL)
    assert await streams == undisturbed
    assert len(set(undisturbed)) > NUM_STREAMS / 2
    assert recurrent_server.metric("engine_restarts_total") == 1
