"""What the prefix cache brings prompts that share a long beginning: sooner first tokens, and more requests a second."""

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
    """Of the requests of a measurement, in tokens."""

    shared: int
    """Of the beginning, a system prompt say."""
    own: int
    """Of each prompt after that."""
    output: int
    clients: int
    """Requests at a time."""

    @property
    def work_ratio(self) -> float:
        """How many times fewer tokens of a prompt there are to compute when the beginning is known."""
        return (self.shared + self.own) / self.own


FIRST = Shape(shared=1024, own=96, output=1, clients=1)
LOAD = Shape(shared=2048, own=64, output=32, clients=32)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Median milliseconds to the first token of a request that is alone."""

    cold_ms: float
    warm_ms: float

    @property
    def ratio(self) -> float:
        return self.cold_ms / self.warm_ms


@dataclass(frozen=True, slots=True)
class Throughput:
    """Requests a second under load, the computation of the shared beginning included."""

    off_per_s: float
    on_per_s: float

    @property
    def ratio(self) -> float:
        return self.on_per_s / self.off_per_s


async def measure_first(num_requests: int, server_arguments: Sequence[str]) -> FirstToken:
    """Prompts that share nothing, and then such as share their beginning."""
    async with local_server(["--log-level", "warning", *server_arguments]) as server:
        cold = await _run(server.url, FIRST, num_requests, shared=0.0, warmup=1)
        warm = await _run(server.url, FIRST, num_requests, shared=FIRST.shared / (FIRST.shared + FIRST.own), warmup=1)
    return FirstToken(_first_token_ms(cold), _first_token_ms(warm))


async def measure_load(per_client: int, server_arguments: Sequence[str]) -> Throughput:
    """The same requests to a server with a prefix cache and to one without."""
    per_s = {}
    for flag in ("--no-prefix-caching", "--prefix-caching"):
        async with local_server(["--log-level", "warning", flag, *server_arguments]) as server:
            shared = LOAD.shared / (LOAD.shared + LOAD.own)
            per_s[flag] = (await _run(server.url, LOAD, LOAD.clients * per_client, shared, warmup=2)).requests_per_s
    return Throughput(per_s["--no-prefix-caching"], per_s["--prefix-caching"])


async def _run(url: str, shape: Shape, num_requests: int, shared: float, warmup: int) -> Report:
    """The first request finds nothing in the cache; those to warm up share another beginning, or none."""
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
        raise RuntimeError("not all requests were answered")
    return report


def _first_token_ms(report: Report) -> float:
    """The median, to which the first request, that finds nothing in the cache, does not matter."""
    if report.time_to_first_token_ms is None:
        raise RuntimeError("no request got a token")
    return report.time_to_first_token_ms.p50


def main() -> None:
    """Measure and print; write JSON if asked to."""
    parser = argparse.ArgumentParser(
        description="Measure what the prefix cache brings prompts with a shared beginning.",
        epilog="Further arguments go to `samewise serve`.",
    )
    parser.add_argument("--parts", nargs="+", choices=("first", "load"), default=("first", "load"))
    parser.add_argument("--requests", type=int, default=15, help="for each median time to the first token")
    parser.add_argument("--per-client", type=int, default=2, help="requests of each client under load")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments, server_arguments = parser.parse_known_args()
    console, content = Console(), {}
    if "first" in arguments.parts:
        first = asyncio.run(measure_first(arguments.requests, server_arguments))
        content["first"] = asdict(FIRST) | asdict(first)
        console.print(
            f"{FIRST.shared:,} shared and {FIRST.own} own tokens: first token after {first.cold_ms:.0f} ms cold, "
            f"{first.warm_ms:.0f} ms warm: {first.ratio:.1f} x (goal {FIRST_GOAL:.0f} x; of the prompt's tokens "
            f"{FIRST.work_ratio:.1f} x fewer are computed)"
        )
    if "load" in arguments.parts:
        load = asyncio.run(measure_load(arguments.per_client, server_arguments))
        content["load"] = asdict(LOAD) | asdict(load)
        console.print(
            f"{LOAD.clients} clients, {LOAD.shared:,} shared and {LOAD.own} own tokens in, {LOAD.output} out: "
            f"{load.off_per_s:.2f} requests a second without the cache, {load.on_per_s:.2f} with it: "
            f"{load.ratio:.1f} x (goal {LOAD_GOAL:.0f} x)"
        )
    if arguments.output:
        arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
