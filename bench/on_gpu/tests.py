"""Runs the tests that need a GPU in a separate process."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from bench.on_gpu.report import Figure

ROOT = Path(__file__).parents[2]
PATHS = ("tests/gpu", "tests/model_runner/triton", "tests/model_runner/test_row_sums.py")
"""Folders with GPU tests. Other tests import packages that the measured machine may lack."""
NEEDED = ("torch", "triton", "transformers", "accelerate", "safetensors", "numpy", "pytest")
"""Packages that the machine must have (with their requirements) for everything except serving."""
_PROCESSES = 14
"""Test processes if xdist is installed: most of the time is spent compiling kernels, on one core each."""
_NAMED = 5
_GRACE_S = 40.0
"""Time for pytest to write its results after an interrupt: xdist waits 10 s for its processes and execnet 15 s more."""
_GONE_S = 10.0


def run_tests(limit_s: float) -> Figure:
    """Run the tests for at most `limit_s` seconds; tests that end in time are counted. Their output is shown."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        is_done = run_limited([*command(), f"--junit-xml={results}"], limit_s)
        if not results.exists():
            return Figure("tests", "-m gpu", note="FAILED: pytest wrote no results, see its output", is_failure=True)
        found = summary(results.read_text(encoding="utf-8"))
    if is_done:
        return found
    return replace(found, note=f"FAILED: stopped after {limit_s:.0f} s; {found.note}", is_failure=True)


def run_limited(program: Sequence[str], limit_s: float) -> bool:
    """Run a program in the repository and interrupt it after `limit_s` seconds; returns whether it ended before that.

    Kills the program and all its children at the end, so that they do not disturb later measurements.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    # Shells start background programs with interrupts ignored, which child processes would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(program, cwd=ROOT, env=environment, start_new_session=True)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then writes its results
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        return False
    finally:
        _end_all(process)
    return True


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of the session, and wait until they are gone."""
    ends_at = time.perf_counter() + _GONE_S
    with contextlib.suppress(ProcessLookupError):
        while time.perf_counter() < ends_at:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.05)


def command() -> list[str]:
    """The pytest command, without plugins from pyproject.toml that are not installed; these tests do not need them.

    A file that cannot be imported fails only its own tests, and warnings, which depend on versions, fail none.
    """
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", *PATHS, "--tb=short", "-W", "default"]
    pytest.append("--continue-on-collection-errors")
    if find_spec("xdist") is not None:
        pytest += ["-n", str(_PROCESSES), "--dist", "worksteal"]
    if find_spec("pytest_asyncio") is None or find_spec("pytest_timeout") is None:
        pytest += ["--override-ini=addopts=-q --strict-markers", "-W", "ignore::pytest.PytestConfigWarning"]
    return pytest


def summary(junit: str) -> Figure:
    """Summarise pytest's XML: counts, and the names of the first failed tests.

    A test that crashed its process is listed twice in the XML, but counted once.
    """
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    names = [f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}" for case in cases]
    failed = list(dict.fromkeys(name for name, case in zip(names, cases, strict=True) if _has_failed(case)))
    skipped = sum(case.find("skipped") is not None for case in cases)
    total = len(set(names))
    note = f"{total - len(failed) - skipped} passed, {skipped} skipped"
    if failed:
        rest = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
        note = f"{len(failed)} FAILED, {note}: {', '.join(failed[:_NAMED])}{rest}"
    is_failure = bool(failed) or total == skipped
    return Figure("tests", "-m gpu", total, "tests", note=note, is_failure=is_failure, details={"failed": failed})


def _has_failed(case: ElementTree.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None
