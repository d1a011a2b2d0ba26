"""Each token's sum of what its experts made of it."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _expert_sum_kernel(
    outputs_ptr,  # [T * RANKS, H]
    place_ptr,  # [T, RANKS]
    weight_ptr,  # [T, RANKS]
    out_ptr,  # [T, H]
    H,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in range(RANKS):
        row = tl.load(place_ptr + token * RANKS + rank).to(tl.int64)
        weight = tl.load(weight_ptr + token * RANKS + rank).to(tl.float32)
        acc += tl.load(outputs_ptr + row * H + h, mask=h < H, other=0.0).to(tl.float32) * weight
    tl.store(out_ptr + token * H + h, acc.to(out_ptr.dtype.element_ty), mask=h < H)


def expert_sum(outputs: Tensor, places: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Weighted sums in float32, each added in the order of the token's ranks and rounded once.

    Args:
        outputs: [T * k, hidden] contiguous.
        places: [T, k] contiguous integers: the row of `outputs` that is the token's k-th.
        weights: [T, k] contiguous.
        out: [T, hidden] contiguous, receives the sums.

    Returns:
        `out`.
    """
    tokens, hidden = out.shape
    if tokens == 0:
        return out
    block = min(1024, triton.next_power_of_2(hidden))
    _expert_sum_kernel[(tokens, triton.cdiv(hidden, block))](
        outputs, places, weights, out, hidden, RANKS=places.shape[1], BLOCK=block, num_warps=4, enable_fp_fusion=False
    )
    return out
