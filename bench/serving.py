"""Runs `samewise bench` at several concurrencies and compares the results with the machine's limits."""

import argparse
import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from bench import roofline
from bench.local_server import local_server
from bench.model_work import ModelWork
from model_runner.hub.repository import resolve_model
from server.cli.loadtest.benchmark import BenchOptions, BenchResult, run_bench
from server.cli.loadtest.display import progress_bar
from server.cli.loadtest.load import Lengths, Workload
from server.cli.main import app
from server.config import Settings, load_settings

REQUESTS_PER_CLIENT = 4
HEADINGS = ["clients", "output tok/s", "of the limit", "TTFT ms p50", "p99", "next token ms p50", "p99", "failed"]
BEGIN, END = "<!-- bench.serving writes from here -->", "<!-- to here -->"


async def measure(
    concurrencies: list[int], input_len: int, output_len: int, server_arguments: list[str]
) -> list[BenchResult]:
    """Start a server and measure each concurrency; prompts never repeat."""
    results = []
    async with local_server(["--log-level", "warning", *server_arguments]) as server:
        for concurrency in concurrencies:
            num_requests = max(8, REQUESTS_PER_CLIENT * concurrency)
            workload = Workload(
                num_requests, Lengths(input_len, input_len), Lengths(output_len, output_len), seed=concurrency
            )
            with progress_bar(num_requests) as advance:
                options = BenchOptions(
                    f"{server.url}/v1", workload, concurrency=concurrency, warmup=min(concurrency, 4)
                )
                results.append(await run_bench(options, advance))
    return results


def rows(results: list[BenchResult], bounds: list[float]) -> list[list[str]]:
    """One row for each concurrency, with the columns of HEADINGS."""
    cells = []
    for result, bound in zip(results, bounds, strict=True):
        report = result.report
        first, gap = report.time_to_first_token_ms, report.inter_token_ms
        cells.append(
            [
                str(result.concurrency),
                f"{report.output_tokens_per_s:.1f}",
                f"{report.output_tokens_per_s / bound:.0%}",
                *(f"{value:.0f}" for value in ((first.p50, first.p99) if first else ())),
                *(f"{value:.1f}" for value in ((gap.p50, gap.p99) if gap else ())),
                str(report.num_requests - report.num_completed),
            ]
        )
    return cells


def table(cells: list[list[str]]) -> Table:
    """The rows as a table for the terminal."""
    lines = Table(*HEADINGS)
    for column in lines.columns:
        column.justify = "right"
    for row in cells:
        lines.add_row(*row)
    return lines


def write_docs(page: Path, machine: roofline.Roofline, cells: list[list[str]]) -> None:
    """Replace the text between the page's two markers. Raises ValueError if they are missing."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no markers for the table: {BEGIN} ... {END}")
    limits = [f"{machine.processor}, {machine.cores} cores", f"memory read {machine.read_gb_per_s:.1f} GB/s"]
    limits.append(f"float32 matrix product {machine.fp32_gflop_per_s:,.0f} GFLOP/s")
    if machine.int8_gmac_per_s is not None:
        limits.append(f"int8 kernel {machine.int8_gmac_per_s:,.0f} GMAC/s with {machine.int8_isa}")
    lines = [HEADINGS, ["---:"] * len(HEADINGS), *cells]
    written = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{'; '.join(limits)}.\n\n{written}\n{END}{after}", encoding="utf-8")


def served_settings(server_arguments: list[str]) -> Settings:
    """The settings of `samewise serve` with these arguments, its environment and file. Raises the same errors."""
    command = typer.main.get_group(app).commands["serve"]
    with command.make_context("serve", list(server_arguments)) as context:
        flags = dict(context.params)
    return load_settings(flags, flags.pop("config"))


def main() -> None:
    """Measure the machine, then the server, and print both; optionally write JSON and a page's table."""
    parser = argparse.ArgumentParser(
        description="Measure the server at several concurrencies, and the machine's limits.",
        epilog="Further arguments go to `samewise serve`.",
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    parser.add_argument("--docs", type=Path, help="also replace the table in this page")
    arguments, server_arguments = parser.parse_known_args()
    console = Console()
    server_arguments += ["--device", arguments.device]
    model = resolve_model(served_settings(server_arguments).model, console)
    machine = roofline.measure(arguments.device)
    console.print(roofline.table(machine))
    results = asyncio.run(measure(arguments.concurrency, arguments.input_len, arguments.output_len, server_arguments))
    work = ModelWork.of(model.path)
    per_output = arguments.input_len / arguments.output_len
    bounds = [work.bound_tokens_per_s(machine, concurrency, per_output) for concurrency in arguments.concurrency]
    cells = rows(results, bounds)
    console.print(table(cells))
    if arguments.docs:
        write_docs(arguments.docs, machine, cells)
        console.print(f"Updated the table in {arguments.docs}")
    if arguments.output:
        content: dict[str, Any] = {"machine": asdict(machine), "loads": [result.as_dict() for result in results]}
        arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
