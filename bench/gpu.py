"""Tests and benchmarks that need a GPU, in one command of under ten minutes.

Runs tests, the machine's limits, steps, kernels and serving, the most important first. A failure is shown and the rest
continues; parts for which no time is left are listed.
"""

import argparse
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import torch

from bench.on_gpu.parts import DeviceParts, Settings
from bench.on_gpu.process import Part, run_apart
from bench.on_gpu.report import Figure, SavedReport, skipped
from bench.on_gpu.tests import run_tests
from bench.on_gpu.variants import decode_kind
from server.engine.environment import engine_environment

BUDGET_S = 560.0
"""Ten minutes minus the time for imports and for ending."""
TESTS_S, SERVING_S = 220.0, 110.0
"""Time limits of tests and serving."""
REPEATS, QUICK_REPEATS = 7, 5
CLIENTS = (1, 16, 64, 256)
PROMPT, ANSWER = 128, 128
"""Lengths in tokens."""
SERVED = dict.fromkeys(CLIENTS, PROMPT + ANSWER // 2)
PACKAGES = ("torch", "triton", "transformers", "numpy")
SERVER_PACKAGES = (
    *("fastapi", "httpx", "jinja2", "msgspec", "prometheus_client", "pydantic", "pydantic_settings", "sse_starlette"),
    *("typer", "uvicorn", "yaml"),
)
PARTS = (
    Part("tests", 20, is_quick=True),
    Part("limits", 5, is_quick=True),
    Part("model", 30, is_quick=True),
    Part("exact", 60, is_quick=True),
    Part("fast", 45, is_quick=True),
    Part("kernels", 30, is_quick=True),
    Part("serving", 60),
    Part("fast-fp8", 45),
    Part("fast-int4", 40),
    Part("exact-fp8-kv", 35),
    Part("exact-no-graphs", 35),
)
"""All parts, the most important first."""


@dataclass(frozen=True, slots=True)
class Run:
    """Runs the parts: tests and serving in separate processes, the others in a shared one."""

    report: SavedReport
    settings: Settings

    def measure(self, parts: Sequence[Part], *, is_strict: bool) -> None:
        """Run the parts in order. A strict run stops if tests fail."""
        own = {"tests": self.tests, "serving": self.serving}
        for name, group in groupby(parts, key=lambda part: part.name if part.name in own else ""):
            print(f"[{max(self.report.left_s, 0):.0f} s left] {name or 'on the device'}", flush=True)
            if name:
                (part,) = group
                self.report.attempt(name, "", own[name], part.needs_s)
                if is_strict and self.report.has_failures:
                    return
            else:
                run_apart(self.report, list(group), partial(DeviceParts, settings=self.settings))

    def tests(self) -> Figure:
        """Run the tests."""
        return run_tests(min(TESTS_S, self.report.left_s))

    def serving(self) -> Figure:
        """Measure the server over HTTP."""
        if missing := [package for package in SERVER_PACKAGES if find_spec(package) is None]:
            return skipped("serving", "", missing)
        from bench.on_gpu.serving import measure_serving  # noqa: PLC0415  (needs SERVER_PACKAGES)

        plain = {clients: self.report.plain(decode_kind(clients, context)) for clients, context in SERVED.items()}
        limit_s = min(SERVING_S, self.report.left_s)
        return measure_serving(self.settings.folder, plain, (PROMPT, ANSWER), limit_s, self.report.add)


def describe_machine() -> dict[str, str]:
    """Date, device and versions, for the report."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES if find_spec(package)},
    }


def main() -> int:
    """Run all parts; returns 1 if one failed or there is no GPU."""
    parser = argparse.ArgumentParser(description="Run the tests and benchmarks that need a CUDA GPU.")
    parser.add_argument(
        "--json", type=Path, default=Path("build/gpu.json"), help="file for all results; default %(default)s"
    )
    parser.add_argument(
        "--layers", type=int, default=32, help="number of layers of the model, a Llama-3.1-8B otherwise"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and only the most important parts")
    parser.add_argument("--strict", action="store_true", help="stop if tests fail")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="time limit in seconds; default %(default).0f")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu needs a CUDA GPU, but torch finds none", file=sys.stderr)
        return 1
    os.environ.update(engine_environment())  # for child processes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the table is printed nevertheless
    report = SavedReport(describe_machine(), arguments.json, arguments.budget)
    try:
        with tempfile.TemporaryDirectory(prefix="samewise-bench-") as folder:
            repeats = QUICK_REPEATS if arguments.quick else REPEATS
            settings = Settings(Path(folder), arguments.layers, repeats, SERVED)
            chosen = [part for part in PARTS if part.is_quick or not arguments.quick]
            Run(report, settings).measure(chosen, is_strict=arguments.strict)
    finally:
        report.print_table()
    return int(report.has_failures)


if __name__ == "__main__":
    sys.exit(main())
