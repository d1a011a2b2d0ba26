"""Tiling of matrix products, one tile per program, such that no tiling changes a bit of the result.

    out[m, n] = sum over k of rows[m, k] * weight[n, k]

Why all tile shapes below agree: every tile has at least 64 rows, 4 or 8 warps and 16-bit or 8-bit operands, so Triton
issues Hopper's `wgmma.m64nNk16` (k32 for 8 bits), with 64 rows and N outputs. For each element of the accumulator, that
instruction is a dot product over its 16 (32) inputs; N only says how many elements there are. A program feeds each
element's inputs in ascending order into one float32 accumulator that starts at zero, and never a part of the sum alone.
So an element's arithmetic depends only on K and the type, not on its place in a tile, the tile's shape, or the number
of rows. Padding rows are zeros, and their sums are not stored.

The tile for up to 16 rows is the exception: its operands change places. 64 outputs are the instruction's rows, and the
16 rows its N, so that 48 rows of zeros need not be read and multiplied. The inputs of an element stay the same, in the
same order. On an H200 all shapes gave the same bits, in bfloat16, fp8 and int4.

`tile_shapes_agree` checks all shapes on the actual GPU.

There is no split over K. It would need a merge, and the same partial sums in the shapes for long prompts, which have no
registers for them. Where outputs are few, narrow tiles provide enough programs instead.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_ALIGNED = 16  # Triton specialises on divisibility of pointers (bytes) and integers by this


def regular_rows(rows: Tensor) -> tuple[Tensor, int]:
    """Rows [n, width] and their stride, copied unless their alignment follows from the width.

    Triton recompiles a kernel for arguments with another alignment; threads then hold other elements and sums are added
    in another order. So alignment must not depend on which rows there are, or how many. The stride of a single row may
    be any number.
    """
    width = rows.shape[1]
    stride = rows.stride(0) if len(rows) > 1 else width
    is_regular = (stride % _ALIGNED == 0) == (width % _ALIGNED == 0)
    if rows.stride(1) != 1 or rows.data_ptr() % _ALIGNED or not is_regular:
        return rows.clone(memory_format=torch.contiguous_format), width
    return rows, stride


MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200. Affects only speed."""
_SHARED_MEMORY = 200 << 10
"""Shared memory for pipelines, of the 227 KiB per multiprocessor. The rest is for results being stored."""
_ENOUGH_PROGRAMS = 128
"""Programs that keep a machine of 132 multiprocessors busy. A matrix of 4096 outputs has as many tiles of 32."""
GROUP_ROWS = 8
"""Row tiles that neighbouring programs share.

8 by about 16 tiles of 128 x 256 run at once. They read 48 KiB each per 64 inputs, 5 MB in all, mostly from L2."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """Tile shape and pipeline of one program."""

    rows: int
    outputs: int
    inputs: int
    """Inputs per step of the program's loop."""
    warps: int
    stages: int
    """Steps whose operands are in shared memory or in flight."""
    is_swapped: bool = False
    """Whether outputs are the first dimension of the products."""

    def launch_options(self, experts: int | None) -> dict[str, int | bool]:
        """Launch arguments of the product kernels, for this many experts' weights or for a single weight.

        Fused multiply-add is off, so that arithmetic after the sum rounds alike in every shape.
        """
        return {
            "EXPERTS": 0 if experts is None else triton.next_power_of_2(experts),
            "ROWS": self.rows,
            "OUTPUTS": self.outputs,
            "INPUTS": self.inputs,
            "GROUP": GROUP_ROWS,
            "SWAPPED": self.is_swapped,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": False,
        }


@dataclass(frozen=True, slots=True)
class Operands:
    """Operand sizes that determine tiles and steps."""

    row_bytes: float
    """Bytes per row value."""
    weight_bytes: float
    """Bytes per weight, as stored."""
    inputs: int | None = None
    """Inputs per step, if the kind of weight fixes them."""
    widest: int = 256
    """Maximum number of outputs of a tile, limited by registers."""
    deepest_of_few: int = 16
    """Maximum number of stages of a tile with few rows. Fewer leave room for more programs on a multiprocessor."""
    programs_of_few: int = 1
    """Minimum number of programs for tiles with few rows."""


_FEW = (16, 64, 4)
_SHAPES = ((128, 256, 8), (128, 128, 8), (64, 128, 4), (64, 64, 4), (64, 32, 4))
"""(rows, outputs, warps), from the most arithmetic per byte read to the most programs.

128 x 256 reads 48 KiB for 4.2 MFLOP, 85 per byte. wgmma reads 80 of 128 bytes of shared memory per cycle, so it runs at
the matrix rate. A larger tile does not fit: a thread has 128 accumulators already.

64 x 32 streams weights: 8 of 24 KiB per step. With 7 steps in flight on each of 128 multiprocessors that is 7 MiB,
twice the 4.3 TB/s times 0.8 us of latency. Arithmetic on 64 rows, of which perhaps one is needed, takes a third of the
time that the weights take to arrive.

_FEW (16 x 64, swapped) took 0 to 18 % less time than these for one row of bfloat16 on an H200."""
_DEEPEST = 16


