"""Paged KV cache: keys and values of every layer in blocks of fixed size."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.config import KVCacheDType
from model_runner.contract import BlockCopy, CacheGroup
from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.kernels.library import Kernels
from model_runner.kernels.memory import Arena


class KVLayout:
    """Memory layout of one layer's keys [.., kv_heads, key_dim, block_size] and values.

    Values are [.., kv_heads, block_size, value_dim]. A place is a block and an offset in it; both are tensors of the
    same shape [..].
    """

    def key_shape(self, kv_heads: int, key_dim: int, block_size: int) -> tuple[int, ...]:
        """Shape of a block's keys."""
        return kv_heads, key_dim, block_size

    def value_shape(self, kv_heads: int, value_dim: int, block_size: int) -> tuple[int, ...]:
        """Shape of a block's values."""
        return kv_heads, block_size, value_dim

    def put_keys(self, keys: Tensor, block: Tensor, offset: Tensor, new: Tensor) -> None:
        """Store new [.., kv_heads, key_dim] at places [..]."""
        keys[block, :, :, offset] = new

    def put_values(self, values: Tensor, block: Tensor, offset: Tensor, new: Tensor) -> None:
        """Store new [.., kv_heads, value_dim] at places [..]."""
        values[block, :, offset] = new

    def keys_at(self, keys: Tensor, block: Tensor, offset: Tensor) -> Tensor:
        """[.., kv_heads, key_dim or more] of places [..]: the stored key, with padding if there is any."""
        return keys[block, :, :, offset]

    def values_at(self, values: Tensor, block: Tensor, offset: Tensor) -> Tensor:
        """[.., kv_heads, value_dim] of places [..]."""
        return values[block, :, offset]


