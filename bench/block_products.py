"""Measures products with weights in block formats, and with int4 and int8, at the shape of a 1B model's MLP.

One row is bound by memory, and 128 rows by the multiplications. Each kind has several weights, which take turns, so
that caches of a few MB do not hold them.
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table

from bench.engine_environment import use_engine_environment
from model_runner.hub.repository import cache_folder
from model_runner.kernels.block_formats import BLOCK_FORMATS
from model_runner.kernels.build import build_kernels
from model_runner.kernels.library import Kernels, NativeWeight, WeightKind
from model_runner.processes import available_cores

OUTPUTS, INPUTS = 8192, 2048
COPIES = 4
DENSE: Sequence[WeightKind] = ("int8_rotated", "int8", "int4")
FORMATS = ("Q4_0", "IQ4_NL", "Q4_K", "IQ4_XS", "Q8_0", "Q5_K", "Q6_K")


def make_weights(kernels: Kernels) -> tuple[Mapping[str, list[NativeWeight]], Mapping[str, float]]:
    """Weights of each kind, and the rate at which blocks were packed, in 10^6 weights per second."""
    dense = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    weights = {str(kind): [kernels.pack(kind, dense) for _ in range(COPIES)] for kind in DENSE}
    rates = {}
    for number, stored in BLOCK_FORMATS.items():
        if stored.name not in FORMATS:
            continue
        blocks, seconds = torch.zeros(OUTPUTS, stored.row_bytes(INPUTS), dtype=torch.uint8), []
        weights[stored.name] = []
        for _ in range(COPIES):
            start = time.perf_counter()
            weights[stored.name].append(kernels.repack(number, blocks, INPUTS))
            seconds.append(time.perf_counter() - start)
        rates[stored.name] = OUTPUTS * INPUTS / statistics.median(seconds) / 1e6
    return weights, rates


def median_times(kernels: Kernels, weights: Mapping[str, list[NativeWeight]], rows: int) -> dict[str, float]:
    """Median seconds of a product of each kind; they run in turns for about four seconds."""
    x = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(1))
    times: dict[str, list[float]] = {name: [] for name in weights}
    end, turn = time.perf_counter() + 4.0, 0
    while time.perf_counter() < end or turn < COPIES:
        for name, copies in weights.items():
            start = time.perf_counter()
            kernels.linear(copies[turn % COPIES], x)
            times[name].append(time.perf_counter() - start)
        turn += 1
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure products with weights in block formats.")
    parser.add_argument("--isa", choices=("auto", "avx512bf16", "avx512vnni", "avx2", "portable"), default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 128])
    arguments = parser.parse_args()
    use_engine_environment()
    kernels = Kernels(build_kernels(cache_folder()), available_cores(), arguments.isa)
    weights, rates = make_weights(kernels)
    lines = Table("weight", "bits", "M packed/s", *(f"{rows} rows" for rows in arguments.rows))
    times = [median_times(kernels, weights, rows) for rows in arguments.rows]
    for name, (first, *_) in weights.items():
        cells = []
        for rows, of_rows in zip(arguments.rows, times, strict=True):
            giga = of_rows[name] * 1e9
            cells.append(f"{first.packed.nbytes / giga:.1f} GB/s, {rows * OUTPUTS * INPUTS / giga:.0f} GMAC/s")
        bits = first.packed.nbytes * 8 / (OUTPUTS * INPUTS)
        lines.add_row(name, f"{bits:.2f}", f"{rates[name]:,.0f}" if name in rates else "", *cells)
    console = Console(width=130)
    console.print(f"{kernels.isa}, {kernels.threads} threads, {OUTPUTS} outputs, {INPUTS} inputs")
    console.print(lines)


if __name__ == "__main__":
    main()
