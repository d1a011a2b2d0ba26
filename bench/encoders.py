"""Benchmark of encoders against sentence-transformers: vectors, speed, and the loss by rounded weights.

    python -m bench.encoders vectors
    python -m bench.encoders speed --turns 5
    python -m bench.encoders quality --folder MODEL

It needs `pip install sentence-transformers`. In `vectors` and `speed`, weights are random. In `speed`, clients of our
server send one text at a time over HTTP. Sentence-transformers gets the texts of all clients as one batch, in a process
of its own, without HTTP. The two are measured in turns, and while one is measured, the other waits. `quality` embeds
paragraphs of our documentation with a real model.
"""

import argparse
import asyncio
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.local_server import LocalServer, environment, local_server, process_family
from bench.random_encoders import ENCODERS, LETTERS, MODULES, TEXTS, add_modules, save_encoder, save_small
from model_runner.processes import available_cores

CLIENTS = (1, 32)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Speed:
    """Measurements of one program with one number of clients, one for each turn."""

    texts_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    """Milliseconds of CPU time of all its processes for each text."""


def make_texts(count: int, seed: int) -> list[str]:
    """Texts of 14 to 62 tokens with the special ones, 38 on average."""
    random = np.random.default_rng(seed)
    sizes = random.integers(12, 61, count)
    return [" ".join("".join(random.choice(list(LETTERS), 3)) for _ in range(size // 3)) for size in sizes]


def sentence_transformer(folder: Path) -> Any:
    """The model in a folder by sentence-transformers, on the CPU."""
    return importlib.import_module("sentence_transformers").SentenceTransformer(str(folder), device="cpu")


async def compare_vectors(console: Console) -> bool:
    """Compare vectors in float32; returns whether all agree to 1e-6 of the cosine and do not depend on the crowd."""
    table = Table("kind", "modules", "1 - smallest cosine", "alone = in a crowd")
    all_agree = True
    for kind in ENCODERS:
        with tempfile.TemporaryDirectory() as name:
            folder = add_modules(save_encoder(Path(name) / kind, kind), *MODULES[kind])
            expected = np.asarray(sentence_transformer(folder).encode(TEXTS), dtype=np.float64)
            async with (
                local_server(["--model", str(folder), "--quantization", "none"]) as server,
                httpx.AsyncClient(base_url=server.url, timeout=60) as client,
            ):
                crowd = await embed(client, TEXTS)
                alone = [(await embed(client, [text]))[0] for text in TEXTS]
        ours = np.asarray(crowd, dtype=np.float64)
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(expected, axis=1)
        distance = 1 - float(((ours * expected).sum(1) / norms).min())
        all_agree &= distance < 1e-6 and crowd == alone
        steps = ", ".join(name for name, _ in MODULES[kind])
        table.add_row(kind, steps, f"{distance:.1e}", "yes" if crowd == alone else "NO")
    console.print(table)
    return all_agree


async def embed(client: httpx.AsyncClient, texts: Sequence[str]) -> list[list[float]]:
    """The vectors of texts, by one request."""
    answer = await client.post("/v1/embeddings", json={"input": list(texts), "truncate_prompt_tokens": -1})
    answer.raise_for_status()
    return [one["embedding"] for one in answer.json()["data"]]


async def measure_ours(server: LocalServer, clients: int, seconds: float, seed: int, speed: Speed) -> None:
    """Let clients send texts for this long, each the next one when it has its answer."""
    texts = make_texts(4096, seed)
    done = 0

    async def run(client: httpx.AsyncClient) -> None:
        nonlocal done
        while time.perf_counter() - start < seconds:
            await embed(client, [texts[done % len(texts)]])
            done += 1

    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        await embed(client, texts[:clients])
        cpu, start = cpu_seconds(server.pid), time.perf_counter()
        await asyncio.gather(*(run(client) for _ in range(clients)))
        elapsed = time.perf_counter() - start
    speed.texts_per_s.append(done / elapsed)
    speed.cpu_ms.append(1000 * (cpu_seconds(server.pid) - cpu) / done)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and its descendants have used."""
    total = 0
    for one in process_family(pid):
        fields = Path(f"/proc/{one}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


class Other:
    """A process in which sentence-transformers encodes batches on demand."""

    def __init__(self, folder: Path, threads: int) -> None:
        command = [sys.executable, "-m", "bench.encoders", "worker", "--folder", str(folder), "--threads", str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )

    def measure(self, clients: int, seconds: float, seed: int, speed: Speed) -> None:
        """Encode batches of `clients` texts for this long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([clients, seconds, seed]) + "\n")
        self._process.stdin.flush()
        rate, cpu_ms = json.loads(self._process.stdout.readline())
        speed.texts_per_s.append(rate)
        speed.cpu_ms.append(cpu_ms)

    def close(self) -> None:
        """End the process."""
        self._process.communicate("")


def work(folder: Path, threads: int) -> None:
    """Encode batches as the lines of standard input say, and answer each with texts per second and CPU time."""
    importlib.import_module("torch").set_num_threads(threads)
    model = sentence_transformer(folder)
    for line in sys.stdin:
        clients, seconds, seed = json.loads(line)
        texts, done = make_texts(4096, seed), 0
        model.encode(texts[:clients], batch_size=clients, show_progress_bar=False)
        cpu, start = time.process_time(), time.perf_counter()
        while time.perf_counter() - start < seconds:
            batch = [texts[(done + index) % len(texts)] for index in range(clients)]
            model.encode(batch, batch_size=clients, show_progress_bar=False)
            done += clients
        elapsed = time.perf_counter() - start
        print(json.dumps([done / elapsed, 1000 * (time.process_time() - cpu) / done]), flush=True)


async def compare_speed(console: Console, turns: int, seconds: float) -> None:
    """Measure our server, with int8 and with float32 weights, and sentence-transformers."""
    speeds: dict[tuple[str, int], Speed] = {}
    threads = available_cores()
    with tempfile.TemporaryDirectory() as name:
        folder = save_small(Path(name) / "small")
        other = Other(folder, threads)
        flags = ["--model", str(folder), "--speculation", "off"]
        async with local_server(flags) as int8, local_server([*flags, "--quantization", "none"]) as float32:
            for turn in range(turns):
                for clients in CLIENTS:
                    for title, server in (("int8", int8), ("float32", float32)):
                        speed = speeds.setdefault((f"samewise, {title}", clients), Speed())
                        await measure_ours(server, clients, seconds, turn, speed)
                    speed = speeds.setdefault(("sentence-transformers", clients), Speed())
                    await asyncio.to_thread(other.measure, clients, seconds, turn, speed)
        other.close()
    table = Table(
        "program", "clients", "texts/s", "CPU ms/text", title=f"{threads} threads, load {os.getloadavg()[0]:.1f}"
    )
    for (title, clients), speed in sorted(speeds.items()):
        rate, cpu = statistics.median(speed.texts_per_s), statistics.median(speed.cpu_ms)
        table.add_row(title, str(clients), f"{rate:.0f}", f"{cpu:.1f}")
    console.print(table)


WEIGHTS = (("none",), ("int8",), ("int8", "--rows", "int16"), ("int4",))
"""Values of --quantization, with further flags."""
_NEIGHBOURS = 10


async def compare_quality(console: Console, folder: Path) -> None:
    """Compare vectors by rounded weights with sentence-transformers in float32."""
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    paragraphs = [part for page in pages for part in page.read_text(encoding="utf-8").split("\n\n")]
    texts = [part for part in paragraphs if 40 < len(part) < 900][:400]
    expected = np.asarray(sentence_transformer(folder).encode(texts), dtype=np.float64)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    wanted = neighbours(expected @ expected.T)
    table = Table("--quantization", "mean cosine", "smallest", "same 10 nearest", title=f"{len(texts)} paragraphs")
    for flags in WEIGHTS:
        async with (
            local_server(["--model", str(folder), "--quantization", *flags]) as server,
            httpx.AsyncClient(base_url=server.url, timeout=120) as client,
        ):
            ours = np.asarray(await embed(client, texts), dtype=np.float64)
        ours /= np.linalg.norm(ours, axis=1, keepdims=True)
        cosines, found = (ours * expected).sum(1), neighbours(ours @ ours.T)
        common = [len(set(one) & set(other)) / _NEIGHBOURS for one, other in zip(found, wanted, strict=True)]
        table.add_row(" ".join(flags), f"{cosines.mean():.5f}", f"{cosines.min():.5f}", f"{np.mean(common):.1%}")
    console.print(table)


def neighbours(similarities: NDArray[np.float64]) -> list[list[int]]:
    """The nearest other texts of each text, from similarities [texts, texts]."""
    others = similarities - 9 * np.eye(len(similarities))
    nearest: list[list[int]] = np.argsort(-others, axis=1)[:, :_NEIGHBOURS].tolist()
    return nearest


def main() -> int:
    """Run the part that the arguments name."""
    parser = argparse.ArgumentParser(description="Compare encoders with sentence-transformers.")
    parser.add_argument("part", choices=("vectors", "speed", "quality", "worker"))
    parser.add_argument("--turns", type=int, default=5, help="measurements of each kind, in turns")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--folder", type=Path, help="the model of quality and worker")
    parser.add_argument("--threads", type=int, default=1, help="of the worker")
    arguments = parser.parse_args()
    console = Console()
    if arguments.part == "worker":
        work(arguments.folder, arguments.threads)
        return 0
    if arguments.part == "speed":
        asyncio.run(compare_speed(console, arguments.turns, arguments.seconds))
        return 0
    if arguments.part == "quality":
        asyncio.run(compare_quality(console, arguments.folder))
        return 0
    return 0 if asyncio.run(compare_vectors(console)) else 1


if __name__ == "__main__":
    sys.exit(main())
