r"""Our server beside llama.cpp's, with the same models, prompts and load client, in turns: one table, one JSON file.

llama.cpp gets 8-bit weights (Q8_0), made by its own converter, and a slot for each client with a KV cache of its own:
with one cache for all (--kv-unified), which is its other way, prompts took it three times as long. Its prompt cache is
off, since no prompt comes twice and keeping them would cost it time; all else is as it is by default. While one server
is measured, the other's processes are stopped. Neither guesses tokens ahead.

To build llama.cpp, for instance of the source package llama-cpp-python 0.3.36 of PyPI, unpacked:

    cd vendor/llama.cpp
    cmake -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF
    cmake --build build --target llama-server

The programs are then build/bin/llama-server and convert_hf_to_gguf.py, which runs on this Python and needs
`pip install sentencepiece`.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.local_server import LocalServer, local_server, paused, started
from bench.structured import SCHEMAS, endless
from model_runner.models.repository import resolve_model
from server.cli.loadtest.benchmark import find_model
from server.cli.loadtest.load import (
    Arrivals,
    Endpoint,
    Lengths,
    Report,
    Target,
    Workload,
    make_requests,
    open_client,
    run_load,
    summarize,
)

EMBEDDED = "embedded"
MODELS = (EMBEDDED, "llama-1b", "experts")
PARTS = ("decode", "prefill", "forms", "transformers")
PREFILL = 512
"""Tokens of each prompt that is only read."""
NUM_PREFILLS = 6
FORM_TOKENS = 32
"""Of each answer that is held to a form, and of free ones beside them: llama.cpp takes long for those."""
MIN_REQUESTS = 4
WARMUP_TOKENS = 8
WARMUP_SEED = 0x5EED
"""Where seeds differ in these bits, prompts do: our prefix cache is to have none of those that are measured."""
GOALS = {
    (EMBEDDED, "decode, 1 client"): 1.6,
    (EMBEDDED, "decode, 8 clients"): 3.3,
    (EMBEDDED, "decode, 32 clients"): 3.0,
    (EMBEDDED, "prefill of 512"): 3.0,
    ("experts", "decode, 1 client"): 1.2,
    ("experts", "decode, 8 clients"): 1.5,
    ("experts", "decode, 32 clients"): 2.0,
}
"""How many times llama.cpp's tokens per second are to be reached."""
TRANSFORMERS_GOAL = 10.0
"""Of a mixture of experts in a crowd, times plain transformers' tokens per second."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of both servers."""

    name: str
    clients: int
    num_requests: int
    input_len: int
    """Tokens, words where a chat template is around them."""
    output_len: int
    endpoint: Endpoint = "completions"
    fields: dict[str, Any] = field(default_factory=dict)
    """Further ones of each body."""

    @property
    def is_prefill(self) -> bool:
        """Whether it is prompts that count."""
        return self.output_len == 1

    def tokens_per_s(self, report: Report) -> float:
        """Of prompts or of answers. Raises RuntimeError where not all was read and written in full."""
        if report.failures:
            raise RuntimeError(f"{self.name}: {report.failures[0].count} failed: {report.failures[0].first_message}")
        expected = self.num_requests * self.output_len
        if report.output_tokens != expected:
            raise RuntimeError(f"{self.name}: {report.output_tokens} tokens came out instead of {expected}")
        if self.endpoint == "completions" and report.prompt_tokens != self.num_requests * self.input_len:
            raise RuntimeError(f"{self.name}: the prompts had {report.prompt_tokens} tokens")
        return (report.prompt_tokens if self.is_prefill else report.output_tokens) / report.duration_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both servers under one load: tokens per second of each round."""

    model: str
    load: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    other: str = "llama.cpp"

    @property
    def ratio(self) -> float:
        """Median of the rounds' own: what the machine does meanwhile hits both."""
        return statistics.median(one / other for one, other in zip(self.ours, self.theirs, strict=True))

    @property
    def goal(self) -> float | None:
        """What the ratio is to reach, if that is said."""
        return GOALS.get((self.model, self.load)) if self.other == "llama.cpp" else TRANSFORMERS_GOAL

    def cells(self) -> list[str]:
        """After the HEADINGS."""
        rates = [f"{statistics.median(rates):,.0f}" for rates in (self.ours, self.theirs)]
        goal = f"{self.goal:.1f} x" if self.goal else ""
        return [self.model, self.load, *rates, f"{self.ratio:.2f} x", goal, self.other]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "goal": self.goal}


