"""Measures the limits of a CPU or GPU: read bandwidth, fp32 matrix rate, and the rate of our int8 kernel.

Generating a token reads every weight once, so bandwidth divided by the bytes of weights bounds one stream's tokens per
second. The matrix rate bounds prompts and large batches.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from model_runner.hub.repository import cache_folder
from model_runner.kernels.build import NoKernelsError, build_kernels
from model_runner.kernels.library import Kernels

MATRIX_SIZES = (512, 1024, 2048)
INT8_SHAPE = (480, 1024)  # rows, width
CPU_BUFFER_BYTES = 1 << 30
CUDA_BUFFER_BYTES = 4 << 30
ISA_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_tile", "asimd", "sve", "bf16")


@dataclass(frozen=True, slots=True)
class Roofline:
    """A machine's limits: the best of several measurements."""

    device: str
    processor: str
    cores: int
    """Cores that this process may use; multiprocessors of a GPU."""
    threads: int
    isa: str
    torch: str
    read_gb_per_s: float
    """Reading a buffer much larger than the caches; 1 GB is 10^9 bytes."""
    copy_gb_per_s: float
    """Bytes read and written by a copy."""
    fp32_gflop_per_s: float
    """Rate of the best square matrix product; TF32 is off."""
    fp32_size: int
    """Size of the best square matrix product."""
    int8_gmac_per_s: float | None
    """Best rate of our int8 kernel in 10^9 multiply-adds per second; None if it cannot run."""
    int8_isa: str | None
    """Instruction set of our int8 kernel."""


def measure(device: str = "cpu", *, seconds: float = 2.0, buffer_bytes: int | None = None) -> Roofline:
    """Measure a device, for about `seconds` for each number."""
    size = buffer_bytes or (CPU_BUFFER_BYTES if device == "cpu" else CUDA_BUFFER_BYTES)
    read, copy = _memory_rates(size, device, seconds)
    rates = {n: 2 * n**3 / _best_time(_product(n, device), device, seconds / 2) for n in MATRIX_SIZES}
    fastest = max(rates, key=lambda n: rates[n])
    int8_rate, int8_isa = _int8_rate(seconds) if device == "cpu" else (None, None)
    processor, cores, isa = _describe_cpu() if device == "cpu" else _describe_cuda()
    return Roofline(
        device=device,
        processor=processor,
        cores=cores,
        threads=torch.get_num_threads(),
        isa=isa,
        torch=torch.__version__,
        read_gb_per_s=read / 1e9,
        copy_gb_per_s=copy / 1e9,
        fp32_gflop_per_s=rates[fastest] / 1e9,
        fp32_size=fastest,
        int8_gmac_per_s=int8_rate,
        int8_isa=int8_isa,
    )


def table(result: Roofline) -> Table:
    """The result as a table."""
    lines = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    lines.add_row("Processor", f"{result.processor}, {result.cores} cores, {result.threads} threads")
    lines.add_row("Instructions", result.isa)
    lines.add_row("Read", f"{result.read_gb_per_s:.1f} GB/s")
    lines.add_row("Copy", f"{result.copy_gb_per_s:.1f} GB/s, read and written")
    lines.add_row("fp32 matrix", f"{result.fp32_gflop_per_s:,.0f} GFLOP/s at {result.fp32_size}")
    if result.int8_gmac_per_s is not None:
        lines.add_row("int8 kernel", f"{result.int8_gmac_per_s:,.0f} GMAC/s with {result.int8_isa}")
    return lines


def _int8_rate(seconds: float) -> tuple[float, str] | tuple[None, None]:
    """Rate of our int8 linear at its best shape in 10^9 multiply-adds per second, and its instruction set."""
    try:
        kernels = Kernels(build_kernels(cache_folder()), torch.get_num_threads())
    except NoKernelsError:
        return None, None
    rows, width = INT8_SHAPE
    weight, inputs = kernels.pack(kernels.int8_kind, torch.rand(width, width)), torch.rand(rows, width)
    time_s = _best_time(lambda: kernels.linear(weight, inputs), "cpu", seconds / 2)
    return rows * width**2 / time_s / 1e9, kernels.isa


def _memory_rates(size: int, device: str, seconds: float) -> tuple[float, float]:
    """Bytes per second when reading and when copying a buffer of `size` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.zeros_like(source)
    read_time = _best_time(source.sum, device, seconds)
    return size / read_time, 2 * size / _best_time(lambda: target.copy_(source), device, seconds)


def _product(size: int, device: str) -> Callable[[], object]:
    a, b = torch.rand(size, size, device=device), torch.rand(size, size, device=device)
    out = torch.empty(size, size, device=device)
    return lambda: torch.matmul(a, b, out=out)


def _best_time(action: Callable[[], object], device: str, seconds: float) -> float:
    """Shortest time of at least three runs after a warm-up."""

    def run() -> float:
        start = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    run()
    times = [run() for _ in range(3)]
    while sum(times) < seconds:
        times.append(run())
    return min(times)


def _describe_cpu() -> tuple[str, int, str]:
    """Name, usable cores and relevant instruction sets."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in info.splitlines())}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    isa = [flag for flag in ISA_FLAGS if flag in flags] + [f"torch uses {torch.backends.cpu.get_cpu_capability()}"]
    return fields.get("model name") or platform.machine(), len(os.sched_getaffinity(0)), ", ".join(isa)


def _describe_cuda() -> tuple[str, int, str]:
    properties = torch.cuda.get_device_properties(0)
    return (
        properties.name,
        properties.multi_processor_count,
        f"compute capability {properties.major}.{properties.minor}",
    )


def main() -> None:
    """Measure and print; with --output also write JSON."""
    parser = argparse.ArgumentParser(description="Measure the read bandwidth and the matrix rate of this machine.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; all available cores by default")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    torch.set_num_threads(arguments.threads or len(os.sched_getaffinity(0)))
    result = measure(arguments.device)
    Console().print(table(result))
    if arguments.output:
        arguments.output.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
