"""Sums of rows that do not depend on how many rows there are."""

from torch import Tensor


def row_sums(values: Tensor) -> Tensor:
    """[n, 1] of values [n, width].

    Not by torch's sum: given a single long row, it splits the row among threads and rounds differently than in a batch.
    """
    return values.cumsum(-1)[:, -1:]