HEADINGS = ("model", "load", "tok/s", "of the other", "ratio", "goal", "the other")


def make_loads(parts: Sequence[str], model: str, clients: Sequence[int], lengths: tuple[int, int]) -> list[Load]:
    """Those of the parts that this model has, with (input, output) lengths."""
    counts = [(count, f"{count} client{'s' if count > 1 else ''}") for count in clients]
    full = {"temperature": 0.0, "ignore_eos": True}
    loads = []
    if "decode" in parts:
        loads += [
            Load(f"decode, {name}", count, max(MIN_REQUESTS, count), *lengths, fields=full) for count, name in counts
        ]
    if "prefill" in parts:
        loads.append(Load(f"prefill of {PREFILL}", 1, NUM_PREFILLS, PREFILL, 1, fields=full))
    if "forms" in parts and model == EMBEDDED:
        loads += [
            Load(
                f"{form}, {name}",
                count,
                max(MIN_REQUESTS, count),
                lengths[0],
                FORM_TOKENS,
                "chat",
                {"temperature": 0.0, **fields},
            )
            for form, fields in _forms().items()
            for count, name in counts
        ]
    return loads


def _forms() -> dict[str, dict[str, Any]]:
    """Fields of free answers, and of those that are held to bench.structured's schemas, which have no end."""
    held = {
        name: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "items", "strict": True, "schema": endless(name)},
            }
        }
        for name in SCHEMAS
    }
    return {"free": {"ignore_eos": True}, **held}


def llama_command(server: Path, model: Path, clients: int, context: int) -> list[str]:
    """llama.cpp's server on all cores that we may use, with a slot of `context` tokens for each client."""
    threads = len(os.sched_getaffinity(0))
    slots = ["--parallel", str(clients), "--ctx-size", str(clients * context)]
    cache = ["--no-cache-prompt", "--cache-ram", "0"]
    return [str(server), "--model", str(model), "--threads", str(threads), *slots, *cache, "--log-verbosity", "1"]


