"""The load test on a terminal: a bar while it runs, a table when it is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from server.cli.console import printable
from server.cli.loadtest.benchmark import BenchResult
from server.cli.loadtest.load import Distribution, Outcome, Report


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[Outcome], None]]:
    """Show a bar on stderr if that is a terminal. Yields the function to call with each outcome."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal) as progress:
        task = progress.add_task("warming up", total=total)
        tokens = failed = 0

        def advance(outcome: Outcome) -> None:
            nonlocal tokens, failed
            tokens += outcome.output_tokens
            failed += outcome.failure is not None
            failures = f", {failed} failed" if failed else ""
            progress.update(task, advance=1, description=f"{tokens} tokens{failures}")

        yield advance


def result_table(result: BenchResult) -> Group:
    """Tables of the load, the throughput and the latencies, and the failures."""
    return Group(_summary(result), Text(), _latencies(result.report), *_failures(result.report))


def _summary(result: BenchResult) -> Table:
    report, workload = result.report, result.workload
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    arrivals = [f"{result.concurrency} at a time"] if result.concurrency else []
    arrivals += [f"{result.rate:g} a second"] if result.rate else []
    lengths = f"{workload.input_len} {result.prompt_kind} in, {workload.output_len} tokens out"
    shared = f", {workload.shared_prefix:.0%} of the prompt shared" if workload.shared_prefix else ""
    eos = ", end of sequence ignored" if result.ignore_eos else ""
    table.add_row("Server", f"{result.base_url}, {result.endpoint}")
    table.add_row("Model", result.model)
    table.add_row("Load", f"{report.num_requests} requests, {', '.join(arrivals)}")
    table.add_row("Lengths", f"{lengths}{shared}{eos}")
    table.add_row(
        "Completed", f"{report.num_completed} in {report.duration_s:.2f} s, {report.requests_per_s:.2f} a second"
    )
    table.add_row("Tokens", f"{report.prompt_tokens} in, {report.output_tokens} out")
    table.add_row(
        "Throughput", f"{report.output_tokens_per_s:.1f} output tokens/s, {report.total_tokens_per_s:.1f} in total"
    )
    return table


def _latencies(report: Report) -> Table:
    table = Table("milliseconds", title_justify="left")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    rows: tuple[tuple[str, Distribution | None], ...] = (
        ("time to first token", report.time_to_first_token_ms),
        ("between tokens", report.inter_token_ms),
        ("time per output token", report.time_per_output_token_ms),
        ("end to end", report.end_to_end_ms),
    )
    for name, values in rows:
        numbers = (values.mean, values.p50, values.p90, values.p99, values.max) if values else ()
        table.add_row(name, *(f"{number:.1f}" for number in numbers))
    return table


def _failures(report: Report) -> list[Text]:
    if not report.failures:
        return []
    lines = [Text(f"\n{report.num_requests - report.num_completed} requests failed:", style="bold red")]
    lines += [
        Text(f"  {failure.count} x {failure.kind}; the first: {printable(failure.first_message)}")
        for failure in report.failures
    ]
    return lines
