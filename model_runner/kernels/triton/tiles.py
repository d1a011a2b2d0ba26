"""How a product is cut into tiles, one for each program, such that no cut changes a bit of the result.

    out[m, n] = sum over k of rows[m, k] * weight[n, k]

Why tiles of all the shapes below agree. Every tile has at least 64 rows, 4 or 8 warps and 16-bit or 8-bit operands, so
Triton issues Hopper's `wgmma.m64nNk16` (k32 for 8 bits): 64 rows, N outputs. That instruction is a dot product over its
16 (32) inputs for each element of the accumulator alone; N only says for how many elements. A program sends an
element's inputs through it in ascending order, always the whole sum and never a part of it, into the same float32
accumulator that starts at zero. So what an element goes through is a function of K and of the type: not of its place in
a tile, of the tile's shape, or of the number of rows. Rows beyond the last are zeros, and nobody sees their sums.
That every GPU keeps to this is for `tile_shapes_agree` to check where it runs.

There is no split over K: it would need a merge, and the same partial sums in the shapes for long prompts, which have no
registers for them. Where outputs are few, narrow tiles make programs enough instead.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_ALIGNED = 16  # what Triton asks whether pointers, in bytes, and integers are multiples of


def regular_rows(rows: Tensor) -> tuple[Tensor, int]:
    """Rows [n, width] and the distance from one to the next, aligned as their width says, copied if they were not.

    Triton compiles a kernel anew for arguments of another alignment, and then a thread holds other elements and sums
    are added in another order. So the alignment must not depend on which rows there are, or on how many: the stride of
    a single row may be any number.
    """
    width = rows.shape[1]
    stride = rows.stride(0) if len(rows) > 1 else width
    is_regular = (stride % _ALIGNED == 0) == (width % _ALIGNED == 0)
    if rows.stride(1) != 1 or rows.data_ptr() % _ALIGNED or not is_regular:
        return rows.clone(memory_format=torch.contiguous_format), width
    return rows, stride


MULTIPROCESSORS = 132
"""Of an H100 or H200. Only speed depends on it."""
_SHARED_MEMORY = 200 << 10
"""Of the 227 KiB of a multiprocessor, what the pipelines of its programs take; the rest is for results on their way."""
_ENOUGH_PROGRAMS = 128
"""Of 132: what keeps the machine busy. A matrix of 4096 outputs has as many tiles of 32."""
GROUP_ROWS = 8
"""Tiles of rows that neighbouring programs share: 8 by about 16 tiles of 128 x 256 run at once and read 5 MB for each
64 inputs' worth of 48 KiB each, most of it from the L2 cache."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """What one program computes."""

    rows: int
    outputs: int
    inputs: int
    """In one step of its loop."""
    warps: int
    stages: int
    """Steps whose operands are in shared memory or on their way there."""

    def launch_options(self, experts: int | None) -> dict[str, int | bool]:
        """What the kernels of products take of it, for so many experts' weights or one.

        Without fused multiplication and addition: what comes after the sum rounds alike in every shape.
        """
        return {
            "EXPERTS": 0 if experts is None else triton.next_power_of_2(experts),
            "ROWS": self.rows,
            "OUTPUTS": self.outputs,
            "INPUTS": self.inputs,
            "GROUP": GROUP_ROWS,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": False,
        }


@dataclass(frozen=True, slots=True)
class Operands:
    """What decides how large the tiles and the steps of a program are."""

    row_bytes: float
    """Of one number of the rows."""
    weight_bytes: float
    """Of one weight, as stored."""
    inputs: int | None = None
    """In a step, where the kind of weight fixes them."""
    widest: int = 256
    """Outputs of a tile at most, for which registers suffice."""


_SHAPES = ((128, 256, 8), (128, 128, 8), (64, 128, 4), (64, 64, 4), (64, 32, 4))
"""Rows, outputs, warps; from what has the most arithmetic for each byte read, to what makes the most programs.

128 x 256 reads 48 KiB for 4.2 MFLOP, 85 a byte, and wgmma reads 80 bytes of shared memory a cycle of its 128: it stays
at the matrix rate. 128 accumulators a thread leave no room for a larger one.
64 x 32 streams: of 24 KiB a step, 8 are weights, so that 7 steps in flight on each of 128 multiprocessors are 7 MiB,
twice what 4.3 TB/s and a latency of 0.8 us keep on their way. The arithmetic of 64 rows, of which one may be wanted,
takes a third of the time that the weights take to arrive.
"""
_DEEPEST = 16


def choose_shape(operands: Operands, num_rows: int, outputs: int, inputs: int, experts: int = 1) -> TileShape:
    """The largest shape that makes programs enough.

    Args:
        operands: kinds of rows and weights.
        num_rows: of all experts.
        outputs: of one expert.
        inputs: of one expert.
        experts: that share the rows.
    """
    crowded = num_rows > 64 * experts
    for rows, wide, warps in _SHAPES:
        programs = row_tiles(num_rows, experts, rows) * -(-outputs // wide)
        fits = wide <= operands.widest and (crowded or rows == 64)
        if (fits and programs >= _ENOUGH_PROGRAMS) or (rows, wide, warps) == _SHAPES[-1]:
            break
    return _cut(operands, (rows, wide, warps), inputs, programs)


def all_shapes(operands: Operands, inputs: int) -> list[TileShape]:
    """Every shape that `choose_shape` can choose, each with the most stages."""
    return [_cut(operands, shape, inputs, 1) for shape in _SHAPES if shape[1] <= operands.widest]


def _cut(operands: Operands, shape: tuple[int, int, int], inputs: int, programs: int) -> TileShape:
    rows, wide, warps = shape
    # 16-bit inputs go by 128 where tiles are small, so that steps are fewer, but only if that makes the same sums.
    step = operands.inputs or (128 if wide <= 64 and inputs % 128 == 0 else 64)
    step_bytes = step * (rows * operands.row_bytes + wide * operands.weight_bytes)
    # Two programs share a multiprocessor, if there are so many and they have registers for that.
    alone = warps == 8 or programs <= MULTIPROCESSORS
    stages = int((_SHARED_MEMORY if alone else _SHARED_MEMORY // 2) // step_bytes)
    return TileShape(rows, wide, step, warps, max(2, min(stages, _DEEPEST)))


def row_tiles(num_rows: int, experts: int, rows: int) -> int:
    """Tiles of rows at most, however the rows are shared out among the experts; exact for one expert."""
    return min(num_rows, (num_rows + experts * (rows - 1)) // rows)


@triton.jit
def place(num_row_tiles, num_output_tiles, GROUP_ROWS: tl.constexpr):
    """The tile of rows and the tile of outputs of this program, such that neighbours share what they read."""
    program = tl.program_id(0)
    in_group = GROUP_ROWS * num_output_tiles
    first = program // in_group * GROUP_ROWS
    height = tl.minimum(num_row_tiles - first, GROUP_ROWS)
    return first + program % in_group % height, program % in_group // height


@triton.jit
def rows_of_tile(tile, num_rows, starts_ptr, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a tile of rows, the tile's first row, and the end of the expert's rows.

    Rows are sorted by expert; `starts_ptr` says where each expert's begin, and where all end. EXPERTS is num_experts
    rounded up to a power of two, or 0 for one expert that has all rows. A tile beyond the last has no rows.
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