def prepare(model: str, work: Path, converter: Path, console: Console) -> tuple[Path, Path]:
    """The folder that we serve and llama.cpp's file of it, made at first use. Raises CalledProcessError."""
    folder = resolve_model(None, console).path if model == EMBEDDED else work / model
    if not folder.is_dir():
        console.print(f"Making {folder} ...")
        made = work / f"{model}.part"
        subprocess.run([sys.executable, "-m", "bench.random_models", model, str(made)], check=True)
        made.rename(folder)
    file = work / f"{folder.name}.gguf"
    if not file.is_file():
        console.print(f"Converting {folder} for llama.cpp ...")
        part = file.with_suffix(".part")
        command = [sys.executable, str(converter), str(folder), "--outtype", "q8_0", "--outfile", str(part)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        part.rename(file)
    return folder, file


async def measure(server: LocalServer, load: Load, seed: int, vocab_size: int) -> float:
    """Tokens per second, after some requests that do not count; `seed` is that of the prompts."""
    url = f"{server.url}/v1"
    async with open_client({}) as client:
        target = Target(url, await find_model(client, url), load.endpoint, load.fields)
        workload = Workload(
            load.num_requests, Lengths(load.input_len, load.input_len), Lengths(load.output_len, load.output_len)
        )
        short = Lengths(min(load.output_len, WARMUP_TOKENS), min(load.output_len, WARMUP_TOKENS))
        warmup = replace(workload, num_requests=min(load.clients, 4), output_len=short, seed=seed ^ WARMUP_SEED)
        known = None if load.endpoint == "chat" else vocab_size
        await run_load(client, target, make_requests(warmup, known), Arrivals(load.clients))
        requests = make_requests(replace(workload, seed=seed), known)
        return load.tokens_per_s(summarize(await run_load(client, target, requests, Arrivals(load.clients))))


async def compare(
    model: str, ours: Sequence[str], theirs: Sequence[str], loads: Sequence[Load], rounds: int, vocab_size: int
) -> list[Comparison]:
    """Both servers under each load, in turns; who is first changes from round to round."""
    rates: list[tuple[list[float], list[float]]] = [([], []) for _ in loads]
    async with AsyncExitStack() as stack:
        servers = (
            await stack.enter_async_context(local_server(ours)),
            await stack.enter_async_context(started(theirs, "/health")),
        )
        for number in range(rounds):
            for index, load in enumerate(loads):
                for side in (0, 1) if number % 2 == 0 else (1, 0):
                    with paused(servers[1 - side]):
                        seed = 1 + number * len(loads) + index
                        rates[index][side].append(await measure(servers[side], load, seed, vocab_size))
    return [
        Comparison(model, load.name, tuple(one), tuple(other)) for load, (one, other) in zip(loads, rates, strict=True)
    ]


def beside_transformers(folder: Path, crowd: Comparison) -> list[Comparison]:
    """Our answers in a crowd beside plain transformers' generate, on one batch of as many such prompts."""
    compared = []
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-m", "bench.plain_generate", str(folder), "--dtype", dtype]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        theirs = (json.loads(said)["tokens_per_s"],) * len(crowd.ours)
        compared.append(replace(crowd, theirs=theirs, other=f"transformers, {dtype}"))
    return compared


def table(compared: Sequence[Comparison]) -> Table:
    """One line for each model and load."""
    lines = Table(*HEADINGS)
    for column in lines.columns[2:-1]:
        column.justify = "right"
    for one in compared:
        lines.add_row(*one.cells())
    return lines


def arguments_of(command: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Ours, and what is for `samewise serve`."""
    parser = argparse.ArgumentParser(
        description="Measure this server and llama.cpp's in turns.",
        epilog="Further arguments go to `samewise serve`.",
    )
    parser.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's build/bin/llama-server")
    parser.add_argument("--convert", type=Path, required=True, help="llama.cpp's convert_hf_to_gguf.py")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--work", type=Path, default=Path("build/llama-cpp"), help="folder for models")
    parser.add_argument("--json", type=Path, help="also write the result to this JSON file")
    arguments, rest = parser.parse_known_args(command)
    if "transformers" in arguments.parts and "decode" not in arguments.parts:
        parser.error("--parts transformers: needs decode, beside which it is put")
    return arguments, rest


def run_model(
    model: str, arguments: argparse.Namespace, server_arguments: Sequence[str], console: Console
) -> list[Comparison]:
    """All that was asked for of one of the models."""
    folder, file = prepare(model, arguments.work, arguments.convert, console)
    lengths = arguments.input_len, arguments.output_len
    loads = make_loads(arguments.parts, model, arguments.clients, lengths)
    if not loads:
        return []
    context = 256 + max(PREFILL, *(load.input_len + load.output_len for load in loads))
    theirs = llama_command(arguments.llama_server, file, max(arguments.clients), context)
    ours = [str(folder), "--speculation", "off", "--log-level", "warning", *server_arguments]
    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    compared = asyncio.run(compare(model, ours, theirs, loads, arguments.rounds, vocab_size))
    if "transformers" in arguments.parts and model == "experts":
        crowd = next(one for one in reversed(compared) if one.load.startswith("decode"))
        compared += beside_transformers(folder, crowd)
    return compared


def main() -> None:
    """Measure and print; write JSON if asked to."""
    arguments, server_arguments = arguments_of()
    console = Console()
    arguments.work.mkdir(parents=True, exist_ok=True)
    compared = [line for model in arguments.models for line in run_model(model, arguments, server_arguments, console)]
    console.print(table(compared))
    console.print(
        f"Tokens per second, medians of {arguments.rounds} rounds in turns; ratios are medians of the rounds' own. "
        f"{arguments.input_len} tokens in, {arguments.output_len} out, but for prefill."
    )
    if arguments.json:
        content = {"rounds": arguments.rounds, "comparisons": [one.as_dict() for one in compared]}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
