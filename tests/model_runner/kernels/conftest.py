"""The kernels on each instruction set that this machine has."""

import contextlib
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


@pytest.fixture(scope="session")
def all_kernels(kernels_library: Path) -> list[Kernels]:
    """The same for all of them at once, for tests whose expectation takes longer than the kernels."""
    made = []
    for isa in ISAS:
        with contextlib.suppress(NoKernelsError):
            made.append(Kernels(kernels_library, threads=2, isa=isa))
    return made
