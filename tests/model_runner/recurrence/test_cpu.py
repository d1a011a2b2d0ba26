"""The C++ kernels on every instruction set of this machine: exactness, and the reference's numbers."""

from functools import partial
from pathlib import Path

import pytest
import torch

from model_runner.kernels.library import Kernels
from model_runner.recurrence.backend import RecurrentShape
from model_runner.recurrence.cpu import NativeRecurrence
from model_runner.recurrence.reference import ReferenceRecurrence
from tests.model_runner.kernels.conftest import kernels  # noqa: F401  (a fixture)
from tests.model_runner.recurrence.exactness import LENGTH, ExactnessTests, whole
from tests.model_runner.recurrence.streams import SHAPES, Inputs, MakeBackend


@pytest.fixture(scope="module")
def make(kernels: Kernels) -> MakeBackend:  # noqa: F811
    return partial(NativeRecurrence, kernels)


class TestNative(ExactnessTests):
    """In C++."""


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_reference_and_other_instruction_sets(
    shape: RecurrentShape, make: MakeBackend, kernels_library: Path
) -> None:
    inputs = Inputs.random(shape, LENGTH, 0)
    output, reference = whole(shape, make, inputs), whole(shape, ReferenceRecurrence, inputs)
    portable = whole(shape, partial(NativeRecurrence, Kernels(kernels_library, 1, "portable")), inputs)
    for ours, theirs, others in (
        (output.recurrent, reference.recurrent, portable.recurrent),
        (output.conv, reference.conv, portable.conv),
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert torch.equal(ours, others)
