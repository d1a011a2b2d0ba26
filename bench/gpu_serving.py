"""The server on the GPU under load over HTTP. Needs all the packages that `samewise serve` does."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.gpu_report import Figure
from bench.local_server import local_server
from server.loadtest.session import BenchOptions, BenchResult, run_bench
from server.loadtest.workload import Lengths, Workload

CLIENTS = (1, 16, 64, 256)
LENGTH = 128
"""Tokens of each prompt, and of each answer."""
REQUESTS_PER_CLIENT = 2
LEAST_REQUESTS = 4


def measure_serving(folder: Path, clients: Sequence[int], limit_s: float, add: Callable[[Figure], None]) -> Figure:
    """Start a server and put each load on it; what is done after `limit_s` seconds counts."""
    try:
        asyncio.run(asyncio.wait_for(_measure(folder, clients, add), limit_s))
    except TimeoutError:
        return Figure("serving", "all loads", note=f"ended after {limit_s:.0f} s")
    return Figure("serving", "all loads", note="done")


async def _measure(folder: Path, clients: Sequence[int], add: Callable[[Figure], None]) -> None:
    limits = ["--max-num-seqs", "256", "--max-num-batched-tokens", "8192", "--max-model-len", "8192"]
    options = ["--device", "cuda", "--log-level", "warning", "--speculation", "off", *limits]
    async with local_server([str(folder), *options]) as server:
        for count in clients:
            num_requests = max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * count)
            workload = Workload(num_requests, Lengths(LENGTH, LENGTH), Lengths(LENGTH, LENGTH), seed=count)
            load = BenchOptions(f"{server.url}/v1", workload, concurrency=count, warmup=min(count, 4))
            add(_figure(await run_bench(load, lambda _: None)))


def _figure(result: BenchResult) -> Figure:
    report = result.report
    first, gap = report.time_to_first_token_ms, report.inter_token_ms
    times = [f"first {first.p50:.0f}, p99 {first.p99:.0f} ms"] if first else []
    times += [f"next {gap.p50:.1f}, p99 {gap.p99:.1f} ms"] if gap else []
    failed = report.num_requests - report.num_completed
    return Figure(
        "serving",
        f"{result.concurrency} clients",
        report.output_tokens_per_s,
        "tok/s",
        note="; ".join([*times, *([f"{failed} FAILED"] if failed else [])]),
        is_failure=failed > 0,
        details=result.as_dict(),
    )
