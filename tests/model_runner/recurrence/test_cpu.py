"""The C++ kernels on every instruction set of this machine: exactness, and the reference's numbers."""

from functools import partial
from pathlib import Path

import pytest
import torch

from model_runner.kernels.build import NoKernelsError
from model_runner.kernels.library import Kernels
from model_runner.recurrence.cpu import NativeRecurrence
from model_runner.recurrence.states import RecurrentShape, ScanShape
from tests.model_runner.kernels.conftest import ISAS
from tests.model_runner.oracles.recurrence import ReferenceRecurrence
from tests.model_runner.recurrence.exactness import LENGTH, ExactnessTests, whole
from tests.model_runner.recurrence.streams import SHAPES, Inputs, MakeBackend


@pytest.fixture(scope="module", params=["portable", "avx2", "auto"])
def make(request: pytest.FixtureRequest, kernels_library: Path) -> MakeBackend:
    """With two threads."""
    try:
        return partial(NativeRecurrence, Kernels(kernels_library, 2, request.param))
    except NoKernelsError:
        pytest.skip(f"this machine has no {request.param}")


class TestNative(ExactnessTests):
    """In C++."""


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_reference_on_every_instruction_set(
    shape: RecurrentShape | ScanShape, kernels_library: Path
) -> None:
    inputs = Inputs.random(shape, LENGTH, 0)
    reference = whole(shape, ReferenceRecurrence, inputs)
    results = []
    for isa in ISAS:
        try:
            kernels = Kernels(kernels_library, 1, isa)
        except NoKernelsError:
            continue
        results.append(whole(shape, partial(NativeRecurrence, kernels), inputs))
    for result in results:
        torch.testing.assert_close(result.recurrent, reference.recurrent, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(result.conv, reference.conv, atol=1e-5, rtol=1e-5)
        assert torch.equal(result.recurrent, results[0].recurrent)
        assert torch.equal(result.conv, results[0].conv)
