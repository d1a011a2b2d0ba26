"""How keys and values stand in the memory of a paged cache."""

from typing import Protocol

import torch
from torch import Tensor


class KVLayout(Protocol):
    """Reads and writes the tensors of one layer.

    A place is named by its block and its offset therein, which are of any one shape [..].
    """

    def key_shape(self, kv_heads: int, key_dim: int, block_size: int) -> tuple[int, ...]:
        """Of a block's keys."""

    def value_shape(self, kv_heads: int, value_dim: int, block_size: int) -> tuple[int, ...]:
        """Of a block's values."""

    def put_keys(self, keys: Tensor, block: Tensor, offset: Tensor, new: Tensor) -> None:
        """Store new [.., kv_heads, key_dim] at places [..]."""

    def put_values(self, values: Tensor, block: Tensor, offset: Tensor, new: Tensor) -> None:
        """Store new [.., kv_heads, value_dim] at places [..]."""

    def keys_at(self, keys: Tensor, block: Tensor, offset: Tensor) -> Tensor:
        """[.., kv_heads, key_dim or more] of places [..]: all that is stored of a key."""

    def values_at(self, values: Tensor, block: Tensor, offset: Tensor) -> Tensor:
        """[.., kv_heads, value_dim] of places [..]."""

    def keys_of(self, keys: Tensor, blocks: Tensor, key_dim: int) -> Tensor:
        """[n, kv_heads, key_dim, block_size] of n blocks."""

    def values_of(self, values: Tensor, blocks: Tensor) -> Tensor:
        """[n, kv_heads, block_size, value_dim] of n blocks."""


class SingleNumbers:
    """Keys [.., kv_heads, key_dim, block_size] and values [.., kv_heads, block_size, value_dim]."""

    def key_shape(self, kv_heads: int, key_dim: int, block_size: int) -> tuple[int, ...]:
        """See KVLayout."""
        return kv_heads, key_dim, block_size

    def value_shape(self, kv_heads: int, value_dim: int, block_size: int) -> tuple[int, ...]:
        """See KVLayout."""
        return kv_heads, block_size, value_dim

    def put_keys(self, keys: Tensor, block: Tensor, offset: Tensor, new: Tensor) -> None:
        """See KVLayout."""
        keys[block, :, :, offset] = new

    def put_values(self, values: Tensor, block: Tensor, offset: Tensor, new: Tensor) -> None:
        """See KVLayout."""
        values[block, :, offset] = new

    def keys_at(self, keys: Tensor, block: Tensor, offset: Tensor) -> Tensor:
        """See KVLayout."""
        return keys[block, :, :, offset]

    def values_at(self, values: Tensor, block: Tensor, offset: Tensor) -> Tensor:
        """See KVLayout."""
        return values[block, :, offset]

    def keys_of(self, keys: Tensor, blocks: Tensor, key_dim: int) -> Tensor:
        """See KVLayout."""
        return keys.index_select(0, blocks)

    def values_of(self, values: Tensor, blocks: Tensor) -> Tensor:
        """See KVLayout."""
        return values.index_select(0, blocks)


class Couples:
    """Couples of a key's dimensions and of a value's places, as cpu/bfloat16.h multiplies them.

    Keys [.., kv_heads, key_dim / 2, block_size, 2], with zeros if key_dim is odd, and values
    [.., kv_heads, block_size / 2, value_dim, 2].
    """

    def key_shape(self, kv_heads: int, key_dim: int, block_size: int) -> tuple[int, ...]:
        """See KVLayout."""
        return kv_heads, -(-key_dim // 2), block_size, 2

    def value_shape(self, kv_heads: int, value_dim: int, block_size: int) -> tuple[int, ...]:
        """See KVLayout. The block size is even."""
        return kv_heads, block_size // 2, value_dim, 2

    def put_keys(self, keys: Tensor, block: Tensor, offset: Tensor, new: Tensor) -> None:
        """See KVLayout."""
        whole = torch.nn.functional.pad(new, (0, new.shape[-1] % 2))
        keys[block, :, :, offset] = whole.reshape(*whole.shape[:-1], -1, 2)

    def put_values(self, values: Tensor, block: Tensor, offset: Tensor, new: Tensor) -> None:
        """See KVLayout."""
        values[block, :, offset // 2, :, offset % 2] = new

    def keys_at(self, keys: Tensor, block: Tensor, offset: Tensor) -> Tensor:
        """See KVLayout."""
        return keys[block, :, :, offset].flatten(-2)

    def values_at(self, values: Tensor, block: Tensor, offset: Tensor) -> Tensor:
        """See KVLayout."""
        return values[block, :, offset // 2, :, offset % 2]

    def keys_of(self, keys: Tensor, blocks: Tensor, key_dim: int) -> Tensor:
        """See KVLayout."""
        return keys.index_select(0, blocks).transpose(3, 4).flatten(2, 3)[:, :, :key_dim].contiguous()

    def values_of(self, values: Tensor, blocks: Tensor) -> Tensor:
        """See KVLayout."""
        return values.index_select(0, blocks).transpose(3, 4).flatten(2, 3)
