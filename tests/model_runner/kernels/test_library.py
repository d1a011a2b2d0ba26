"""Loading the library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from model_runner.kernels.build import NoKernelsError
from model_runner.kernels.library import Kernels
from tests.model_runner.kernels.conftest import ISAS


def test_an_unknown_instruction_set_is_refused(kernels_library: Path) -> None:
    with pytest.raises(NoKernelsError, match="cannot run with 1 threads and instruction set avx1024"):
        Kernels(kernels_library, threads=1, isa="avx1024")


def test_auto_takes_the_best_of_those_at_hand(kernels_library: Path) -> None:
    at_hand = []
    for isa in ISAS:
        try:
            at_hand.append(Kernels(kernels_library, threads=1, isa=isa).isa)
        except NoKernelsError:
            continue
    assert at_hand[0] == "portable"
    assert Kernels(kernels_library, threads=1).isa == at_hand[-1]


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_text("no library")
    for name in ("kernels.so", "missing.so"):
        with pytest.raises(NoKernelsError, match="cannot be loaded"):
            Kernels(tmp_path / name, threads=1)


_REFUSED = """
import resource, sys
from pathlib import Path
import torch
from model_runner.kernels.library import Kernels

path, taken = Path(sys.argv[1]), int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (64 << 20), -1))  # the stacks of a few threads
many = Kernels(path, 600)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
rows, weight = torch.randn(40, 64), torch.randn(320, 64)
results = [kernels.linear(kernels.pack("int8", weight), rows) for kernels in (many, Kernels(path, 1))]
print(many.threads, torch.equal(*results))
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer needs address space itself")
def test_where_the_system_makes_no_more_threads_the_kernels_run_in_fewer(kernels_library: Path) -> None:
    """In a process of its own, since it would be that which ends."""
    command = [sys.executable, "-c", _REFUSED, str(kernels_library)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert child.returncode == 0, child.stderr
    threads, is_equal = child.stdout.split()
    assert 1 <= int(threads) < 600
    assert is_equal == "True"
    assert f"refuses to make 600 threads for the CPU kernels, so they run in {threads} " in child.stderr
