"""Python calls into the CPU kernels of recurrent layers."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.kernels.library import Kernels

_BLOCK = 32
_MOST_INPUTS = 33
"""Inputs of an output of a convolution."""


class NativePlan:
    """An SwStatePlan and the arrays it points into."""

    def __init__(
        self,
        per_token: tuple[np.ndarray, np.ndarray, np.ndarray],
        segments: Sequence[tuple[int, ...]],
        first_segment: Sequence[int],
        anchors: Sequence[int],
        paths: np.ndarray,
        written: Sequence[tuple[int, int]],
        sources: Mapping[int, np.ndarray],
    ) -> None:
        """`per_token` has slots, numbers of rows and order, each [T]; `sources` are by kernel; all else is as
        in SwStatePlan.
        """
        count = len(per_token[0])
        numbers = [*(pointer(array, count) for array in per_token)]
        structs = np.array(segments, dtype=CPU.array_type("SwSegment"))
        pages = np.array(written, dtype=np.int32).reshape(-1, 2).T.copy()
        lists = [np.array(values, dtype=np.int32) for values in (first_segment, anchors)]
        of_kernels = CPU.array("int32_t *", _MOST_INPUTS + 1)
        for kernel, inputs in sources.items():
            of_kernels[kernel] = pointer(inputs, count, kernel - 1)
        self.struct: CData = CPU.new(
            "SwStatePlan",
            (
                count,
                len(anchors),
                len(written),
                *numbers,
                CPU.structs_of("SwSegment", structs),
                *(pointer(values, len(values)) for values in lists),
                pointer(paths, len(paths), _BLOCK),
                *(pointer(column, len(written)) for column in pages),
                of_kernels,
            ),
        )
        self.num_tokens = count
        self._memory = (*per_token, structs, pages, *lists, paths, of_kernels, *sources.values())


def recur(
    kernels: Kernels,
    recurrence: CData,
    plan: NativePlan,
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
) -> Tensor:
    """Run an SwRecurrence on a step's tokens.

    Args:
        kernels: the library.
        recurrence: SwRecurrence.
        plan: of the step.
        rows: query and key [T, key_heads, key_dim], value [T, heads, value_dim], log_decay [T, heads] or
            [T, heads, key_dim], beta [T, heads] or None.

    Returns:
        [T, heads, value_dim].
    """
    query, key, value, log_decay, beta = rows
    count, heads = plan.num_tokens, recurrence.heads
    of_keys = (count, recurrence.key_heads, recurrence.key_dim)
    of_values = (count, heads, recurrence.value_dim)
    of_decays = (count, heads, recurrence.key_dim) if recurrence.per_channel else (count, heads)
    output = torch.empty_like(value)
    kernels.call(
        "sw_recur",
        recurrence,
        plan.struct,
        pointer(query, *of_keys),
        pointer(key, *of_keys),
        pointer(value, *of_values),
        pointer(log_decay, *of_decays),
        CPU.ffi.NULL if beta is None else pointer(beta, count, heads),
        pointer(output, *of_values),
    )
    return output


def scan(
    kernels: Kernels, selective_scan: CData, plan: NativePlan, rows: tuple[Tensor, Tensor, Tensor, Tensor]
) -> Tensor:
    """Run an SwScan on a step's tokens.

    Args:
        kernels: the library.
        selective_scan: SwScan.
        plan: of the step.
        rows: steps and values [T, channels], B and C [T, states].

    Returns:
        [T, channels].
    """
    step, value, b, c = rows
    of_channels = (plan.num_tokens, selective_scan.channels)
    of_states = (plan.num_tokens, selective_scan.num_states)
    output = torch.empty_like(value)
    kernels.call(
        "sw_scan",
        selective_scan,
        plan.struct,
        pointer(step, *of_channels),
        pointer(value, *of_channels),
        pointer(b, *of_states),
        pointer(c, *of_states),
        pointer(output, *of_channels),
    )
    return output


def convolve(kernels: Kernels, convolution: CData, plan: NativePlan, x: Tensor) -> Tensor:
    """Run an SwConvolution on inputs [T, channels]; returns [T, channels]."""
    output, shape = torch.empty_like(x), (plan.num_tokens, convolution.channels)
    kernels.call("sw_convolve", convolution, plan.struct, pointer(x, *shape), pointer(output, *shape))
    return output
