"""What one step of the runner costs, next to what the machine allows: decode at several batch sizes, and prefill.

A decode step must read every weight at least once, so the time of reading them bounds it from below; a prompt is bound
by the rate of the matrix kernel.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import roofline
from bench.model_work import ModelWork
from model_runner.config import RunnerConfig
from model_runner.contract import AdmittedRequest, SamplingParams, ScheduledRequest, StepPlan
from model_runner.models.repository import resolve_model
from model_runner.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class StepTime:
    """One kind of step. Times are medians."""

    kind: str
    rows: int
    context: int
    """Tokens before the step's own."""
    step_ms: float
    macs: int
    """Multiply-adds of the weights' products, in one step."""

    @property
    def gmac_per_s(self) -> float:
        """Rate of those multiply-adds."""
        return self.macs / self.step_ms / 1e6


class Bench:
    """Drives a runner with plans of its own, without a scheduler."""

    def __init__(self, runner: ModelRunner, work: ModelWork) -> None:
        self._runner = runner
        self._work = work
        self._random = np.random.default_rng(0)

    def decode(self, rows: int, context: int, repeats: int) -> StepTime:
        """`rows` choices, each with `context` tokens, get a token each."""
        blocks = -(-(context + repeats + 2) // self._runner.info.block_size)
        keys = [f"decode-{row}" for row in range(rows)]
        for row, key in enumerate(keys):
            tokens = self._tokens(context)
            admitted = AdmittedRequest(key, tokens, context, 0, tuple(range(row * blocks, (row + 1) * blocks)), GREEDY)
            self._step((), (admitted,), [ScheduledRequest(key, context, ())])
        scheduled = [ScheduledRequest(key, 1, ()) for key in keys]
        times = [self._step((), (), scheduled) for _ in range(repeats)]
        self._step(tuple(keys), (), [])
        return StepTime("decode", rows, context, statistics.median(times[1:]) * 1e3, rows * self._work.all)

    def prefill(self, rows: int, context: int, repeats: int) -> StepTime:
        """A chunk of `rows` tokens of one prompt, after `context` that are there."""
        blocks = tuple(range(-(-(context + rows + 1) // self._runner.info.block_size)))
        times = []
        for _ in range(repeats + 1):
            admitted = AdmittedRequest(
                "prefill", self._tokens(context + rows + 1), context + rows + 1, 0, blocks, GREEDY
            )
            if context:
                self._step((), (admitted,), [ScheduledRequest("prefill", context, ())])
                times.append(self._step((), (), [ScheduledRequest("prefill", rows, ())]))
            else:
                times.append(self._step((), (admitted,), [ScheduledRequest("prefill", rows, ())]))
            self._step(("prefill",), (), [])
        return StepTime("prefill", rows, context, statistics.median(times[1:]) * 1e3, rows * self._work.layers)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.integers(0, self._runner.info.vocab_size, count).tolist())

    def _step(
        self, released: tuple[str, ...], admitted: tuple[AdmittedRequest, ...], scheduled: list[ScheduledRequest]
    ) -> float:
        """Seconds of one step; releasing takes a step of its own, with nothing scheduled."""
        start = time.perf_counter()
        self._runner.execute(StepPlan(released, (), admitted, tuple(scheduled)))
        return time.perf_counter() - start


def measure(bench: Bench) -> Iterator[StepTime]:
    """The steps of the table in docs/performance.md."""
    for rows in (1, 2, 4, 8, 16, 32, 64):
        yield bench.decode(rows, 200, 40)
    yield bench.decode(1, 2000, 20)
    for rows, context in ((128, 0), (512, 0), (512, 1024)):
        yield bench.prefill(rows, context, 5)


def table(times: list[StepTime], weight_bytes: int, machine: roofline.Roofline) -> Table:
    """One line for each kind of step."""
    lines = Table("step", "rows", "context", "ms", "x reading the weights", "GMAC/s", "% of the int8 kernel's best")
    for column in lines.columns[1:]:
        column.justify = "right"
    read_ms = weight_bytes / machine.read_gb_per_s / 1e6
    for step in times:
        share = f"{100 * step.gmac_per_s / machine.int8_gmac_per_s:.0f}" if machine.int8_gmac_per_s else "-"
        lines.add_row(
            step.kind,
            str(step.rows),
            str(step.context),
            f"{step.step_ms:.2f}",
            f"{step.step_ms / read_ms:.2f}",
            f"{step.gmac_per_s:.0f}",
            share,
        )
    return lines


def main() -> None:
    """Measure the machine, then the steps; print both, write both."""
    parser = argparse.ArgumentParser(description="Measure single steps of the runner on the CPU.")
    parser.add_argument("--model", help="folder, GGUF file or hub name; the embedded model when left out")
    parser.add_argument("--quantization", choices=("auto", "int8", "none"), default="auto")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "float32", "bfloat16", "int8"), default="auto")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments = parser.parse_args()
    console = Console()
    folder = resolve_model(arguments.model, console).path
    config = RunnerConfig(
        folder,
        device="cpu",
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        threads=len(os.sched_getaffinity(0)),
        kv_cache_gib=2.0,
        max_num_batched_tokens=2048,
    )
    machine = roofline.measure()
    console.print(roofline.table(machine))
    runner = ModelRunner.load(config)
    work = ModelWork.of(folder)
    times = list(measure(Bench(runner, work)))
    console.print(table(times, work.all * (1 if runner.info.dtype == "int8" else 4), machine))
    if arguments.output:
        content = {"machine": asdict(machine), "weights": runner.info.dtype, "steps": [asdict(step) for step in times]}
        arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
