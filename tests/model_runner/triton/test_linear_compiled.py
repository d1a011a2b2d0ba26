"""The products on an H200, as far as its compiler tells."""

import pytest

from tests.model_runner.triton.hopper import compiled_in


@pytest.mark.hopper
def test_nothing_spills_and_all_fits() -> None:
    compiled = compiled_in("tests.model_runner.triton.compile_linear")
    assert {kernel.name for kernel in compiled} == {
        "_linear_kernel", "_int4_kernel", "_quantize_kernel", "_expert_sum_kernel"
    }  # fmt: skip
    assert len(compiled) > 20
    assert [kernel for kernel in compiled if kernel.spilled] == []
    # Steps in flight are what hides the latency of memory: dense tiles must have the 8 that they are chosen for.
    assert sum(kernel.shared == 192 << 10 for kernel in compiled if kernel.name == "_linear_kernel") > 10
