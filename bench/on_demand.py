"""Time from a request for a model that is not loaded to its first token.

    python -m bench.on_demand                                   # the embedded model, and two tiny random ones
    python -m bench.on_demand --model FOLDER --loads 11

The first part loads one model again and again: each load begins when a process that has imported everything waits for
it, as `model_spare_ready` of the metrics says. The second part asks three models in turn of which two fit, so that each
request waits until the least recently used model is gone: that is the time of a whole turn with a switch. A load before
the first one that counts packs the weights for the machine.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from bench.local_server import local_server
from bench.random_encoders import tokenizer
from bench.tiny_models import write_tiny_model
from model_runner.hub.names import EMBEDDED_NAME

MEASURED = "measured"
TINY = {"tiny-llama": "llama", "tiny-mixture": "mixtral"}
"""Model types of the other models."""
_POLL_S = 0.02
_TIMEOUT_S = 600.0
_GIB = 1 << 30


def write_settings(folder: Path, model: str, kv_cache_gib: float, memory_gib: float | None = None) -> Path:
    """Write the tiny models, if they are not there, and a settings file for three models on demand."""
    for name, kind in TINY.items():
        if not (folder / name).exists():
            write_tiny_model(kind, folder / name)
            tokenizer().save(str(folder / name / "tokenizer.json"))
    models = [{"name": MEASURED, "path": model}, *({"name": name, "path": str(folder / name)} for name in TINY)]
    for one in models:
        one["load"] = "demand"
    settings = {"kv_cache_gib": kv_cache_gib, "log_level": "warning", "models": models}
    settings |= {} if memory_gib is None else {"memory_gib": memory_gib}
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


async def spare_is_ready(client: httpx.AsyncClient) -> None:
    """Returns when a process waits for the next load."""
    while "samewise:model_spare_ready 1.0" not in (await client.get("/metrics")).text:  # noqa: ASYNC110  (not our loop)
        await asyncio.sleep(_POLL_S)


async def first_token_s(client: httpx.AsyncClient, model: str) -> float:
    """Seconds from a request to its first token. Returns when the answer has ended."""
    body = {"model": model, "prompt": "a b c", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    start, first = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter() - start
    return first


async def measure_loads(client: httpx.AsyncClient, loads: int) -> list[float]:
    """The times of loads with a process that waits, after one that does not count."""
    times = []
    for _ in range(loads + 1):
        await spare_is_ready(client)
        times.append(await first_token_s(client, MEASURED))
        (await client.post("/v1/models/unload", json={"model": MEASURED})).raise_for_status()
    return times[1:]


async def measure_turns(client: httpx.AsyncClient, turns: int) -> dict[str, list[float]]:
    """The times of each model when all are asked in turn, after a turn that does not count."""
    times: dict[str, list[float]] = {name: [] for name in (MEASURED, *TINY)}
    for turn in range(turns + 1):
        for name, found in times.items():
            seconds = await first_token_s(client, name)
            if turn:
                found.append(seconds)
    return times


async def sizes(client: httpx.AsyncClient) -> Mapping[str, int]:
    """The memory of each model, once all are planned."""
    while True:
        models = (await client.get("/v1/models")).json()["data"]
        found = {one["id"]: one["status"]["memory_bytes"] for one in models}
        if all(found.values()):
            return found
        await asyncio.sleep(_POLL_S)


async def measure(model: str, kv_cache_gib: float, loads: int, turns: int) -> dict[str, list[float]]:
    """The times of both parts, by what was measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = write_settings(folder, model, kv_cache_gib)
        async with local_server(["--config", str(settings)]) as server, _client(server.url) as client:
            needed = await sizes(client)
            times = {"load": await measure_loads(client, loads)}
        two = (sum(needed.values()) - 1) / _GIB
        settings = write_settings(folder, model, kv_cache_gib, memory_gib=two)
        async with local_server(["--config", str(settings)]) as server, _client(server.url) as client:
            await sizes(client)
            by_model = await measure_turns(client, turns)
        return times | {f"turn, {one}": found for one, found in by_model.items()}


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description="Measure loads on demand.")
    parser.add_argument("--model", default=EMBEDDED_NAME, help="a folder, a GGUF file or a hub name; default: embedded")
    parser.add_argument("--kv-cache-gib", type=float, default=0.1, help="of each model")
    parser.add_argument("--loads", type=int, default=7)
    parser.add_argument("--turns", type=int, default=3, help="of three models of which two fit")
    asked = parser.parse_args(arguments)
    found = asyncio.run(measure(asked.model, asked.kv_cache_gib, asked.loads, asked.turns))
    table = Table("to the first token", "median s", "least s", "most s", "loads")
    for name, times in found.items():
        table.add_row(
            name, *(f"{one:.2f}" for one in (statistics.median(times), min(times), max(times))), f"{len(times)}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
