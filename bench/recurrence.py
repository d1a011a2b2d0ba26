"""Measures the CPU kernels of recurrent layers: time per token and head, with the limits of memory and arithmetic.

The sizes are Qwen3.5-0.8B's (16 heads of 128 x 128), of KDA with as many heads, and of Mamba 2 with 16 heads of
128 x 64 that share one key, in 18 layers. All is done in one thread, and times are its processor time, the least of
several: so other work on the machine slows memory and caches, but is not counted itself. The load average is printed.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.engine_environment import use_engine_environment
from model_runner.batch import Batch, StateTables
from model_runner.hub.repository import cache_folder
from model_runner.kernels.build import build_kernels
from model_runner.kernels.library import Kernels
from model_runner.processes import available_cores
from model_runner.recurrence.cpu import NativeRecurrence
from model_runner.recurrence.states import BLOCK, RecurrentShape, StateCache

SHAPES = {
    "gated delta net": RecurrentShape(16, 16, 128, 128, delta=True, per_channel=False),
    "KDA": RecurrentShape(16, 16, 128, 128, delta=True, per_channel=True),
    "Mamba 2": RecurrentShape(16, 1, 128, 64, delta=False, per_channel=False),
}
WORK = {"prompt of 512": (1, 0, 512), "1 choice": (1, 48, 1), "8 choices": (8, 48, 1), "32 choices": (32, 48, 1)}
"""Choices, first position, and tokens of each; decoding is in the middle of a block."""
LAYERS = 18
READ_BYTES, MATRIX_SIZE = 1 << 29, 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one thread."""

    read_gb_per_s: float
    """Sum of a buffer much larger than the caches of a core."""
    fp32_gflop_per_s: float
    """Torch's product of square matrices."""

    @classmethod
    def measure(cls, seconds: float) -> "Limits":
        """For about `seconds` each."""
        buffer, matrix = torch.ones(READ_BYTES // 4), torch.ones(MATRIX_SIZE, MATRIX_SIZE)
        read_time = _best_time(buffer.sum, seconds)
        matrix_time = _best_time(lambda: matrix @ matrix, seconds)
        return cls(READ_BYTES / read_time / 1e9, 2 * MATRIX_SIZE**3 / matrix_time / 1e9)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times per token and head, in microseconds."""

    kind: str
    work: str
    us: float
    by_memory_us: float
    """Time to read, at the read bandwidth of a thread, the state (once a block) and the rows before the token."""
    by_arithmetic_us: float
    """Time of the multiply-adds at a thread's fp32 matrix rate."""


def make_batch(choices: int, start: int, count: int) -> Batch:
    """Known tokens of each choice, with a page written at the last boundary."""
    blocks = -(-(start + count) // BLOCK)
    covered, full = start // BLOCK, (start + count) // BLOCK
    positions, nothing = np.tile(np.arange(start, start + count), choices), np.zeros(choices * count, dtype=np.int64)
    states = StateTables(
        [range(choice * blocks, (choice + 1) * blocks) for choice in range(choices)],
        [(covered, choice) if covered else (0, -1) for choice in range(choices)],
        [[(full - 1, choices + choice)] if full > covered else [] for choice in range(choices)],
    )
    choice_of, tables = np.repeat(np.arange(choices), count), [[0]] * choices
    return Batch(nothing, positions, choice_of, tables, nothing, nothing, nothing[:0], [], [], states=states)


def measure(kernels: Kernels, limits: Limits, seconds: float) -> Iterator[Measurement]:
    """Measure each kind at each amount of work."""
    for kind, shape in SHAPES.items():
        for work, (choices, start, count) in WORK.items():
            batch = make_batch(choices, start, count)
            time_of_step = _best_time(_step(kernels, shape, batch), seconds)
            tokens = choices * count * LAYERS * shape.heads
            yield Measurement(
                kind,
                work,
                time_of_step / tokens * 1e6,
                _bytes_per_token(shape, count) / limits.read_gb_per_s / 1e3,
                2 * _multiply_adds(shape, count) / limits.fp32_gflop_per_s / 1e3,
            )


def _best_time(action: Callable[[], object], seconds: float) -> float:
    """The least processor time of this thread, in seconds."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.thread_time()
        action()
        best = min(best, time.thread_time() - start)
    return best


def _step(kernels: Kernels, shape: RecurrentShape, batch: Batch) -> Callable[[], object]:
    """Computes all layers."""
    assert batch.states is not None
    choices = len(batch.states.rows)
    blocks = 1 + max(max(rows) for rows in batch.states.rows)
    cache = StateCache([shape] * LAYERS, [], blocks, 2 * choices, torch.device("cpu"))
    for memory in cache.recurrent:
        memory.states.normal_()
        memory.keys.normal_().mul_(0.1)
        memory.decays.fill_(0.97)
        memory.updates.normal_()
    backend, inputs = NativeRecurrence(kernels, cache), _inputs(shape, len(batch.tokens))
    metadata = backend.prepare(batch)
    return lambda: [backend.recur(layer, *inputs, metadata) for layer in range(LAYERS)]


def _inputs(shape: RecurrentShape, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    query, key = torch.nn.functional.normalize(torch.randn(2, count, shape.key_heads, shape.key_dim), dim=-1)
    value = torch.randn(count, shape.heads, shape.value_dim)
    log_decay = -0.1 * torch.rand((count, shape.heads, shape.key_dim) if shape.per_channel else (count, shape.heads))
    return query, key, value, log_decay, torch.rand(count, shape.heads) if shape.delta else None


def _bytes_per_token(shape: RecurrentShape, count: int) -> float:
    """Bytes that one head reads from memory: its state, once a block; half a block of keys, decays and updates."""
    at_once = min(count, BLOCK)
    numbers = shape.key_dim * shape.value_dim / at_once
    if count == 1:
        decays = shape.key_dim if shape.per_channel else 1
        numbers += BLOCK / 2 * (shape.key_dim * shape.key_heads / shape.heads + decays + shape.value_dim)
    return numbers * torch.float32.itemsize


def _multiply_adds(shape: RecurrentShape, count: int) -> float:
    """Multiply-adds of one head: with the state, with half a block of keys and updates, and its share of a fold."""
    vectors = 2 if shape.delta else 1
    folds = 1 if count >= BLOCK else 0
    return (vectors + folds) * shape.key_dim * shape.value_dim + vectors * BLOCK / 2 * (shape.key_dim + shape.value_dim)


def table(measurements: list[Measurement]) -> Table:
    """One line for each measurement."""
    lines = Table("recurrence", "work", "us per token and head", "memory allows", "arithmetic allows")
    for column in lines.columns[2:]:
        column.justify = "right"
    for line in measurements:
        times = (line.us, line.by_memory_us, line.by_arithmetic_us)
        lines.add_row(line.kind, line.work, *(f"{us:.2f}" for us in times))
    return lines


def main() -> None:
    """Measure and print; with --output also write JSON."""
    parser = argparse.ArgumentParser(description="Measure the CPU kernels of recurrent layers.")
    parser.add_argument("--isa", choices=("auto", "avx512bf16", "avx512vnni", "avx2", "portable"), default="auto")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments = parser.parse_args()
    use_engine_environment()
    torch.set_num_threads(1)
    limits = Limits.measure(arguments.seconds)
    kernels = Kernels(build_kernels(cache_folder()), 1, arguments.isa)
    measurements = list(measure(kernels, limits, arguments.seconds))
    console = Console(width=130)
    console.print(f"{kernels.isa}, one thread of {available_cores()} cores, load {os.getloadavg()[0]:.1f}")
    console.print(f"It reads {limits.read_gb_per_s:.0f} GB/s, multiplies {limits.fp32_gflop_per_s:.0f} GFLOP/s")
    console.print(table(measurements))
    if arguments.output:
        lines = [asdict(measurement) for measurement in measurements]
        arguments.output.write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