def choose_shape(operands: Operands, num_rows: int, outputs: int, inputs: int, experts: int = 1) -> TileShape:
    """The largest shape that gives enough programs.

    Args:
        operands: sizes of rows and weights.
        num_rows: of all experts together.
        outputs: of one expert.
        inputs: of one expert.
        experts: number of experts that share the rows.
    """
    programs = row_tiles(num_rows, experts, _FEW[0]) * -(-outputs // _FEW[1])
    if num_rows <= _FEW[0] * experts and programs >= operands.programs_of_few:
        return _cut(operands, _FEW, inputs, programs)
    crowded = num_rows > 64 * experts
    for rows, wide, warps in _SHAPES:
        programs = row_tiles(num_rows, experts, rows) * -(-outputs // wide)
        fits = wide <= operands.widest and (crowded or rows == 64)
        if (fits and programs >= _ENOUGH_PROGRAMS) or (rows, wide, warps) == _SHAPES[-1]:
            break
    return _cut(operands, (rows, wide, warps), inputs, programs)


def all_shapes(operands: Operands, inputs: int) -> list[TileShape]:
    """Every shape that `choose_shape` may return, each with the maximum number of stages."""
    return [_cut(operands, shape, inputs, 1) for shape in (*_SHAPES, _FEW) if shape[1] <= operands.widest]


def _cut(operands: Operands, shape: tuple[int, int, int], inputs: int, programs: int) -> TileShape:
    rows, wide, warps = shape
    # Small tiles take 128 16-bit inputs per step, to have fewer steps, but only where that gives the same sums.
    step = operands.inputs or (128 if wide <= 64 and inputs % 128 == 0 else 64)
    step_bytes = step * (rows * operands.row_bytes + wide * operands.weight_bytes)
    # Two programs share a multiprocessor if there are enough programs and registers.
    alone = warps == 8 or programs <= MULTIPROCESSORS
    stages = int((_SHARED_MEMORY if alone else _SHARED_MEMORY // 2) // step_bytes)
    deepest = operands.deepest_of_few if rows == _FEW[0] else _DEEPEST
    return TileShape(rows, wide, step, warps, max(2, min(stages, deepest)), is_swapped=rows == _FEW[0])


def row_tiles(num_rows: int, experts: int, rows: int) -> int:
    """Maximum number of row tiles, however rows are distributed over experts; exact for one expert."""
    return min(num_rows, (num_rows + experts * (rows - 1)) // rows)


@triton.jit
def place(num_row_tiles, num_output_tiles, GROUP_ROWS: tl.constexpr):
    """Row tile and output tile of this program, ordered so that neighbours share what they read."""
    program = tl.program_id(0)
    in_group = GROUP_ROWS * num_output_tiles
    first = program // in_group * GROUP_ROWS
    height = tl.minimum(num_row_tiles - first, GROUP_ROWS)
    return first + program % in_group % height, program % in_group // height


@triton.jit
def rows_of_tile(tile, num_rows, starts_ptr, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a row tile, the tile's first row, and the end of the expert's rows.

    Rows are sorted by expert; `starts_ptr` [num_experts + 1] has each expert's first row and the total. EXPERTS is
    num_experts rounded up to a power of two, or 0 for a single expert with all rows. Tiles beyond the last have no
    rows.
    """
    if EXPERTS == 0:
        expert = 0
        first = tile * ROWS
        end = num_rows
    else:
        experts = tl.arange(0, EXPERTS)
        exists = experts < num_experts
        begin = tl.load(starts_ptr + experts, mask=exists, other=0)
        count = tl.load(starts_ptr + experts + 1, mask=exists, other=0) - begin
        tile_ends = tl.cumsum((count + ROWS - 1) // ROWS, 0)
        before = (tile_ends <= tile) & exists
        expert = tl.sum(before.to(tl.int32), 0)
        first_tile = tl.max(tl.where(before, tile_ends, 0), 0)
        mine = experts == expert
        first = tl.sum(tl.where(mine, begin, 0), 0) + (tile - first_tile) * ROWS
        end = tl.sum(tl.where(mine, begin + count, 0), 0)
    return expert, first, end


@triton.jit
def add_product(acc, x, w, SWAPPED: tl.constexpr, PROMOTE: tl.constexpr):
    """Sums [ROWS, OUTPUTS] plus x [ROWS, INPUTS] @ w^T [INPUTS, OUTPUTS]; SWAPPED: the transpose of all that."""
    if SWAPPED:
        x, w = w, x
    return tl.dot(x, tl.trans(w), acc, input_precision="ieee", max_num_imprecise_acc=PROMOTE)
