"""Benchmark of the policies `fcfs` and `fair`: the keys' shares of an overloaded server.

Also measures how long a request waits behind fifty of another key, and checks the paper's bound in simulated runs.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from bench.fairness_bound import worst_of
from bench.local_server import LocalServer, local_server
from scheduler.waiting_queue import INPUT_COST, OUTPUT_COST
from server.client.openai_answers import ChunkParser

WEIGHTS = {"one": 1.0, "three": 3.0}
_CLIENTS = 24
"""Clients of each key, each of which sends its next request as soon as it is answered."""
_PLACES = 8
"""Maximum choices in flight (max_num_seqs)."""
_FLOOD = 50
_MODEL = "served"
_POLICIES = ("fcfs", "fair")


@dataclass(slots=True)
class Service:
    """The service that each key has received so far."""

    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WEIGHTS, 0))
    service: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WEIGHTS, 0.0))
    """Prompt and output tokens weighted by their costs, which the scheduler's shares are based on."""

    def since(self, before: "Service") -> tuple[float, float]:
        """Ratios of tokens and of service, heavier key to lighter key, since an earlier state."""
        light, heavy = WEIGHTS
        tokens = [self.tokens[name] - before.tokens[name] for name in (heavy, light)]
        service = [self.service[name] - before.service[name] for name in (heavy, light)]
        return tokens[0] / tokens[1], service[0] / service[1]

    def copy(self) -> "Service":
        return Service(dict(self.tokens), dict(self.service))


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Time to first token of a request behind many of another key."""

    seconds: float
    steps: int
    """Engine steps from the request to its first token."""


class Traffic:
    """Sends requests with different keys to one server."""

    def __init__(self, client: httpx.AsyncClient, url: str, seed: int) -> None:
        self._client = client
        self._url = url
        self._pick = random.Random(seed)
        self._numbers = itertools.count()
        self.service = Service()

    async def ask(self, name: str, num_prompt: int, num_output: int) -> float:
        """Request an answer and read it to the end; returns the seconds to the first token."""
        body = {
            "model": _MODEL,
            "prompt": [self._pick.randrange(1000, 40000) for _ in range(num_prompt)],
            "max_tokens": num_output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "speculation": "off",
        }
        headers = _bearer(name)
        start, first, told = time.perf_counter(), 0.0, 0
        parser = ChunkParser()
        async with self._client.stream("POST", f"{self._url}/v1/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                raise RuntimeError((await response.aread()).decode())
            async for data in response.aiter_bytes():
                for chunk in parser.feed(data):
                    if chunk.usage is None or chunk.usage.completion_tokens == told:
                        continue
                    if not told:
                        first = time.perf_counter() - start
                        self._book(name, num_prompt, INPUT_COST)
                    self._book(name, chunk.usage.completion_tokens - told, OUTPUT_COST)
                    told = chunk.usage.completion_tokens
        return first

    def _book(self, name: str, count: int, cost: float) -> None:
        self.service.tokens[name] += count
        self.service.service[name] += count * cost

    async def keep_asking(self, name: str) -> None:
        """Run one client for ever. The lighter key has longer prompts and answers."""
        longer = 2 if name == "one" else 1
        while True:
            await self.ask(name, longer * self._pick.randint(16, 64), longer * self._pick.randint(16, 64))

    async def steps(self) -> int:
        """Number of engine steps so far."""
        text = (await self._client.get(f"{self._url}/metrics", headers=_bearer("one"))).text
        line = next(line for line in text.splitlines() if line.startswith("samewise:engine_steps_total"))
        return int(float(line.split()[-1]))


def _bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"}


async def shares(server: LocalServer, seconds: float) -> tuple[float, float]:
    """The ratios of tokens and of service under overload."""
    async with httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
        traffic = Traffic(client, server.url, seed=1)
        tasks = [asyncio.create_task(traffic.keep_asking(name)) for name in WEIGHTS for _ in range(_CLIENTS)]
        await asyncio.sleep(5)  # until the policy has chosen all running requests
        before = traffic.service.copy()
        await asyncio.sleep(seconds)
        ratios = traffic.service.since(before)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if not isinstance(end, asyncio.CancelledError):
            raise RuntimeError("a client failed") from end
    return ratios


async def behind_a_flood(server: LocalServer, flood: int) -> FirstToken:
    """Measure one request that is sent after `flood` simultaneous requests of another key."""
    async with httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
        traffic = Traffic(client, server.url, seed=flood)
        tasks = [asyncio.create_task(traffic.ask("one", 128, 64)) for _ in range(flood)]
        before = await traffic.steps()
        while flood and await traffic.steps() < before + 2:  # noqa: ASYNC110  (the flood has come)
            await asyncio.sleep(0.005)
        before = await traffic.steps()
        first = await traffic.ask("three", 128, 1)
        steps = await traffic.steps() - before
        await asyncio.gather(*tasks)
    return FirstToken(first, steps)


async def measure(policy: str, seconds: float, rounds: int) -> tuple[tuple[float, float], dict[int, list[FirstToken]]]:
    """Measure shares on a server with few choices in flight, then first tokens with the default number."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        entries = [{"name": name, "key": f"{name}-key", "weight": weight} for name, weight in WEIGHTS.items()]
        keys.write_text(yaml.safe_dump({"keys": entries}))
        common = ["--served-model-name", _MODEL, "--api-keys-file", str(keys), "--policy", policy]
        common += ["--log-level", "warning", "--kv-cache-gib", "1"]
        async with local_server([*common, "--max-num-seqs", str(_PLACES)]) as server:
            ratios = await shares(server, seconds)
        async with local_server([*common, "--no-prefix-caching"]) as server:
            firsts = {flood: [await behind_a_flood(server, flood) for _ in range(rounds)] for flood in (0, _FLOOD)}
    return ratios, firsts


def table(results: Sequence[tuple[str, tuple[float, float], dict[int, list[FirstToken]]]]) -> Table:
    """Results with one line for each policy."""
    lines = Table(
        "policy", "tokens, 3 : 1", "service, 3 : 1", "first token alone", "steps", f"behind {_FLOOD}", "steps"
    )
    for policy, (tokens, service), firsts in results:
        cells = []
        for of_flood in firsts.values():
            cells.append(f"{statistics.median(one.seconds for one in of_flood) * 1000:.0f} ms")
            cells.append(f"{statistics.median(one.steps for one in of_flood):g}")
        lines.add_row(policy, f"{tokens:.2f}", f"{service:.2f}", *cells)
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the shares of two keys with weights 1 and 3 under overload.")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the overload for each policy")
    parser.add_argument("--rounds", type=int, default=5, help="number of requests behind a flood")
    parser.add_argument("--runs", type=int, default=10_000, help="simulated runs for the paper's bound")
    arguments = parser.parse_args()
    results = [(policy, *asyncio.run(measure(policy, arguments.seconds, arguments.rounds))) for policy in _POLICIES]
    console = Console()
    console.print(table(results))
    for policy, runs in (("fair", arguments.runs), ("fcfs", min(arguments.runs, 200))):
        worst = worst_of(runs, policy)  # type: ignore[arg-type]
        console.print(f"{policy}: in {runs:,} simulated runs, the largest difference was {worst:.2f} times the bound")


if __name__ == "__main__":
    main()
