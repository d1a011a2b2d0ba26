"""What the prefix cache does for the time to the first token: prompts that share a long beginning, cold and warm."""

import argparse
import asyncio
import json
from pathlib import Path

from rich.console import Console

from bench.local_server import local_server
from server.cli.loadtest.benchmark import BenchOptions, run_bench
from server.cli.loadtest.workload import Lengths, Workload

SHARED = 1024
"""Tokens of the beginning, a system prompt say."""
NEW = 96
REQUESTS = 15


async def measure(server_arguments: list[str]) -> tuple[float, float]:
    """Median milliseconds to the first token, cold and warm; one request at a time."""
    async with local_server(["--log-level", "warning", *server_arguments]) as server:
        cold = await _first_token_ms(server.url, shared=0.0, seed=1)
        warm = await _first_token_ms(server.url, shared=SHARED / (SHARED + NEW), seed=2)
    return cold, warm


async def _first_token_ms(url: str, shared: float, seed: int) -> float:
    """The median, to which the first request, that finds nothing in the cache, does not matter."""
    workload = Workload(REQUESTS, Lengths(SHARED + NEW, SHARED + NEW), Lengths(1, 1), shared, seed)
    result = await run_bench(BenchOptions(f"{url}/v1", workload, concurrency=1, warmup=1), lambda outcome: None)
    times = result.report.time_to_first_token_ms
    if times is None or result.report.num_completed != REQUESTS:
        raise RuntimeError("not all requests were answered")
    return times.p50


def main() -> None:
    """Measure and print; write JSON if asked to."""
    parser = argparse.ArgumentParser(
        description="Measure the time to the first token with a shared beginning, cold and warm.",
        epilog="Further arguments go to `samewise serve`.",
    )
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments, server_arguments = parser.parse_known_args()
    cold, warm = asyncio.run(measure(server_arguments))
    Console().print(
        f"{SHARED:,} shared and {NEW} new tokens: first token after {cold:.0f} ms cold, {warm:.0f} ms warm: "
        f"{cold / warm:.1f} x (at most {(SHARED + NEW) / NEW:.1f} x by the work saved)"
    )
    if arguments.output:
        content = {"shared": SHARED, "new": NEW, "cold_ms": cold, "warm_ms": warm}
        arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
