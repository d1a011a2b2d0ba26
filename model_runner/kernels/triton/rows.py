"""What the kernels that work row by row share."""

import torch
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
