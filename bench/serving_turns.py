"""Measures the load of `bench.serving` alternately with and without speculation."""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench.local_server import local_server
from bench.serving import REQUESTS_PER_CLIENT
from server.cli.loadtest.benchmark import BenchOptions, run_bench
from server.cli.loadtest.display import progress_bar
from server.cli.loadtest.load import Lengths, Workload

WITHOUT = ["--speculation", "off"]


@dataclass(frozen=True, slots=True)
class Turns:
    """Output tokens per second of each round, with and without speculation."""

    concurrency: int
    with_it: Sequence[float]
    without: Sequence[float]

    @property
    def speedup(self) -> float:
        """Ratio of the medians."""
        return statistics.median(self.with_it) / statistics.median(self.without)


async def measure(
    concurrencies: Sequence[int], rounds: int, length: int, server_arguments: Sequence[str]
) -> list[Turns]:
    """Measure two servers alternately. Both get the same prompts, which differ from round to round."""
    quiet = ["--log-level", "warning", *server_arguments]
    results = []
    async with local_server(quiet) as speculating, local_server([*quiet, *WITHOUT]) as plain:
        for concurrency in concurrencies:
            rates: dict[str, list[float]] = {speculating.url: [], plain.url: []}
            for turn in range(rounds):
                urls = list(rates)[:: -1 if turn % 2 else 1]
                for url in urls:
                    rates[url].append(await _rate(url, concurrency, length, seed=concurrency * rounds + turn))
            results.append(Turns(concurrency, rates[speculating.url], rates[plain.url]))
    return results


async def _rate(url: str, concurrency: int, length: int, seed: int) -> float:
    num_requests = max(8, REQUESTS_PER_CLIENT * concurrency)
    workload = Workload(num_requests, Lengths(length, length), Lengths(length, length), seed=seed)
    options = BenchOptions(f"{url}/v1", workload, concurrency=concurrency, warmup=min(concurrency, 4))
    with progress_bar(num_requests) as advance:
        return (await run_bench(options, advance)).report.output_tokens_per_s


def table(results: Sequence[Turns]) -> Table:
    """One line for each number of clients."""
    lines = Table("clients", "output tok/s", "without", "")
    for result in results:
        medians = (f"{statistics.median(rates):.1f}" for rates in (result.with_it, result.without))
        lines.add_row(str(result.concurrency), *medians, f"{result.speedup:.2f} x")
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Measure the server with and without speculation, in turns.",
        epilog="Further arguments go to `samewise serve`.",
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=128, help="tokens of each prompt and of each answer")
    parser.add_argument("--least", type=float, default=0.0, help="fail if a speedup is below this")
    arguments, server_arguments = parser.parse_known_args()
    results = asyncio.run(measure(arguments.concurrency, arguments.rounds, arguments.length, server_arguments))
    Console().print(table(results))
    if any(result.speedup < arguments.least for result in results):
        raise SystemExit(f"a speedup is below {arguments.least:g} x")


if __name__ == "__main__":
    main()
