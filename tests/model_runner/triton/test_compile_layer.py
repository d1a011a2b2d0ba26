"""The kernels around a decoder layer's products as machine code for an H200."""

from collections import Counter

import pytest

from tests.model_runner.triton.hopper import compiled_in

LEAST_WIDE = {"_norm_kernel": 3, "_gate_kernel": 3, "_write_kernel": 2, "_rotate_kernel": 3}
"""How many of a kernel's instructions access 16 bytes at once, at the least: what it reads, and writes unless in 8."""


@pytest.mark.hopper
def test_nothing_is_spilled_and_memory_is_accessed_in_wide_pieces() -> None:
    compiled = compiled_in("tests.model_runner.triton.compile_layer")
    assert Counter(kernel.name for kernel in compiled).keys() == LEAST_WIDE.keys()
    for kernel in compiled:
        assert not kernel.spilled, kernel
        assert kernel.wide >= LEAST_WIDE[kernel.name], kernel
