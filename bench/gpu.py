"""All that needs a GPU, in one command of under ten minutes: tests, the machine's limits, steps, kernels, serving.

What is most important comes first. Whatever fails is shown and the rest goes on; what there is no time for is named.
"""

import argparse
import gc
import importlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.gpu_limits import measure_limits
from bench.gpu_model import llama_8b, write_model
from bench.gpu_report import Figure, Report
from bench.gpu_tests import run_tests
from bench.gpu_variants import VARIANTS, Comparison, PlainTimes
from bench.gpu_work import DecoderWork, Limits

TESTS_S, SERVING_S = 220.0, 90.0
"""At most."""
REPEATS, QUICK_REPEATS = 24, 8
PACKAGES = ("torch", "triton", "transformers", "numpy")


@dataclass
class Run:
    """What the parts share."""

    report: Report
    folder: Path
    """For the model."""
    num_layers: int
    repeats: int
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    plain: PlainTimes = field(default_factory=PlainTimes)
    measured: Limits | None = None

    @property
    def limits(self) -> Limits:
        """Raises RuntimeError if they could not be measured."""
        if self.measured is None:
            raise RuntimeError("the machine's limits are not known")
        return self.measured

    def tests(self) -> Figure:
        """Correctness comes first."""
        return run_tests(min(TESTS_S, self.report.left_s))

    def machine(self) -> Figure:
        """What it can do at best."""
        self.measured = measure_limits(self.device)
        copy, rate = self.measured.copy_bytes_per_s / 1e9, self.measured.bf16_flop_per_s / 1e12
        self.report.add(Figure("limits", "copy, read and written", copy, "GB/s"))
        return Figure("limits", "bf16 product", rate, "TFLOP/s")

    def model(self) -> Figure:
        """Random weights, on disk."""
        start = time.perf_counter()
        size = write_model(self.folder, llama_8b(self.num_layers), self.device)
        seconds = time.perf_counter() - start
        return Figure("model", f"{self.num_layers} layers, {size / 1e9:.1f} GB", seconds, "s")

    def first_variant(self) -> Figure:
        """In turns with plain transformers."""
        self.report.attempt("plain", "transformers", self.load_plain)
        try:
            return self.variant("exact")
        finally:
            self.plain.unload()

    def load_plain(self) -> Figure:
        """Plain transformers, with the same weights."""
        start = time.perf_counter()
        self.plain.load(self.folder, self.device)
        return Figure("load", "plain transformers", time.perf_counter() - start, "s")

    def variant(self, name: str) -> Figure:
        """One way to run the model."""
        work = DecoderWork.of(self.folder)
        comparison = Comparison(self.folder, work, self.limits, self.device, self.plain, self.report, self.repeats)
        return comparison.measure(VARIANTS[name])

    def kernels(self) -> Figure:
        """Alone."""
        from bench.gpu_kernels import KernelBench  # noqa: PLC0415  (needs triton)

        return KernelBench(self.report, self.limits, self.device).measure()

    def serving(self) -> Figure:
        """Over HTTP."""
        from bench.gpu_serving import CLIENTS, measure_serving  # noqa: PLC0415  (needs the server's packages)

        return measure_serving(self.folder, CLIENTS, min(SERVING_S, self.report.left_s), self.report.add)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the run."""

    name: str
    run: Callable[[], Figure]
    needs_s: float
    """Left out if less is left."""
    is_quick: bool = False
    """Whether a quick run has it."""


def parts(run: Run) -> list[Part]:
    """The most important first."""
    return [
        Part("tests", run.tests, 20, is_quick=True),
        Part("limits", run.machine, 5, is_quick=True),
        Part("model", run.model, 30, is_quick=True),
        Part("exact", run.first_variant, 60, is_quick=True),
        Part("fast", partial(run.variant, "fast"), 45, is_quick=True),
        Part("kernels", run.kernels, 30, is_quick=True),
        Part("serving", run.serving, 60),
        Part("fast-fp8", partial(run.variant, "fast-fp8"), 45),
        Part("fast-int4", partial(run.variant, "fast-int4"), 40),
        Part("exact-fp8-kv", partial(run.variant, "exact-fp8-kv"), 35),
        Part("exact-no-graphs", partial(run.variant, "exact-no-graphs"), 35),
    ]


def run_parts(report: Report, chosen: Sequence[Part], *, is_strict: bool) -> None:
    """One after the other, as long as there is time; a strict run ends where something fails."""
    for part in chosen:
        print(f"[{max(report.left_s, 0):.0f} s left] {part.name}", flush=True)
        report.attempt(part.name, "", part.run, part.needs_s)
        gc.collect()
        torch.cuda.empty_cache()  # the next model needs the room
        if is_strict and report.has_failures:
            return


def describe_machine() -> dict[str, str]:
    """With the versions that matter."""
    versions = {
        package: str(importlib.import_module(package).__version__) for package in PACKAGES if find_spec(package)
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        **versions,
    }


def main() -> int:
    """Run it all; 1 if anything failed, or if there is no GPU."""
    parser = argparse.ArgumentParser(description="Test and measure all that needs a CUDA GPU.")
    parser.add_argument(
        "--json", type=Path, default=Path("build/gpu.json"), help="every number; %(default)s if left out"
    )
    parser.add_argument("--layers", type=int, default=32, help="of the model, which is else like Llama-3.1-8B")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and only what is most important")
    parser.add_argument("--strict", action="store_true", help="end at the first failure, so with failing tests")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds; %(default).0f if left out")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu measures on a CUDA GPU, and torch finds none here", file=sys.stderr)
        return 1
    report = Report(describe_machine(), arguments.json, arguments.budget)
    with tempfile.TemporaryDirectory(prefix="samewise-bench-") as folder:
        run = Run(report, Path(folder), arguments.layers, QUICK_REPEATS if arguments.quick else REPEATS)
        chosen = [part for part in parts(run) if part.is_quick or not arguments.quick]
        run_parts(report, chosen, is_strict=arguments.strict)
    report.print_table()
    return int(report.has_failures)


if __name__ == "__main__":
    sys.exit(main())
