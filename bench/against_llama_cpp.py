r"""Benchmark against llama.cpp's server, in turns, with the same models, prompts and load client.

llama.cpp uses 8-bit weights (Q8_0) from its own converter, and a slot with a separate KV cache for each client. Its
alternative, one cache for all slots (--kv-unified), took three times as long for prompts. Its prompt cache is off,
because no prompt is repeated and storing them would cost time; everything else is the default. While one server is
measured, the other's processes are stopped. Neither uses speculation.

To build llama.cpp, for instance from the unpacked source package llama-cpp-python 0.3.36 of PyPI:

    cd vendor/llama.cpp
    cmake -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF
    cmake --build build --target llama-server

The programs are then build/bin/llama-server and convert_hf_to_gguf.py, which runs with this Python and needs
`pip install sentencepiece`.
"""

import argparse
import asyncio
import json
import os
import shlex
import shutil
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
from safetensors.torch import save_file

from bench.local_server import LocalServer, local_server, paused, started
from bench.structured import SCHEMAS, endless
from model_runner.hub.repository import resolve_model
from model_runner.spec.model_folder import open_checkpoint
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
"""Prompt tokens in the prefill measurements."""
NUM_PREFILLS = 6
FORM_TOKENS = 32
"""Tokens of an answer in the structured output measurements; few, because llama.cpp is slow at them."""
MIN_REQUESTS = 4
WARMUP_TOKENS = 8
WARMUP_SEED = 0x5EED
"""XORed to the seed, so that warm-up prompts differ and the prefix cache has none of the measured ones."""
GOALS = {
    (EMBEDDED, "decode, 1 client"): 1.6,
    (EMBEDDED, "decode, 8 clients"): 3.3,
    (EMBEDDED, "decode, 32 clients"): 3.0,
    (EMBEDDED, "prefill of 512"): 3.0,
    ("experts", "decode, 1 client"): 1.2,
    ("experts", "decode, 8 clients"): 1.5,
    ("experts", "decode, 32 clients"): 2.0,
}
"""Target ratio of our tokens per second to llama.cpp's, by model and load."""
TRANSFORMERS_GOAL = 10.0
"""Target ratio to plain transformers, for a mixture of experts with many clients."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load that both servers are measured under."""

    name: str
    clients: int
    num_requests: int
    input_len: int
    """Prompt length in tokens; in words if there is a chat template."""
    output_len: int
    endpoint: Endpoint = "completions"
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of each body."""

    @property
    def is_prefill(self) -> bool:
        """Whether prompt tokens are counted instead of output tokens."""
        return self.output_len == 1

    def tokens_per_s(self, report: Report) -> float:
        """Prompt or output tokens per second. Raises RuntimeError if an answer failed or has the wrong length."""
        if report.failures:
            raise RuntimeError(f"{self.name}: {report.failures[0].count} failed: {report.failures[0].first_message}")
        expected = self.num_requests * self.output_len
        if report.output_tokens != expected:
            raise RuntimeError(f"{self.name}: {report.output_tokens} output tokens instead of {expected}")
        if self.endpoint == "completions" and report.prompt_tokens != self.num_requests * self.input_len:
            raise RuntimeError(f"{self.name}: the prompts had {report.prompt_tokens} tokens")
        return (report.prompt_tokens if self.is_prefill else report.output_tokens) / report.duration_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens per second of both servers under one load, for each round."""

    model: str
    load: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    other: str = "llama.cpp"

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios, because disturbances of the machine affect both servers of a round."""
        return statistics.median(one / other for one, other in zip(self.ours, self.theirs, strict=True))

    @property
    def goal(self) -> float | None:
        """The target ratio, if there is one."""
        return GOALS.get((self.model, self.load)) if self.other == "llama.cpp" else TRANSFORMERS_GOAL

    def cells(self) -> list[str]:
        """The table's cells, in the order of HEADINGS."""
        rates = [f"{statistics.median(rates):,.0f}" for rates in (self.ours, self.theirs)]
        goal = f"{self.goal:.1f} x" if self.goal else ""
        return [self.model, self.load, *rates, f"{self.ratio:.2f} x", goal, self.other]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "goal": self.goal}


HEADINGS = ("model", "load", "tok/s", "of the other", "ratio", "goal", "the other")


def make_loads(parts: Sequence[str], model: str, clients: Sequence[int], lengths: tuple[int, int]) -> list[Load]:
    """The loads of the given parts that apply to this model. `lengths` are those for input and output."""
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
    """Request fields for free answers and for structured output with bench.structured's endless schemas."""
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


