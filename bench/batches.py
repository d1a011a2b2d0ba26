"""Benchmark of a batch's effect on interactive requests: time to first token and between tokens, with and without."""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
from rich.console import Console
from rich.table import Table

from bench.local_server import local_server
from server.client.openai_answers import ChunkParser

_MODEL = "served"
_NUM_PROMPT, _NUM_OUTPUT = 64, 128


@dataclass(slots=True)
class Waits:
    """Clients' waiting times in seconds: to the first token, and between tokens."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement: the clients' waiting times, and batch lines answered per second."""

    waits: Waits
    lines_per_s: float


async def ask(client: httpx.AsyncClient, url: str, pick: random.Random, waits: Waits) -> None:
    """Request one answer and record its waiting times."""
    body = {**_body(pick), "stream": True, "speculation": "off"}
    last, parser = time.perf_counter(), ChunkParser()
    is_first = True
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        async for data in response.aiter_bytes():
            for chunk in parser.feed(data):
                if not chunk.choices or chunk.choices[0].finish_reason is not None:
                    continue
                now = time.perf_counter()
                (waits.first if is_first else waits.between).append(now - last)
                is_first, last = False, now


def _body(pick: random.Random) -> dict[str, object]:
    prompt = [pick.randrange(1000, 40000) for _ in range(_NUM_PROMPT)]
    return {"model": _MODEL, "prompt": prompt, "max_tokens": _NUM_OUTPUT, "ignore_eos": True, "temperature": 0}


async def turn(client: httpx.AsyncClient, url: str, num_clients: int, seconds: float, num_lines: int) -> Turn:
    """Measure `num_clients` clients for some seconds, with a batch of `num_lines` lines (0: no batch)."""
    batch_id = None if not num_lines else await start_batch(client, url, num_lines)
    waits, pick = Waits(), random.Random(num_lines)

    async def keep_asking() -> None:
        while True:
            await ask(client, url, pick, waits)

    tasks = [asyncio.create_task(keep_asking()) for _ in range(num_clients)]
    await asyncio.sleep(2)  # until all clients are being answered
    waits.first.clear()
    waits.between.clear()
    before = await num_done(client, url, batch_id)
    await asyncio.sleep(seconds)
    lines = await num_done(client, url, batch_id) - before
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if batch_id is not None:
        await client.post(f"{url}/v1/batches/{batch_id}/cancel")
        while (await batch_of(client, url, batch_id))["status"] != "cancelled":  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return Turn(waits, lines / seconds)


async def start_batch(client: httpx.AsyncClient, url: str, num_lines: int) -> str:
    """Start a batch; returns its id once it runs."""
    pick = random.Random(0)
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": _body(pick)}
        for number in range(num_lines)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = await client.post(f"{url}/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
    body = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id: str = (await client.post(f"{url}/v1/batches", json=body)).json()["id"]
    while (await batch_of(client, url, batch_id))["status"] == "validating":  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return batch_id


async def batch_of(client: httpx.AsyncClient, url: str, batch_id: str) -> dict[str, object]:
    """The batch's current state."""
    answer: dict[str, object] = (await client.get(f"{url}/v1/batches/{batch_id}")).json()
    return answer


async def num_done(client: httpx.AsyncClient, url: str, batch_id: str | None) -> int:
    """Number of the batch's lines that have been answered."""
    if batch_id is None:
        return 0
    counts = (await batch_of(client, url, batch_id))["request_counts"]
    assert isinstance(counts, dict)
    return int(counts["completed"])


async def measure(concurrency: Sequence[int], rounds: int, seconds: float, num_lines: int) -> list[list[Turn]]:
    """For each number of clients, alternating turns without and with a batch."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "--served-model-name",
            _MODEL,
            "--data-dir",
            folder,
            "--kv-cache-gib",
            "1",
            "--log-level",
            "warning",
        ]
        async with local_server(arguments) as server, httpx.AsyncClient(timeout=None, trust_env=False) as client:
            return [
                [
                    await turn(client, server.url, num_clients, seconds, with_it * num_lines)
                    for _ in range(rounds)
                    for with_it in (False, True)
                ]
                for num_clients in concurrency
            ]


def table(concurrency: Sequence[int], results: Sequence[Sequence[Turn]]) -> Table:
    """One line for each number of clients, with medians over all turns."""
    lines = Table("clients", "between tokens", "with a batch", "", "first token", "with a batch", "lines/s")
    for num_clients, turns in zip(concurrency, results, strict=True):
        without, with_it = turns[::2], turns[1::2]
        between = [statistics.median(s for one in of for s in one.waits.between) * 1000 for of in (without, with_it)]
        first = [statistics.median(s for one in of for s in one.waits.first) * 1000 for of in (without, with_it)]
        lines.add_row(
            str(num_clients),
            *(f"{value:.2f} ms" for value in between),
            f"{between[1] / between[0]:.2f} x",
            *(f"{value:.0f} ms" for value in first),
            f"{statistics.median(one.lines_per_s for one in with_it):.2f}",
        )
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure how much a batch slows down interactive requests.")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each turn")
    parser.add_argument("--lines", type=int, default=2000, help="number of lines of the batch")
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments.concurrency, arguments.rounds, arguments.seconds, arguments.lines))
    Console().print(table(arguments.concurrency, results))


if __name__ == "__main__":
    main()
