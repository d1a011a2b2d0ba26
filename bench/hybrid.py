"""Benchmark of models with recurrent layers, and with sinks, windows and experts: speed next to llama.cpp's server,
cached prompts, and the memory of the caches.

The weights are random: of Qwen3.5-0.8B's form, and of gpt-oss's with 8 layers and its experts in MXFP4. llama.cpp's own
converter makes its files of them (Q8_0; MXFP4 stays). `bench/against_llama_cpp.py` says how to build llama.cpp.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from bench.against_llama_cpp import (
    PREFILL,
    Comparison,
    Load,
    compare,
    convert,
    llama_command,
    make_loads,
    measure,
    prepare_folder,
    table,
)
from bench.local_server import LocalServer, local_server, process_family, resident_mib
from server.cli.loadtest.benchmark import find_model
from server.cli.loadtest.load import open_client

MODELS = ("qwen3.5-0.8b", "gpt-oss-8-layers")
CONVERTING = {"qwen3.5-0.8b": ("--no-mtp",)}
"""Options of llama.cpp's converter, which would look for a module that predicts further tokens."""
PARTS = ("decode", "prefill", "cached", "memory")
CACHED = 4096
"""Prompt tokens whose first token is awaited, first computed, then from the cache."""
CACHED_GOAL = 8.0
"""How much sooner the first token of a cached prompt is to come."""
NUM_CACHED = 3
FILLING = 2048
"""Prompt tokens of the requests that fill the caches."""
MEMORY_GIB = 1.0
"""Planned memory of the caches that are filled."""
MEMORY_SEQS = 2
"""Choices at a time while they are filled."""
_MIB_OF_GIB = 1024


@dataclass(frozen=True, slots=True)
class Cached:
    """Median milliseconds to the first token of prompts that were never seen, and of the same prompts again."""

    model: str
    new_ms: float
    again_ms: float

    @property
    def ratio(self) -> float:
        return self.new_ms / self.again_ms

    def line(self) -> str:
        """For the console."""
        times = f"first token after {self.new_ms:,.0f} ms, and when it is cached {self.again_ms:,.0f} ms"
        return f"{self.model}, a prompt of {CACHED:,} tokens: {times}: {self.ratio:.1f} x (goal {CACHED_GOAL:.0f} x)"


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a server's caches in MiB."""

    model: str
    planned: float
    taken: float
    """Growth of the server's processes while all blocks are filled once. A first prompt would already take some."""
    tokens: int
    """Tokens that the blocks hold."""

    def line(self) -> str:
        """For the console."""
        amounts = f"{self.planned:,.0f} MiB planned, {self.taken:,.0f} MiB taken by {self.tokens:,} tokens"
        return f"{self.model}, caches: {amounts}"


