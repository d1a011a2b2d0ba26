"""Measures the server on the GPU over HTTP. Needs all packages of `samewise serve`."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.local_server import local_server
from bench.on_gpu.clients import Load, put_load
from bench.on_gpu.report import Figure
from model_runner.modules.loading import inspect_model, load_config
from server.cli.loadtest.load import Report, summarize

REQUESTS_PER_CLIENT = 2
LEAST_REQUESTS = 4
NAME = "random"


def measure_serving(
    folder: Path,
    plain_ms: Mapping[int, float | None],
    lengths: tuple[int, int],
    limit_s: float,
    add: Callable[[Figure], None],
) -> Figure:
    """Start a server and measure each load; loads that are not complete after `limit_s` seconds are dropped.

    Args:
        folder: the model's folder.
        plain_ms: plain transformers' time for a decode step, if known, by number of clients.
        lengths: tokens of each prompt and of each answer.
        limit_s: time limit in seconds.
        add: called with each figure.
    """
    try:
        asyncio.run(asyncio.wait_for(_measure(folder, plain_ms, lengths, add), limit_s))
    except TimeoutError:
        return Figure("serving", "all loads", note=f"FAILED: stopped after {limit_s:.0f} s", is_failure=True)
    return Figure("serving", "all loads", note="plain: decoding only, in one batch")


async def _measure(
    folder: Path, plain_ms: Mapping[int, float | None], lengths: tuple[int, int], add: Callable[[Figure], None]
) -> None:
    limits = ["--max-num-seqs", "256", "--max-num-batched-tokens", "8192", "--max-model-len", "8192"]
    options = ["--device", "cuda", "--log-level", "warning", "--speculation", "off", *limits]
    vocab_size = inspect_model(load_config(folder)).vocab_size
    async with local_server([str(folder), "--served-model-name", NAME, *options]) as server:
        for clients, step_ms in plain_ms.items():
            num_requests = max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * clients)
            load = Load(f"{server.url}/v1", NAME, vocab_size, clients, num_requests, *lengths, seed=clients)
            plain = None if step_ms is None else 1e3 * clients / step_ms
            add(figure(clients, summarize(await put_load(load)), plain))


def figure(clients: int, report: Report, plain: float | None) -> Figure:
    """The figure of one load; `plain` is plain transformers' tokens per second."""
    first, gap = report.time_to_first_token_ms, report.inter_token_ms
    times = [f"first {first.p50:.0f}, p99 {first.p99:.0f} ms"] if first else []
    times += [f"next {gap.p50:.1f}, p99 {gap.p99:.1f} ms"] if gap else []
    failed = report.num_requests - report.num_completed
    return Figure(
        "serving",
        f"{clients} clients",
        report.output_tokens_per_s,
        "tok/s",
        plain=plain,
        note="; ".join([*times, *([f"{failed} FAILED"] if failed else [])]),
        is_failure=failed > 0,
        details=report.as_dict(),
    )
