"""A batch on a server with keys that is killed in the middle: each line once, as on a server without any."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.served.conftest import Server
from tests.server.tenants.keys import write_keys

pytestmark = pytest.mark.embedded

MODEL = "SmolLM2-135M-Instruct"
NUM_LINES = 16


def body(number: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Say something about the number {number}."}],
        "max_tokens": 10 + number % 30,
        "temperature": 0.8 if number % 2 else 0,
        "seed": number,
    }


def start(tmp_path: Path) -> Server:
    flags = {"--api-keys-file": tmp_path / "keys.yaml", "--data-dir": tmp_path / "data", "--policy": "fair"}
    return Server("--isolate-keys", *(str(part) for flag in flags.items() for part in flag))


def client_of(server: Server, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key=f"{name}-key", max_retries=0, timeout=120)


def kill(server: Server) -> None:
    """The whole server at once, as the system does it when memory runs out."""
    engine = server.engine_pid
    for pid in (server.process.pid, engine):
        os.kill(pid, signal.SIGKILL)
    server.wait_ended()


def test_a_batch_survives_the_server(server: Server, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.yaml", nightly={"priority": 5}, ann={"weight": 2.0, "tokens_per_minute": 10**6})
    first = start(tmp_path)
    client = client_of(first, "nightly")
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body(number)}
        for number in range(NUM_LINES)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    beside = threading.Thread(target=_ask_until_it_is_gone, args=(first,))
    beside.start()
    while (counts := client.batches.retrieve(batch.id).request_counts) is None or counts.completed < 5:
        time.sleep(0.02)
    kill(first)
    beside.join()
    second = start(tmp_path)
    try:
        client = client_of(second, "nightly")
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            assert batch.status in ("in_progress", "finalizing")
            time.sleep(0.1)
        assert batch.output_file_id is not None
        answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        of_ann = client_of(second, "ann").chat.completions.create(**body(3)).to_dict()
    finally:
        assert second.terminate() == 0
    assert [answer["custom_id"] for answer in answers] == [str(number) for number in range(NUM_LINES)]
    for number, answer in enumerate(answers):
        alone = server.client.chat.completions.create(**body(number)).to_dict()
        assert answer["response"]["body"]["choices"] == alone["choices"]
    assert of_ann["choices"] == answers[3]["response"]["body"]["choices"]


def _ask_until_it_is_gone(server: Server) -> None:
    """Somebody who is answered meanwhile."""
    with client_of(server, "ann") as client:
        try:
            while True:
                client.chat.completions.create(**body(3))
        except (openai.APIConnectionError, httpx.HTTPError):
            pass
