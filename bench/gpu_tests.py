"""The tests that need a GPU, in a process of their own."""

import contextlib
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu_report import Figure

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests/gpu", "tests/model_runner/triton")
"""Not all of tests/: elsewhere are imports of packages that a machine for measuring need not have."""
_PROCESSES = 8
"""That share the files, where pytest can do that: most of the time goes by in compiling kernels, on one core each."""
_NAMED = 5
_GRACE_S = 10.0


def run_tests(limit_s: float) -> Figure:
    """Run them for at most so many seconds; their output goes where ours goes. Those that ended in time count."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        with subprocess.Popen([*command(), f"--junit-xml={results}"], cwd=ROOT) as process:
            is_done = _ends(process, limit_s)
        if not results.exists():
            return Figure("tests", "-m gpu", note="FAILED: pytest left no results, see above", is_failure=True)
        found = summary(results.read_text(encoding="utf-8"))
    if is_done:
        return found
    return replace(found, note=f"FAILED: ended after {limit_s:.0f} s; {found.note}", is_failure=True)


def _ends(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether it does so by itself. Else it is interrupted, so that it writes what it has, and then killed."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        process.kill()
        return False
    return True


def command() -> list[str]:
    """Without the plugins of pyproject.toml that are not installed: none of these tests needs them.

    A file that cannot be imported costs its own tests alone; a warning, which other versions may have, costs none.
    """
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", *FOLDERS, "--tb=short", "-W", "default"]
    pytest.append("--continue-on-collection-errors")
    if find_spec("xdist") is not None:
        pytest += ["-n", str(_PROCESSES), "--dist", "loadfile"]
    if find_spec("pytest_asyncio") is None or find_spec("pytest_timeout") is None:
        pytest += ["--override-ini=addopts=-q --strict-markers", "-W", "ignore::pytest.PytestConfigWarning"]
    return pytest


def summary(junit: str) -> Figure:
    """Counts, and the first names of what failed, from pytest's XML."""
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}" for case in failed]
    note = f"{len(cases) - len(failed) - skipped} passed, {skipped} skipped"
    if failed:
        rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        note = f"{len(failed)} FAILED, {note}: {', '.join(names[:_NAMED])}{rest}"
    has_failed = bool(failed) or len(cases) == skipped
    return Figure("tests", "-m gpu", len(cases), "tests", note=note, is_failure=has_failed, details={"failed": names})