class Bf16Pairs(KVLayout):
    """Keys in pairs of dimensions and values in pairs of positions, as cpu/half_precision.h multiplies them.

    Keys [.., kv_heads, key_dim / 2, block_size, 2], zero-padded if key_dim is odd; values
    [.., kv_heads, block_size / 2, value_dim, 2].
    """

    def key_shape(self, kv_heads: int, key_dim: int, block_size: int) -> tuple[int, ...]:
        return kv_heads, -(-key_dim // 2), block_size, 2

    def value_shape(self, kv_heads: int, value_dim: int, block_size: int) -> tuple[int, ...]:
        """Shape of a block's values. The block size is even."""
        return kv_heads, block_size // 2, value_dim, 2

    def put_keys(self, keys: Tensor, block: Tensor, offset: Tensor, new: Tensor) -> None:
        whole = torch.nn.functional.pad(new, (0, new.shape[-1] % 2))
        keys[block, :, :, offset] = whole.reshape(*whole.shape[:-1], -1, 2)

    def put_values(self, values: Tensor, block: Tensor, offset: Tensor, new: Tensor) -> None:
        values[block, :, offset // 2, :, offset % 2] = new

    def keys_at(self, keys: Tensor, block: Tensor, offset: Tensor) -> Tensor:
        return keys[block, :, :, offset].flatten(-2)

    def values_at(self, values: Tensor, block: Tensor, offset: Tensor) -> Tensor:
        return values[block, :, offset // 2, :, offset % 2]


LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Types that are stored with scales, and the value that a vector's largest magnitude is scaled to."""

_SMALLEST = 1e-30
"""Vectors whose magnitudes are all smaller are stored as zeros: 448 / x must be finite."""

_TINY = 2.0**-56
"""Smaller numbers are stored as zero in pairs, so that no sum of products is subnormal (see cpu/half_precision.h)."""

_NATIVE_TYPES = {torch.float32: "SW_KV_FLOAT32", torch.bfloat16: "SW_KV_BFLOAT16", torch.int8: "SW_KV_INT8"}


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of one token's keys and values in one layer."""

    num_heads: int
    """Number of key-value heads."""
    key_dim: int
    value_dim: int
    """0 for the keys of an indexer."""
    group: int = 1
    """Query heads per key-value head."""
    window: int | None = None
    """Positions that a query sees, including its own; None for all."""

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes per token, including a scale for each head's key and value if the type has scales."""
        scales = 2 * torch.float32.itemsize if dtype in LARGEST else 0
        padding = self.key_dim % 2 if dtype == torch.bfloat16 else 0  # keys are stored in pairs
        return self.num_heads * ((self.key_dim + padding + self.value_dim) * dtype.itemsize + scales)


class Move(NamedTuple):
    """A token's keys and values, in all layers, that are copied to another place."""

    from_block: int
    from_offset: int
    to_block: int
    to_offset: int
    group: int = 0
    """The cache group of the blocks; 0 are the choices' own."""


def resolve_kv_dtype(
    asked: KVCacheDType, dtype: torch.dtype, device: torch.device, *, quantized_weights: bool
) -> torch.dtype:
    """The type that keys and values are stored in; `dtype` is the type that the model computes in.

    Raises:
        ValueError: for a type that the device's attention cannot read.
    """
    if asked == "auto":
        return torch.bfloat16 if device.type == "cpu" and quantized_weights else dtype
    wanted: torch.dtype = torch.float8_e4m3fn if asked == "fp8" else getattr(torch, asked)
    if wanted not in (_NATIVE_TYPES if device.type == "cpu" else (dtype, *LARGEST)):
        name = str(resolve_kv_dtype("auto", dtype, device, quantized_weights=quantized_weights)).removeprefix("torch.")
        raise ValueError(f"kv_cache_dtype {asked} is not supported on {device.type}; use auto, which is {name} here")
    return wanted


class KVCache:
    """Keys and values of every layer in blocks of `block_size` consecutive positions of one choice.

    The first position of a block is a multiple of `block_size`. In a block, heads are the outer dimension, so each head
    has one matrix. Keys are transposed, so that a query reads a row of adjacent positions at a time. On CUDA keys have
    the same shape, but each key is contiguous in memory, as tensor cores read it. On CPU bfloat16 is stored in pairs
    (`Bf16Pairs`). In int8 and fp8, each head's key and value has its own scale: its largest magnitude / 127 or 448.
    """

    def __init__(  # noqa: PLR0913 - every platform sets other ones
        self,
        shapes: Sequence[KVShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
        *,
        whole_keys: bool | None = None,
        groups: Sequence[CacheGroup] = (),
    ) -> None:
        """Allocate an empty cache.

        Args:
            shapes: of each layer.
            num_blocks: for all choices together.
            block_size: positions in a block.
            dtype: storage type of keys and values.
            device: where the cache is stored.
            kernels: CPU kernels, which make moves faster.
            whole_keys: whether each key is contiguous in memory; None: only on CUDA.
            groups: cache groups. Layers with the window of a group have its blocks; the others have `num_blocks`.

        Raises:
            ValueError: if the kernels cannot read this cache.
        """
        self.shapes = tuple(shapes)
        windows = {one.window: (number, one.num_blocks) for number, one in enumerate(groups, 1) if one.kind == "window"}
        blocks_of = [windows.get(shape.window or 0, (0, num_blocks)) for shape in shapes]
        self.device = device
        self.num_blocks = num_blocks
        """The choices' own blocks."""
        self.group_of = [group for group, _ in blocks_of]
        """The cache group of each layer."""
        self.num_blocks_of = [count for _, count in blocks_of]
        """The blocks of each layer."""
        self.num_groups = 1 + len(windows)
        self.block_size = block_size
        self.dtype = dtype
        whole_keys = device.type == "cuda" if whole_keys is None else whole_keys
        self._in_pairs = dtype == torch.bfloat16 and device.type == "cpu" and not whole_keys
        self._layout = Bf16Pairs() if self._in_pairs else KVLayout()
        self.keys: list[Tensor] = []  # each [num_blocks, kv_heads, key_dim, block_size], or as in Bf16Pairs
        self.values: list[Tensor] = []  # each [num_blocks, kv_heads, block_size, value_dim], or as in Bf16Pairs
        self.key_scales: list[Tensor] = []  # each [num_blocks, kv_heads, block_size] float32; no entries without scales
        self.value_scales: list[Tensor] = []
        zeros = _Zeros(device)
        for shape, count in zip(shapes, self.num_blocks_of, strict=True):
            heads = (count, shape.num_heads)
            if whole_keys:
                self.keys.append(zeros((*heads, block_size, shape.key_dim), dtype).mT)
            else:
                key_shape = self._layout.key_shape(shape.num_heads, shape.key_dim, block_size)
                self.keys.append(zeros((count, *key_shape), dtype))
            value_shape = self._layout.value_shape(shape.num_heads, shape.value_dim, block_size)
            self.values.append(zeros((count, *value_shape), dtype))
            for scales in (self.key_scales, self.value_scales) if dtype in LARGEST else ():
                scales.append(zeros((*heads, block_size), torch.float32))
        self._groups = {number: _LayersOfGroup(self, number, kernels) for number in set(self.group_of)}

    def write(self, layer: int, key: Tensor, value: Tensor, block_of: Tensor, offset_of: Tensor) -> None:
        """Store key and value [tokens, kv_heads, dim] of each token at its block and offset."""
        if self.dtype in LARGEST:
            key, self.key_scales[layer][block_of, :, offset_of] = _quantized(key, self.dtype)
            value, self.value_scales[layer][block_of, :, offset_of] = _quantized(value, self.dtype)
        key, value = (self._stored(t) for t in (key, value))
        self._layout.put_keys(_movable(self.keys[layer]), block_of, offset_of, _movable(key))
        self._layout.put_values(_movable(self.values[layer]), block_of, offset_of, _movable(value))

    def read_places(self, layer: int, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [n, kv_heads, key_dim, width] and values [n, kv_heads, width, value_dim] of places [n, width].

        They have the stored type, or float32 if the stored type has scales.
        """
        keys = self._layout.keys_at(_movable(self.keys[layer]), blocks, offsets).view(self.dtype)
        keys = keys[..., : self.shapes[layer].key_dim]
        values = self._layout.values_at(_movable(self.values[layer]), blocks, offsets).view(self.dtype)
        if self.dtype in LARGEST:
            keys = keys.float() * self.key_scales[layer][blocks, :, offsets].unsqueeze(3)
            values = values.float() * self.value_scales[layer][blocks, :, offsets].unsqueeze(3)
        return keys.permute(0, 2, 3, 1).contiguous(), values.transpose(1, 2).contiguous()

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, in all layers of their group. No destination may be a source."""
        for number, group in self._groups.items():
            if of_group := [copy for copy in copies if copy.group == number]:
                group.copy_blocks(of_group)

    def move(self, moves: Sequence[Move]) -> None:
        """Copy keys and values of tokens to other places, in all layers of their group.

        No move may read a place that an earlier one wrote, so the order of reads and writes does not matter. Moving a
        path's nodes up fulfils this: they are in ascending order, and none is before its destination.
        """
        for number, group in self._groups.items():
            if of_group := [move for move in moves if move.group == number]:
                group.move(of_group)

    def _stored(self, vectors: Tensor) -> Tensor:
        """Keys or values converted to a storage type without scales."""
        rounded = vectors.to(self.dtype)
        return torch.where(rounded.abs() < _TINY, 0, rounded) if self._in_pairs else rounded


class _LayersOfGroup:
    """The layers of a cache that have the blocks of one group."""

    def __init__(self, cache: KVCache, number: int, kernels: Kernels | None) -> None:
        layers = [layer for layer, group in enumerate(cache.group_of) if group == number]
        self._layout = cache._layout
        self._keys = [_movable(cache.keys[layer]) for layer in layers]
        self._values = [_movable(cache.values[layer]) for layer in layers]
        self._scales = [
            scales[layer] for scales in (cache.key_scales, cache.value_scales) if scales for layer in layers
        ]
        self._tensors = [*self._keys, *self._values, *self._scales]
        on_cpu = all(tensor.device.type == "cpu" for tensor in self._tensors)
        self._memory = [_bytes_of(tensor) for tensor in self._tensors] if on_cpu else None
        """On CPU, each tensor's blocks as numpy bytes: numpy copies a few blocks eight times as fast as torch."""
        self._move_natively: Callable[[Sequence[tuple[int, int, int, int]]], None] | None = None
        if kernels is not None:
            structs = cache_structs(cache)
            self._move_natively = partial(
                kernels.move_kv, CPU.array("SwKvCache", [structs[layer][0] for layer in layers])
            )

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if self._memory is not None:
            for blocks in self._memory:
                for source, destination, _ in copies:
                    blocks[destination] = blocks[source]
            return
        pairs = torch.tensor(copies, dtype=torch.int64, device=self._tensors[0].device)
        sources, destinations = pairs[:, 0], pairs[:, 1]
        for tensor in self._tensors:  # index_copy_ takes a tenth of an assignment's time
            tensor.index_copy_(0, destinations, tensor.index_select(0, sources))

    def move(self, moves: Sequence[Move]) -> None:
        if self._move_natively is not None:
            self._move_natively([move[:4] for move in moves])
            return
        places = torch.tensor(moves, dtype=torch.int64, device=self._tensors[0].device)
        from_block, from_offset, to_block, to_offset, _ = places.unbind(1)
        layout = self._layout
        for keys in self._keys:
            layout.put_keys(keys, to_block, to_offset, layout.keys_at(keys, from_block, from_offset))
        for values in self._values:
            layout.put_values(values, to_block, to_offset, layout.values_at(values, from_block, from_offset))
        for scales in self._scales:
            scales[to_block, :, to_offset] = scales[from_block, :, from_offset]


class BlockCache(Protocol):
    """A cache in blocks, some of which may be in cache groups."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, as far as they are in this cache."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Copy what is kept of tokens to other places, as far as they are in this cache."""
        ...


def cache_structs(cache: KVCache) -> list[CData]:
    """An SwKvCache for each layer. The cache must outlive them.

    Raises:
        ValueError: if the kernels cannot read this cache.
    """
    is_transposed = all(keys.is_contiguous() for keys in cache.keys)
    if cache.dtype not in _NATIVE_TYPES or cache.device.type != "cpu" or not is_transposed:
        raise ValueError(
            f"the CPU kernels cannot read a KV cache in {cache.dtype} on {cache.device}, or contiguous keys"
        )
    kind, null = CPU.constants("SwKvType")[_NATIVE_TYPES[cache.dtype]], CPU.ffi.NULL
    structs = []
    for layer, (shape, keys, values) in enumerate(zip(cache.shapes, cache.keys, cache.values, strict=True)):
        scales = [pointer(s[layer], *s[layer].shape) if s else null for s in (cache.key_scales, cache.value_scales)]
        numbers = pointer(keys, *keys.shape), pointer(values, *values.shape)
        sizes = cache.block_size, shape.num_heads, shape.key_dim, shape.value_dim, cache.group_of[layer]
        structs.append(CPU.new("SwKvCache", (*numbers, *scales, kind, *sizes)))
    return structs


def _quantized(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise vectors [..., dim], rounding to nearest and ties to even; also returns their scales [...].

    A vector with a number that is not finite gets the scale NaN, so that errors stay visible. Vectors without numbers
    have the scale 0.
    """
    highest = vectors.float().abs().amax(-1) if vectors.shape[-1] else vectors.new_zeros(vectors.shape[:-1]).float()
    largest = torch.full_like(highest, LARGEST[dtype])  # CUDA would multiply by the reciprocal of a Python number
    usable = highest.isfinite() & (highest >= _SMALLEST)
    scales = torch.where(usable, highest / largest, torch.where(highest < _SMALLEST, 0.0, math.nan))
    factor = torch.where(usable, largest / highest, 0.0)
    scaled = (vectors * factor.unsqueeze(-1)).nan_to_num(0.0)
    return (scaled if dtype.is_floating_point else scaled.round()).to(dtype), scales


def _movable(tensor: Tensor) -> Tensor:
    """The same memory in a type that torch can index: for 8-bit floats it supports hardly any operation."""
    return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """[num_blocks, bytes] the memory of a tensor whose first dimension counts blocks."""
    blocks = tensor if tensor.is_contiguous() else tensor.mT  # keys are contiguous
    bytes_of_blocks: NDArray[np.uint8] = blocks.view(torch.uint8).flatten(1).numpy()
    return bytes_of_blocks


class _Zeros:
    """Allocates zeros. On CPU, they come from the system's zero pages, which take memory only when they are written.

    Tensors share huge pages: with pages of its own, each of a small cache's would take 2 MiB at its first token.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arena = Arena()

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._device.type == "cpu":
            return self._arena.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=self._device)