async def ask(url: str, prompt: Sequence[int]) -> float:
    """Milliseconds until a server answers with one token. Raises httpx.HTTPStatusError."""
    async with open_client({}) as client:
        model = await find_model(client, f"{url}/v1")
        body = {"model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0.0}
        begin = time.perf_counter()
        (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()
        return 1000 * (time.perf_counter() - begin)


def random_prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    """Tokens that differ from seed to seed."""
    return random.Random(seed).choices(range(3, vocab_size), k=length)


async def measure_cached(model: str, command: Sequence[str], vocab_size: int) -> Cached:
    """Send each prompt twice, one after the other."""
    new, again = [], []
    async with local_server(command) as server:
        await ask(server.url, random_prompt(0, PREFILL, vocab_size))
        for seed in range(1, NUM_CACHED + 1):
            prompt = random_prompt(seed, CACHED, vocab_size)
            new.append(await ask(server.url, prompt))
            again.append(await ask(server.url, prompt))
    return Cached(model, statistics.median(new), statistics.median(again))


async def measure_memory(model: str, command: Sequence[str], vocab_size: int) -> Memory:
    """Fill the caches of a server with prompts, and one more."""
    sizes = ["--kv-cache-gib", str(MEMORY_GIB), "--max-num-seqs", str(MEMORY_SEQS)]
    async with local_server([*command, *sizes]) as server:
        before, tokens = _resident(server), await _capacity(server.url)
        prompts = (random_prompt(seed, FILLING, vocab_size) for seed in range(1, tokens // FILLING + 2))
        for prompt in prompts:
            await ask(server.url, prompt)
        return Memory(model, MEMORY_GIB * _MIB_OF_GIB, _resident(server) - before, tokens)


def _resident(server: LocalServer) -> float:
    return sum(map(resident_mib, process_family(server.pid)))


async def _capacity(url: str) -> int:
    """Tokens that a server's blocks hold, from its metrics."""
    async with httpx.AsyncClient(trust_env=False) as client:
        metrics = (await client.get(f"{url}/metrics")).text
    _, _, rest = metrics.partition('kv_cache_size_tokens="')
    return int(rest.partition('"')[0])


async def measure_alone(command: Sequence[str], loads: Sequence[Load], rounds: int, vocab_size: int) -> list[str]:
    """Our tokens per second under each load, where llama.cpp is not there."""
    lines = []
    async with local_server(command) as server:
        for index, load in enumerate(loads):
            rates = [
                await measure(server, load, 1 + number * len(loads) + index, vocab_size) for number in range(rounds)
            ]
            lines.append(f"{load.name}: {statistics.median(rates):,.1f} tok/s")
    return lines


def arguments_of(command: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse our arguments; returns them and the rest, for `samewise serve`."""
    parser = argparse.ArgumentParser(
        description="Measure models with recurrent layers, and with sinks, windows and experts.",
        epilog="Further arguments go to `samewise serve`.",
    )
    parser.add_argument(
        "--llama-server",
        help="llama.cpp's llama-server; or a command with {model}, {threads}, {clients} and {context}, to which --host "
        "and --port are added. Without it, only this server is measured",
    )
    parser.add_argument("--convert", type=Path, help="llama.cpp's convert_hf_to_gguf.py, needed with --llama-server")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--work", type=Path, default=Path("build/llama-cpp"), help="folder for models")
    parser.add_argument("--json", type=Path, help="also write the result to this JSON file")
    arguments, rest = parser.parse_known_args(command)
    if arguments.llama_server and not arguments.convert:
        parser.error("--llama-server needs --convert, which makes its files of the same weights")
    return arguments, rest


def run_loads(
    model: str, folder: Path, file: Path | None, ours: Sequence[str], arguments: argparse.Namespace
) -> tuple[list[Comparison], list[str]]:
    """Comparisons with llama.cpp if there is a file for it, otherwise lines about this server alone."""
    loads = make_loads(arguments.parts, model, arguments.clients, (arguments.input_len, arguments.output_len))
    vocab_size = vocabulary_of(folder)
    if not loads:
        return [], []
    own = [*ours, "--max-num-seqs", str(max(arguments.clients))]
    if file is None:
        return [], asyncio.run(measure_alone(own, loads, arguments.rounds, vocab_size))
    context = 256 + max(PREFILL, *(load.input_len + load.output_len for load in loads))
    theirs = llama_command(arguments.llama_server, file, max(arguments.clients), context)
    return asyncio.run(compare(model, own, theirs, loads, arguments.rounds, vocab_size)), []


def vocabulary_of(folder: Path) -> int:
    """The size of a model's vocabulary."""
    entries: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(entries["vocab_size"])


def main() -> None:
    """Measure and print; with --json also write the results."""
    arguments, server_arguments = arguments_of()
    console = Console()
    arguments.work.mkdir(parents=True, exist_ok=True)
    compared: list[Comparison] = []
    others: list[Cached | Memory] = []
    parts: dict[str, Callable[[str, Sequence[str], int], Coroutine[Any, Any, Cached | Memory]]] = {
        "cached": measure_cached,
        "memory": measure_memory,
    }
    for model in arguments.models:
        folder = prepare_folder(model, arguments.work, console)
        options = CONVERTING.get(model, ())
        file = None
        if arguments.llama_server:
            file = convert(folder, arguments.work, arguments.convert, console, *options)
        ours = [str(folder), "--speculation", "off", "--log-level", "warning", *server_arguments]
        comparisons, lines = run_loads(model, folder, file, ours, arguments)
        compared += comparisons
        for line in lines:
            console.print(f"{model}, {line}")
        for part, measure_part in parts.items():
            if part in arguments.parts:
                others.append(asyncio.run(measure_part(model, ours, vocabulary_of(folder))))
                console.print(others[-1].line())
    if compared:
        console.print(table(compared))
    if arguments.json:
        content = [one.as_dict() for one in compared], [asdict(one) for one in others]
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
