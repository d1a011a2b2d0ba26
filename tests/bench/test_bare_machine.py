"""A machine with a GPU has torch and Triton, and few other packages: tests and measurements must run there."""

import os
import subprocess
import sys
from pathlib import Path

from bench.on_gpu.tests import NEEDED, PATHS

ROOT = Path(__file__).parents[2]
NEED_THE_SERVER = {"serving", "clients"}
"""Modules of bench/on_gpu that bench.gpu leaves out where its packages are missing."""

_BARE = """
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import distribution, packages_distributions
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

there, left = set(), sys.argv[1].split()
while left:
    name = canonicalize_name(left.pop())
    if name not in there:
        there.add(name)
        requirements = map(Requirement, distribution(name).requires or ())
        left += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
modules, ours = packages_distributions(), {"bench", "model_runner", "scheduler", "server", "tests"}
missing = {name for name, owners in modules.items() if there.isdisjoint(map(canonicalize_name, owners))} - ours
assert {"cffi", "llguidance", "msgspec", "fastapi", "pydantic_settings", "zmq", "uvicorn", "gguf", "scipy"} <= missing

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else super().find_spec(name, path, target)

sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
for name in sys.argv[2].split():
    import_module(name)
missing -= {"cffi", "_cffi_backend", "pycparser"}  # for the CPU, which is in place of the GPU
sys.exit(pytest.main(sys.argv[3:]))
"""


def test_measurements_can_be_imported_and_tests_run() -> None:
    """All tests are collected, and one of them runs, on the CPU here. Without plugins, pytest does not know all that
    pyproject.toml says.
    """
    folder = ROOT / "bench" / "on_gpu"
    measurements = [f"bench.on_gpu.{path.stem}" for path in folder.glob("*.py") if path.stem not in NEED_THE_SERVER]
    which = ["-k", "test_decoding_gives_the_logits_of_the_whole_text and wide"]
    options = ["--gpu-tests-on=cpu", "--override-ini=addopts=-q", "-W", "ignore::pytest.PytestConfigWarning"]
    arguments = [" ".join(NEEDED), " ".join(["bench.gpu", *measurements]), *PATHS, *which, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    child = subprocess.run(
        [sys.executable, "-c", _BARE, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert "1 passed" in child.stdout
