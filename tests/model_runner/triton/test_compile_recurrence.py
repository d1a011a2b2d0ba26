"""The kernels of recurrent layers as machine code for an H200."""  # Short: one check

import pytest

from tests.model_runner.triton.hopper import compiled_in


@pytest.mark.hopper
def test_hardly_anything_is_spilled() -> None:
    compiled = compiled_in("tests.model_runner.triton.compile_recurrence")
    assert sorted(kernel.name for kernel in compiled) == ["_convolve_kernel", *["_recur_kernel"] * 4, "_scan_kernel"]
    for kernel in compiled:
        assert kernel.spilled <= 64, kernel
