"""The tests that need a GPU, in a process of their own."""

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
"""Not all of tests/: elsewhere are imports of packages that a machine for measuring need not have."""
NEEDED = ("torch", "triton", "transformers", "accelerate", "safetensors", "numpy", "pytest")
"""Packages that the machine must have, and what these require, for all but measurements of the server."""
_PROCESSES = 14
"""Where pytest can share tests out: most of the time goes by in compiling kernels, on one core each."""
_NAMED = 5
_GRACE_S = 40.0
"""For pytest to write its results: xdist waits 10 s for its processes and execnet 15 s more, before that."""
_GONE_S = 10.0


def run_tests(limit_s: float) -> Figure:
    """Run them for at most so many seconds; their output goes where ours goes. Those that ended in time count."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        is_done = run_limited([*command(), f"--junit-xml={results}"], limit_s)
        if not results.exists():
            return Figure("tests", "-m gpu", note="FAILED: pytest left no results, see above", is_failure=True)
        found = summary(results.read_text(encoding="utf-8"))
    if is_done:
        return found
    return replace(found, note=f"FAILED: ended after {limit_s:.0f} s; {found.note}", is_failure=True)


def run_limited(program: Sequence[str], limit_s: float) -> bool:
    """Run it in the repository. Returns whether it ended by itself in so many seconds; else it is interrupted.

    In any case it is gone then, and all that it has started: what is measured next has the machine to itself.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    # What a shell starts in the background ignores interrupts, and so would all that it starts in turn.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(program, cwd=ROOT, env=environment, start_new_session=True)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it writes what it has
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        return False
    finally:
        _end_all(process)
    return True


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Of the process's session, and wait until they are gone."""
    ends_at = time.perf_counter() + _GONE_S
    with contextlib.suppress(ProcessLookupError):
        while time.perf_counter() < ends_at:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.05)


def command() -> list[str]:
    """Without the plugins of pyproject.toml that are not installed: none of these tests needs them.

    A file that cannot be imported costs its own tests alone; a warning, which other versions may have, costs none.
    """
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", *PATHS, "--tb=short", "-W", "default"]
    pytest.append("--continue-on-collection-errors")
    if find_spec("xdist") is not None:
        pytest += ["-n", str(_PROCESSES), "--dist", "worksteal"]
    if find_spec("pytest_asyncio") is None or find_spec("pytest_timeout") is None:
        pytest += ["--override-ini=addopts=-q --strict-markers", "-W", "ignore::pytest.PytestConfigWarning"]
    return pytest


def summary(junit: str) -> Figure:
    """Counts, and the first names of what failed, from pytest's XML.

    A test after which its process was ended is in there twice.
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
