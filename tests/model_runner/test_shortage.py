"""Which errors say that memory ran out."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from model_runner.platforms.memory import oom_reason

HUGE = 1 << 60


def throw(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: torch.empty(HUGE, dtype=torch.int8), "you tried to allocate"),
        (lambda: np.empty(HUGE, dtype=np.int8), "Unable to allocate"),
        (lambda: [0] * HUGE, "no memory left"),
        (lambda: throw(torch.OutOfMemoryError("CUDA out of memory.")), "CUDA out of memory."),
        (lambda: throw(MemoryError("out of memory in sw_linear")), "sw_linear"),
        (
            lambda: throw(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.")),
            "not enough memory",
        ),
        (lambda: throw(RuntimeError("std::bad_alloc")), "bad_alloc"),
    ],
)
def test_memory_that_ran_out_is_known_wherever_it_was(call: Callable[[], object], words: str) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        call()
    assert words in oom_reason(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), NotImplementedError(), ValueError()])
def test_any_other_error_goes_on(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        oom_reason(error)
    assert caught.value is error
