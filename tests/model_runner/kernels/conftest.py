"""The kernels on each instruction set that this machine has."""

from pathlib import Path

import pytest

from model_runner.kernels.build import NoKernelsError
from model_runner.kernels.library import Kernels

ISAS = ("portable", "avx2", "avx512vnni", "avx512bf16")


@pytest.fixture(scope="session", params=ISAS)
def kernels(request: pytest.FixtureRequest, kernels_library: Path) -> Kernels:
    """With two threads."""
    try:
        return Kernels(kernels_library, threads=2, isa=request.param)
    except NoKernelsError:
        if request.param == "portable":
            raise
        pytest.skip(f"this machine has no {request.param}")
