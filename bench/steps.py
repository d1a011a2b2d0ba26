"""Benchmark of single runner steps against the machine's limits: decode at several batch sizes, and prefill.

A decode step must read every weight at least once, so the time to read as many bytes is a lower bound. On shared
machines that time varies from second to second, so it is measured after every step. Prefill is bound by the matrix
kernel's rate.
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
import torch
from rich.console import Console
from rich.table import Table

from bench import roofline
from bench.engine_environment import use_engine_environment
from bench.model_work import ModelWork
from model_runner.config import RunnerConfig
from model_runner.contract import AdmittedRequest, SamplingParams, ScheduledRequest, StepPlan
from model_runner.hub.repository import resolve_model
from model_runner.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
READ_BUFFER = 1 << 30


@dataclass(frozen=True, slots=True)
class StepTime:
    """Duration of one kind of step. Times are medians."""

    kind: str
    rows: int
    context: int
    """Tokens before the step's own."""
    step_ms: float
    read_ms: float
    """Time to read as many bytes as the weights have, measured between the steps."""
    macs: int
    """Multiply-adds of the weights' products in one step."""

    @property
    def gmac_per_s(self) -> float:
        """Rate of the multiply-adds, in 10^9 per second."""
        return self.macs / self.step_ms / 1e6


class Reader:
    """Reads different memory each time, so that none of it is cached."""

    def __init__(self, num_bytes: int) -> None:
        self._parts = torch.split(torch.ones(READ_BUFFER // 4), num_bytes // 4)[:-1]
        self._next = 0

    def read_s(self) -> float:
        """Seconds to read `num_bytes` bytes."""
        self._next = (self._next + 1) % len(self._parts)
        start = time.perf_counter()
        self._parts[self._next].sum()
        return time.perf_counter() - start


class Bench:
    """Drives a runner with its own plans instead of a scheduler's."""

    def __init__(self, runner: ModelRunner, work: ModelWork) -> None:
        self._runner = runner
        self._work = work
        self._reader = Reader(work.weight_bytes(runner.info.dtype))
        self._random = np.random.default_rng(0)

    def decode(self, rows: int, context: int, repeats: int) -> StepTime:
        """Measure steps in which `rows` choices with `context` tokens get one token each."""
        blocks = -(-(context + repeats + 2) // self._runner.info.block_size)
        keys = [f"decode-{row}" for row in range(rows)]
        for row, key in enumerate(keys):
            tokens = self._tokens(context)
            admitted = AdmittedRequest(key, tokens, context, 0, tuple(range(row * blocks, (row + 1) * blocks)), GREEDY)
            self._step((), (admitted,), [ScheduledRequest(key, context, ())])
        scheduled = [ScheduledRequest(key, 1, ()) for key in keys]
        times, reads = [], []
        for _ in range(repeats):
            times.append(self._step((), (), scheduled))
            reads.append(self._reader.read_s())
        self._step(tuple(keys), (), [])
        return self._median("decode", rows, context, times, reads)

    def prefill(self, rows: int, context: int, repeats: int) -> StepTime:
        """Measure steps that compute `rows` tokens of a prompt after `context` computed ones."""
        blocks = tuple(range(-(-(context + rows + 1) // self._runner.info.block_size)))
        times, reads = [], []
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
            reads.append(self._reader.read_s())
        return self._median("prefill", rows, context, times, reads)

    def _median(self, kind: str, rows: int, context: int, times: list[float], reads: list[float]) -> StepTime:
        """The medians without the first measurement."""
        macs = rows * (self._work.all if kind == "decode" else self._work.layers)
        step_s, read_s = statistics.median(times[1:]), statistics.median(reads[1:])
        return StepTime(kind, rows, context, step_s * 1e3, read_s * 1e3, macs)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.integers(0, self._runner.info.vocab_size, count).tolist())

    def _step(
        self, released: tuple[str, ...], admitted: tuple[AdmittedRequest, ...], scheduled: list[ScheduledRequest]
    ) -> float:
        """Run one step; returns its seconds. Choices are released in a separate step with nothing scheduled."""
        start = time.perf_counter()
        self._runner.execute(StepPlan(released, (), admitted, tuple(scheduled)))
        return time.perf_counter() - start


def measure(bench: Bench) -> Iterator[StepTime]:
    """Measure the steps of the table in docs/lab-notebook.md."""
    for rows in (1, 2, 4, 8, 16, 32, 64):
        yield bench.decode(rows, 200, 40)
    yield bench.decode(1, 2000, 20)
    for rows, context in ((128, 0), (512, 0), (512, 1024)):
        yield bench.prefill(rows, context, 5)


def table(times: list[StepTime], machine: roofline.Roofline) -> Table:
    """One line for each kind of step."""
    lines = Table("step", "rows", "context", "ms", "x reading the weights", "GMAC/s", "% of the int8 kernel's best")
    for column in lines.columns[1:]:
        column.justify = "right"
    for step in times:
        share = f"{100 * step.gmac_per_s / machine.int8_gmac_per_s:.0f}" if machine.int8_gmac_per_s else "-"
        lines.add_row(
            step.kind,
            str(step.rows),
            str(step.context),
            f"{step.step_ms:.2f}",
            f"{step.step_ms / step.read_ms:.2f}",
            f"{step.gmac_per_s:.0f}",
            share,
        )
    return lines


def main() -> None:
    """Measure the machine, then the steps, and print both; with --output also write JSON."""
    use_engine_environment()
    parser = argparse.ArgumentParser(description="Measure single steps of the runner on the CPU.")
    parser.add_argument("--model", help="folder, GGUF file or hub name; the embedded model by default")
    parser.add_argument("--quantization", choices=("auto", "int8", "int4", "none"), default="auto")
    parser.add_argument("--rows", choices=("auto", "int8", "int16"), default="auto")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "float32", "bfloat16", "int8"), default="auto")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments = parser.parse_args()
    console = Console()
    folder = resolve_model(arguments.model, console).path
    config = RunnerConfig(
        folder,
        device="cpu",
        quantization=arguments.quantization,
        activation_type=arguments.rows,
        kv_cache_dtype=arguments.kv_cache_dtype,
        threads=len(os.sched_getaffinity(0)),
        kv_cache_gib=2.0,
        max_num_batched_tokens=2048,
    )
    machine = roofline.measure()
    console.print(roofline.table(machine))
    runner = ModelRunner.load(config)
    if runner.groups:
        parser.error("models with windows or recurrent layers need blocks that only the scheduler places")
    times = list(measure(Bench(runner, ModelWork.of(folder))))
    console.print(table(times, machine))
    if arguments.output:
        content = {
            "machine": asdict(machine),
            "weights": runner.info.dtype,
            "rows": runner.info.activation_type,
            "steps": [asdict(step) for step in times],
        }
        arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
