"""Compiles the products for Hopper: each kind of weight, in all shapes of tiles."""

import torch

from model_runner.kernels.triton.linear import (
    FP8,
    Addends,
    ExpertRows,
    Scales,
    expert_sum,
    linear,
    quantize_rows,
    shapes,
)
from model_runner.kernels.triton.linear_int4 import Int4Weight, int4_operands, linear_int4
from model_runner.kernels.triton.tiles import all_shapes
from tests.model_runner.triton.hopper import report

ROWS, OUTPUTS = 256, 512
EXPERTS = 128


def launch() -> None:
    experts = ExpertRows(torch.zeros(EXPERTS + 1, dtype=torch.int32))
    dense(torch.float16, 4096, None)
    fp8(torch.bfloat16, 4096, None)
    int4(torch.bfloat16, 2080, None)  # with a tail of inputs
    dense(torch.bfloat16, 4096, experts)
    dense(torch.float32, 4096, None)
    linear(torch.empty(8, 4096), torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(8, 64))  # a router's
    for dtype in (torch.bfloat16, torch.float32):
        quantize_rows(torch.empty(8, 4096, dtype=dtype), torch.empty(8, 4096, dtype=FP8), torch.empty(8))
        outputs = torch.empty(64, 4096, dtype=dtype)
        expert_sum(outputs, torch.zeros(8, 8, dtype=torch.int64), torch.empty(8, 8), torch.empty(8, 4096, dtype=dtype))


def dense(dtype: torch.dtype, inputs: int, experts: ExpertRows | None) -> None:
    weight = torch.empty(OUTPUTS, inputs, dtype=dtype).expand(1 if experts is None else EXPERTS, -1, -1)
    for shape in shapes(dtype, inputs):
        linear(
            torch.empty(ROWS, inputs, dtype=dtype),
            weight if experts else weight[0],
            torch.empty(ROWS, OUTPUTS, dtype=dtype),
            addends=addends(dtype),
            experts=experts,
            shape=shape,
        )


def fp8(dtype: torch.dtype, inputs: int, experts: ExpertRows | None) -> None:
    weight = torch.empty(OUTPUTS, inputs, dtype=FP8).expand(1 if experts is None else EXPERTS, -1, -1)
    for shape in shapes(FP8, inputs):
        linear(
            torch.empty(ROWS, inputs, dtype=FP8),
            weight if experts else weight[0],
            torch.empty(ROWS, OUTPUTS, dtype=dtype),
            addends=addends(dtype),
            scales=Scales(torch.empty(ROWS), torch.empty(OUTPUTS)),
            experts=experts,
            shape=shape,
        )


def int4(dtype: torch.dtype, inputs: int, experts: ExpertRows | None) -> None:
    group = 128 if inputs % 128 == 0 else 32
    nibbles = torch.empty(inputs // group, OUTPUTS, group // 2, dtype=torch.uint8)
    weight = Int4Weight(nibbles, torch.empty(inputs // group, OUTPUTS, dtype=torch.int32))
    for shape in all_shapes(int4_operands(weight.group), weight.inputs):
        linear_int4(
            torch.empty(ROWS, inputs, dtype=dtype),
            weight,
            torch.empty(ROWS, OUTPUTS, dtype=dtype),
            addends=addends(dtype),
            experts=experts,
            shape=shape,
        )


def addends(dtype: torch.dtype) -> Addends:
    """All that can be added: nothing takes more registers."""
    return Addends(torch.empty(OUTPUTS, dtype=dtype), torch.empty(ROWS, OUTPUTS, dtype=dtype))


if __name__ == "__main__":
    report(launch)
