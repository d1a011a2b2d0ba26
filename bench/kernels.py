"""Compares time and error of the native kernels and their torch equivalents, at the shapes of SmolLM2-135M.

Errors are relative to float64: root mean square of the difference divided by root mean square of the result.
"""

import argparse
import json
import math
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.engine_environment import use_engine_environment
from model_runner.attention.backend import AttentionOptions
from model_runner.attention.cpu import NativeAttention
from model_runner.batch import Batch, BatchChoice, BatchMaker, LogitRows, StepTokens
from model_runner.hub.repository import cache_folder
from model_runner.kernels.build import build_kernels
from model_runner.kernels.library import Kernels, WeightKind
from model_runner.kv_cache import KVCache, KVShape
from model_runner.modules.linears import OneDNNPacker
from model_runner.processes import available_cores

LINEARS = {"qkv": (960, 576), "output": (576, 576), "gate, up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
HEADS, KV_HEADS, DIM = 9, 3, 64
BLOCK = 32


@dataclass(frozen=True, slots=True)
class Comparison:
    """One kernel at one shape. Times are medians in microseconds."""

    kernel: str
    rows: int
    ours_us: float
    torch_us: float
    torch_name: str
    our_error: float
    torch_error: float


def compare_linears(kernels: Kernels) -> Iterator[Comparison]:
    """Compare linears with packed weights and oneDNN's float32 linear, whose weight is reordered in advance."""
    generator = torch.Generator().manual_seed(0)
    for name, shape in LINEARS.items():
        weight = torch.randn(shape, generator=generator)
        for rows in (1, 8, 32, 128):
            yield from _compare_linear(kernels, name, weight, torch.randn(rows, shape[1], generator=generator))


def _compare_linear(kernels: Kernels, name: str, weight: Tensor, x: Tensor) -> Iterator[Comparison]:
    """Compare all weight kinds alternately; the head is never int4."""
    kinds: list[WeightKind] = ["int8_rotated", "int8"] if name == "head" else ["int8_rotated", "int8", "int4"]
    product = OneDNNPacker()(weight)

    def theirs() -> Tensor:
        return product(x, None)

    ours = [partial(kernels.linear, kernels.pack(kind, weight), x) for kind in kinds]
    exact = x.double() @ weight.double().T
    *our_times, torch_us = _alternate(*ours, theirs)
    for kind, action, us in zip(kinds, ours, our_times, strict=True):
        errors = _error(action(), exact), _error(theirs(), exact)
        yield Comparison(f"{kind.replace('_', ' ')} {name}", len(x), us, torch_us, "oneDNN float32", *errors)


def compare_attention(kernels: Kernels) -> Iterator[Comparison]:
    """Compare paged attention and torch's scaled_dot_product_attention, which gets contiguous keys and values."""
    for rows, context in ((1, 200), (1, 2000), (128, 0), (128, 1024)):
        yield _compare_attention(kernels, rows, context)


def _compare_attention(kernels: Kernels, rows: int, context: int) -> Comparison:
    length = context + rows
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(length, HEADS, DIM, generator=generator)
    key, value = (torch.randn(length, KV_HEADS, DIM, generator=generator) for _ in range(2))
    blocks = -(-length // BLOCK)
    cache = KVCache([KVShape(KV_HEADS, DIM, DIM)], blocks, BLOCK, torch.float32, torch.device("cpu"))
    backend, options = NativeAttention(kernels, cache), AttentionOptions(DIM**-0.5)
    backend.forward(0, query, key, value, options, backend.prepare(_one_choice(0, length, blocks)))  # fills the cache
    step = backend.prepare(_one_choice(context, rows, blocks))
    new = query[context:], key[context:], value[context:]

    seen = torch.ones(rows, length, dtype=torch.bool).tril(context)
    laid_out = [tensor.transpose(0, 1).unsqueeze(0).contiguous() for tensor in (new[0], key, value)]

    def theirs(parts: list[Tensor]) -> Tensor:
        query, key, value = parts
        result: Tensor = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        return result[0].transpose(0, 1)

    def ours() -> Tensor:
        return backend.forward(0, *new, options, step)

    exact = theirs([part.double() for part in laid_out])
    ours_us, torch_us = _alternate(ours, lambda: theirs(laid_out))
    errors = _error(ours(), exact), _error(theirs(laid_out), exact)
    return Comparison(f"attention after {context}", rows, ours_us, torch_us, "SDPA float32", *errors)


def _one_choice(start: int, count: int, blocks: int) -> Batch:
    choice = BatchChoice(blocks=array("i", range(blocks)))
    return BatchMaker(BLOCK).make([choice], StepTokens([0] * count, [start], [count]), LogitRows(()))


def _alternate(*actions: Callable[[], object]) -> list[float]:
    """Median microseconds of each action; they run alternately for about a second."""
    times: list[list[float]] = [[] for _ in actions]
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end or len(times[0]) < 5:
        for action, taken in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            taken.append((time.perf_counter() - start) * 1e6)
    return [statistics.median(taken) for taken in times]


def _error(result: Tensor, exact: Tensor) -> float:
    difference = (result.double() - exact).square().mean().item()
    return math.sqrt(difference / exact.square().mean().item())


def table(comparisons: list[Comparison]) -> Table:
    """One line for each comparison."""
    lines = Table("kernel", "rows", "ours us", "torch us", "faster", "torch's", "our error", "torch's error")
    for column in (*lines.columns[1:5], *lines.columns[6:]):
        column.justify = "right"
    for line in comparisons:
        lines.add_row(
            line.kernel,
            str(line.rows),
            f"{line.ours_us:,.0f}",
            f"{line.torch_us:,.0f}",
            f"{line.torch_us / line.ours_us:.1f} x",
            line.torch_name,
            f"{line.our_error:.1e}",
            f"{line.torch_error:.1e}",
        )
    return lines


def main() -> None:
    """Compare and print; with --output also write JSON."""
    parser = argparse.ArgumentParser(description="Compare the native CPU kernels with torch's.")
    parser.add_argument("--isa", choices=("auto", "avx512bf16", "avx512vnni", "avx2", "portable"), default="auto")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments = parser.parse_args()
    use_engine_environment()
    torch.set_num_threads(available_cores())
    kernels = Kernels(build_kernels(cache_folder()), available_cores(), arguments.isa)
    comparisons = [*compare_linears(kernels), *compare_attention(kernels)]
    console = Console(width=130)
    console.print(f"{kernels.isa}, {kernels.threads} threads")
    console.print(table(comparisons))
    if arguments.output:
        lines = [asdict(comparison) for comparison in comparisons]
        arguments.output.write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