def llama_command(server: str, model: Path, clients: int, context: int) -> list[str]:
    """Command that starts llama.cpp's server on all available cores, with a slot of `context` tokens per client.

    `server` is the program llama-server; or another command with {model}, {threads}, {clients} and {context} in it.
    """
    threads = len(os.sched_getaffinity(0))
    if "{model}" in server:
        values = {"model": model, "threads": threads, "clients": clients, "context": context}
        return [part.format(**values) for part in shlex.split(server)]
    slots = ["--parallel", str(clients), "--ctx-size", str(clients * context)]
    cache = ["--no-cache-prompt", "--cache-ram", "0"]
    return [server, "--model", str(model), "--threads", str(threads), *slots, *cache, "--log-verbosity", "1"]


def prepare(model: str, work: Path, converter: Path, console: Console) -> tuple[Path, Path]:
    """Our model folder and llama.cpp's file for it, created at first use. Raises CalledProcessError."""
    folder = prepare_folder(model, work, console)
    plain = write_plainly(folder, work / model) if model == EMBEDDED else folder
    return folder, convert(plain, work, converter, console)


def write_plainly(folder: Path, plain: Path) -> Path:
    """Write a folder with a GGUF file as one with safetensors, which llama.cpp's converter reads, at first use."""
    if not plain.is_dir():
        checkpoint = open_checkpoint(folder)
        assert checkpoint is not None
        made = plain.with_suffix(".part")
        made.mkdir(parents=True, exist_ok=True)
        tensors = {name: checkpoint.tensor(name).float() for name in checkpoint.shapes}
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
        for file in folder.glob("*.json"):
            shutil.copy(file, made)
        made.rename(plain)
    return plain


def prepare_folder(model: str, work: Path, console: Console) -> Path:
    """Our model folder, created at first use. Raises CalledProcessError."""
    folder = resolve_model(None, console).path if model == EMBEDDED else work / model
    if not folder.is_dir():
        console.print(f"Making {folder} ...")
        made = work / f"{model}.part"
        subprocess.run([sys.executable, "-m", "bench.random_models", model, str(made)], check=True)
        made.rename(folder)
    return folder


def convert(folder: Path, work: Path, converter: Path, console: Console, *options: str) -> Path:
    """llama.cpp's file for a model folder, created at first use; `options` are the converter's.

    Raises CalledProcessError.
    """
    file = work / f"{folder.name}.gguf"
    if not file.is_file():
        console.print(f"Converting {folder} for llama.cpp ...")
        part = file.with_suffix(".part")
        command = [sys.executable, str(converter), str(folder), "--outtype", "q8_0", "--outfile", str(part), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        part.rename(file)
    return file


async def measure(server: LocalServer, load: Load, seed: int, vocab_size: int) -> float:
    """Tokens per second after a warm-up; `seed` determines the prompts."""
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
    """Measure both servers under each load, alternating which is first."""
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


def against_transformers(folder: Path, crowd: Comparison) -> list[Comparison]:
    """Compare our decoding for many clients with transformers' generate() on one batch of the same size."""
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
    """Parse our arguments; returns them and the rest, for `samewise serve`."""
    parser = argparse.ArgumentParser(
        description="Measure this server and llama.cpp's in turns.",
        epilog="Further arguments go to `samewise serve`.",
    )
    parser.add_argument("--llama-server", required=True, help="llama.cpp's build/bin/llama-server")
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
        parser.error("--parts transformers: needs decode, which it is compared with")
    return arguments, rest


def run_model(
    model: str, arguments: argparse.Namespace, server_arguments: Sequence[str], console: Console
) -> list[Comparison]:
    """Measure one model."""
    folder, file = prepare(model, arguments.work, arguments.convert, console)
    lengths = arguments.input_len, arguments.output_len
    loads = make_loads(arguments.parts, model, arguments.clients, lengths)
    if not loads:
        return []
    context = 256 + max(PREFILL, *(load.input_len + load.output_len for load in loads))
    theirs = llama_command(arguments.llama_server, file, max(arguments.clients), context)
    named = [] if model == EMBEDDED else [str(folder)]  # the embedded model's folder alone would be served in 4 bits
    ours = [*named, "--speculation", "off", "--log-level", "warning", *server_arguments]
    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    compared = asyncio.run(compare(model, ours, theirs, loads, arguments.rounds, vocab_size))
    if "transformers" in arguments.parts and model == "experts":
        crowd = next(one for one in reversed(compared) if one.load.startswith("decode"))
        compared += against_transformers(folder, crowd)
    return compared


def main() -> None:
    """Measure and print; with --json also write the results."""
    arguments, server_arguments = arguments_of()
    console = Console()
    arguments.work.mkdir(parents=True, exist_ok=True)
    compared = [line for model in arguments.models for line in run_model(model, arguments, server_arguments, console)]
    console.print(table(compared))
    console.print(
        f"Tokens per second, medians of {arguments.rounds} alternating rounds; each ratio is the median of the rounds. "
        f"{arguments.input_len} tokens in, {arguments.output_len} out, except for prefill."
    )
    if arguments.json:
        content = {"rounds": arguments.rounds, "comparisons": [one.as_dict() for one in compared]}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
