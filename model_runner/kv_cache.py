"""The paged KV cache: fixed blocks of keys and values for every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of one token in one layer."""

    num_heads: int
    """Key-value heads."""
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Numbers stored for each token."""
        return self.num_heads * (self.key_dim + self.value_dim)


class KVCache:
    """Keys and values as [num_blocks, kv_heads, block_size, dim] tensors, one pair for each layer.

    A block holds `block_size` consecutive positions of one choice, the first at a multiple of `block_size`. The heads
    stand outside the positions so that a gathered block is a matrix for each head without another copy.
    """

    def __init__(
        self, shapes: Sequence[KVShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = [_zeros((num_blocks, s.num_heads, block_size, s.key_dim), dtype, device) for s in shapes]
        self.values = [_zeros((num_blocks, s.num_heads, block_size, s.value_dim), dtype, device) for s in shapes]

    def write(self, layer: int, key: Tensor, value: Tensor, block_of: Tensor, offset_of: Tensor) -> None:
        """Store key and value [tokens, kv_heads, dim] of each token at its block and offset."""
        self.keys[layer][block_of, :, offset_of] = key
        self.values[layer][block_of, :, offset_of] = value

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in all layers. No destination is also a source."""
        if not copies:
            return
        pairs = torch.tensor(copies, dtype=torch.int64, device=self.keys[0].device)
        source, destination = pairs[:, 0], pairs[:, 1]
        for tensor in (*self.keys, *self.values):
            tensor[destination] = tensor[source]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks that are handed out anew.

        Masked positions are multiplied with a weight of zero, which hides any number but NaN and infinity: without
        this, a computation that went wrong for one request would reach the next one to hold its blocks.
        """
        if not blocks:
            return
        index = torch.tensor(blocks, dtype=torch.int64, device=self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor[index] = 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on CPU from the system's zero pages, which take memory and time only as they are written."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.dtype(str(dtype).removeprefix("torch."))))
    return torch.zeros(shape, dtype=dtype, device=device)
