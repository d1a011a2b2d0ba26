r"""Measure starts: time to the first answer, peak memory and disk, with an empty cache and then with a full one.

    python -m bench.load                                      # the embedded model
    python -m bench.load model.Q4_K_M.gguf folder --llama-server build/bin/llama-server

Each model starts first with an empty cache folder, where kernels are compiled and GGUF files are prepared, and then
again with the same folder. Peak memory is the highest sum over all processes of private memory, and of private memory
plus the pages of files that are mapped; the second counts pages that the system can take back at any time. For GGUF
files, llama.cpp's server starts as well, as often, in turns.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from bench.local_server import process_family, started

_POLL_S = 0.02
_FIRST_ANSWER = {"prompt": "One, two,", "max_tokens": 4, "temperature": 0}
HEADINGS = ("model", "server", "start", "seconds", "private MiB", "with mapped files MiB", "cache MiB")


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server."""

    seconds: float
    """From the command to the end of the first answer of four tokens."""
    private_mib: float
    """Peak of private memory, over all processes together."""
    mapped_mib: float
    """Peak of private memory and mapped files."""


@dataclass(slots=True)
class _Peaks:
    private: int = 0
    mapped: int = 0

    def note(self) -> None:
        """Add up the memory of all descendants of this process now."""
        private = mapped = 0
        with contextlib.suppress(OSError):  # a process may end meanwhile
            for one in process_family(os.getpid())[1:]:
                status = Path(f"/proc/{one}/status").read_text(encoding="utf-8")
                sizes = dict(line.split(":", 1) for line in status.splitlines() if line.startswith("Rss"))
                anonymous, of_files = (int(sizes.get(name, "0").split()[0]) for name in ("RssAnon", "RssFile"))
                private += anonymous
                mapped += anonymous + of_files
        self.private, self.mapped = max(self.private, private), max(self.mapped, mapped)


async def measure(command: Sequence[str], ready_path: str, cache: Path) -> Start:
    """Start a server once, and wait for its first answer."""
    begin = time.perf_counter()
    async with _watched() as peaks, started(command, ready_path, {"SAMEWISE_CACHE": str(cache)}) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=600, trust_env=False) as client:
            name = (await client.get("/v1/models")).json()["data"][0]["id"]
            (await client.post("/v1/completions", json={"model": name, **_FIRST_ANSWER})).raise_for_status()
        seconds = time.perf_counter() - begin
    return Start(seconds, peaks.private / 1024, peaks.mapped / 1024)


@contextlib.asynccontextmanager
async def _watched() -> AsyncIterator[_Peaks]:
    """Note the memory of all processes that are started in the block."""
    peaks = _Peaks()

    async def watch() -> None:
        while True:
            peaks.note()
            await asyncio.sleep(_POLL_S)

    watching = asyncio.create_task(watch())
    try:
        yield peaks
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


def size_of(folder: Path) -> float:
    """MiB of the files in a folder, without what links point to."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() or path.is_symlink()) / (1 << 20)


async def run_model(model: str, others: Sequence[str], rounds: int, arguments: Sequence[str]) -> list[Sequence[str]]:
    """Measure one model; returns lines for the table. `others` is the command of llama.cpp's server, if it is asked."""
    name = model or "embedded"
    ours = [sys.executable, "-m", "server.cli.main", "serve", *([model] if model else []), *arguments]
    starts: dict[tuple[str, str], list[Start]] = {}
    disk = 0.0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for start in ("first", "second"):
                starts.setdefault(("samewise", start), []).append(await measure(ours, "/ready", Path(folder)))
            disk = size_of(Path(folder))
        if others and model.endswith(".gguf"):
            command = [*others, "--model", model]
            starts.setdefault(("llama.cpp", "any"), []).append(await measure(command, "/health", Path()))
    return [
        (name, server, start, *_medians(measured), f"{disk:.0f}" if server == "samewise" else "0")
        for (server, start), measured in starts.items()
    ]


def _medians(starts: Sequence[Start]) -> tuple[str, str, str]:
    return (
        f"{statistics.median(start.seconds for start in starts):.2f}",
        f"{statistics.median(start.private_mib for start in starts):,.0f}",
        f"{statistics.median(start.mapped_mib for start in starts):,.0f}",
    )


def main() -> None:
    """Measure the models that the arguments name."""
    parser = argparse.ArgumentParser(
        description="Measure starts of the server.", epilog="Further arguments go to `samewise serve`."
    )
    parser.add_argument("models", nargs="*", default=[""], help="folders, GGUF files or hub names; default: embedded")
    parser.add_argument("--llama-server", nargs="+", default=[], help="command of llama.cpp's server")
    parser.add_argument("--rounds", type=int, default=3)
    arguments, rest = parser.parse_known_args()
    table = Table(*HEADINGS)
    for column in table.columns[3:]:
        column.justify = "right"
    for model in arguments.models:
        for line in asyncio.run(run_model(model, arguments.llama_server, arguments.rounds, rest)):
            table.add_row(*line)
    Console().print(table)


if __name__ == "__main__":
    main()
