"""All that needs a GPU, in one command of under ten minutes: tests, the machine's limits, steps, kernels, serving.

What is most important comes first. Whatever fails is shown and the rest goes on; what there is no time for is named.
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
from bench.on_gpu.report import Figure, SavedReport, left_out
from bench.on_gpu.tests import run_tests
from bench.on_gpu.variants import decode_kind
from server.engine.environment import engine_environment

BUDGET_S = 560.0
"""Ten minutes, less the imports before and what it takes to end."""
TESTS_S, SERVING_S = 220.0, 110.0
"""At most."""
REPEATS, QUICK_REPEATS = 7, 5
CLIENTS = (1, 16, 64, 256)
PROMPT, ANSWER = 128, 128
"""Tokens."""
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
"""The most important first."""


@dataclass(frozen=True, slots=True)
class Run:
    """Runs parts: tests and server have processes of their own, the others share one."""

    report: SavedReport
    settings: Settings

    def measure(self, parts: Sequence[Part], *, is_strict: bool) -> None:
        """All of them, in order; a strict run goes no further than tests that fail."""
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
        """Correctness comes first."""
        return run_tests(min(TESTS_S, self.report.left_s))

    def serving(self) -> Figure:
        """Over HTTP."""
        if missing := [package for package in SERVER_PACKAGES if find_spec(package) is None]:
            return left_out("serving", "", missing)
        from bench.on_gpu.serving import measure_serving  # noqa: PLC0415  (needs those packages)

        plain = {clients: self.report.plain(decode_kind(clients, context)) for clients, context in SERVED.items()}
        limit_s = min(SERVING_S, self.report.left_s)
        return measure_serving(self.settings.folder, plain, (PROMPT, ANSWER), limit_s, self.report.add)


def describe_machine() -> dict[str, str]:
    """With the versions that matter."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES if find_spec(package)},
    }


def main() -> int:
    """Run it all; 1 if anything failed, or if there is no GPU."""
    parser = argparse.ArgumentParser(description="Test and measure all that needs a CUDA GPU.")
    parser.add_argument(
        "--json", type=Path, default=Path("build/gpu.json"), help="every number; %(default)s if left out"
    )
    parser.add_argument("--layers", type=int, default=32, help="of the model, which is else like Llama-3.1-8B")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and only what is most important")
    parser.add_argument("--strict", action="store_true", help="measure nothing if tests fail")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds; %(default).0f if left out")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu measures on a CUDA GPU, and torch finds none here", file=sys.stderr)
        return 1
    os.environ.update(engine_environment())  # of the processes that are started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # with the table
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
