"""Benchmark of the prefix cache with long shared prefixes: time to first token, and requests per second."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from bench.local_server import local_server
from server.cli.loadtest.benchmark import BenchOptions, run_bench
from server.cli.loadtest.display import progress_bar
from server.cli.loadtest.load import Lengths, Report, Workload

FIRST_GOAL = 9.0
LOAD_GOAL = 8.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of a measurement's requests in tokens, and the number of clients."""

    shared: int
    """Length of the shared prefix, such as a system prompt."""
    own: int
    """Length of each prompt after the prefix."""
    output: int
    clients: int
    """Concurrent requests."""

    @property
    def work_ratio(self) -> float:
        """Prompt tokens without the cache divided by prompt tokens with a cached prefix."""
        return (self.shared + self.own) / self.own


FIRST = Shape(shared=1024, own=96, output=1, clients=1)
LOAD = Shape(shared=2048, own=64, output=32, clients=32)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Median milliseconds to the first token of a single request."""

    cold_ms: float
    warm_ms: float

    @property
    def ratio(self) -> float:
        return self.cold_ms / self.warm_ms


@dataclass(frozen=True, slots=True)
class Throughput:
    """Requests per second under load, including the first computation of the shared prefix."""

    off_per_s: float
    on_per_s: float

    @property
    def ratio(self) -> float:
        return self.on_per_s / self.off_per_s


async def measure_first(num_requests: int, server_arguments: Sequence[str]) -> FirstToken:
    """Measure prompts that share nothing, then prompts with a shared prefix."""
    async with local_server(["--log-level", "warning", *server_arguments]) as server:
        cold = await _run(server.url, FIRST, num_requests, shared=0.0, warmup=1)
        warm = await _run(server.url, FIRST, num_requests, shared=FIRST.shared / (FIRST.shared + FIRST.own), warmup=1)
    return FirstToken(_first_token_ms(cold), _first_token_ms(warm))


async def measure_load(per_client: int, server_arguments: Sequence[str]) -> Throughput:
    """Measure the same requests with and without the prefix cache."""
    per_s = {}
    for flag in ("--no-prefix-caching", "--prefix-caching"):
        async with local_server(["--log-level", "warning", flag, *server_arguments]) as server:
            shared = LOAD.shared / (LOAD.shared + LOAD.own)
            per_s[flag] = (await _run(server.url, LOAD, LOAD.clients * per_client, shared, warmup=2)).requests_per_s
    return Throughput(per_s["--no-prefix-caching"], per_s["--prefix-caching"])


async def _run(url: str, shape: Shape, num_requests: int, shared: float, warmup: int) -> Report:
    """Run the load. Warm-up requests have another prefix, so the first measured request finds nothing in the cache."""
    length = shape.shared + shape.own
    workload = Workload(
        num_requests,
        Lengths(length, length),
        Lengths(shape.output, shape.output),
        shared_prefix=shared,
        seed=1 + (shared > 0),
    )
    with progress_bar(num_requests) as advance:
        options = BenchOptions(f"{url}/v1", workload, concurrency=shape.clients, warmup=warmup)
        report = (await run_bench(options, advance)).report
    if report.num_completed != num_requests:
        raise RuntimeError(f"only {report.num_completed} of {num_requests} requests were answered")
    return report


def _first_token_ms(report: Report) -> float:
    """The median, on which the first, uncached request has hardly any effect."""
    if report.time_to_first_token_ms is None:
        raise RuntimeError("no request returned a token")
    return report.time_to_first_token_ms.p50


def main() -> None:
    """Measure and print; with --output also write JSON."""
    parser = argparse.ArgumentParser(
        description="Measure the effect of the prefix cache on prompts with a shared prefix.",
        epilog="Further arguments go to `samewise serve`.",
    )
    parser.add_argument("--parts", nargs="+", choices=("first", "load"), default=("first", "load"))
    parser.add_argument(
        "--requests", type=int, default=15, help="number of requests for each median time to first token"
    )
    parser.add_argument("--per-client", type=int, default=2, help="requests of each client under load")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments, server_arguments = parser.parse_known_args()
    console, content = Console(), {}
    if "first" in arguments.parts:
        first = asyncio.run(measure_first(arguments.requests, server_arguments))
        content["first"] = asdict(FIRST) | asdict(first)
        console.print(
            f"{FIRST.shared:,} shared and {FIRST.own} own tokens: first token after {first.cold_ms:.0f} ms cold, "
            f"{first.warm_ms:.0f} ms warm: {first.ratio:.1f} x (goal {FIRST_GOAL:.0f} x; "
            f"{FIRST.work_ratio:.1f} x fewer prompt tokens are computed)"
        )
    if "load" in arguments.parts:
        load = asyncio.run(measure_load(arguments.per_client, server_arguments))
        content["load"] = asdict(LOAD) | asdict(load)
        console.print(
            f"{LOAD.clients} clients, {LOAD.shared:,} shared and {LOAD.own} own tokens in, {LOAD.output} out: "
            f"{load.off_per_s:.2f} requests per second without the cache, {load.on_per_s:.2f} with it: "
            f"{load.ratio:.1f} x (goal {LOAD_GOAL:.0f} x)"
        )
    if arguments.output:
        arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
