"""The paged KV cache: fixed blocks of keys and values for every layer."""

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
from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.kernels.library import Kernels, huge_pages


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


class PlainLayout(KVLayout):
    """Keys [.., kv_heads, key_dim, block_size] and values [.., kv_heads, block_size, value_dim]."""

    def key_shape(self, kv_heads: int, key_dim: int, block_size: int) -> tuple[int, ...]:
        return kv_heads, key_dim, block_size

    def value_shape(self, kv_heads: int, value_dim: int, block_size: int) -> tuple[int, ...]:
        return kv_heads, block_size, value_dim

    def put_keys(self, keys: Tensor, block: Tensor, offset: Tensor, new: Tensor) -> None:
        keys[block, :, :, offset] = new

    def put_values(self, values: Tensor, block: Tensor, offset: Tensor, new: Tensor) -> None:
        values[block, :, offset] = new

    def keys_at(self, keys: Tensor, block: Tensor, offset: Tensor) -> Tensor:
        return keys[block, :, :, offset]

    def values_at(self, values: Tensor, block: Tensor, offset: Tensor) -> Tensor:
        return values[block, :, offset]

    def keys_of(self, keys: Tensor, blocks: Tensor, key_dim: int) -> Tensor:
        return keys.index_select(0, blocks)

    def values_of(self, values: Tensor, blocks: Tensor) -> Tensor:
        return values.index_select(0, blocks)


class Bf16Pairs(KVLayout):
    """Pairs of a key's dimensions and of a value's places, as cpu/half_precision.h multiplies them.

    Keys [.., kv_heads, key_dim / 2, block_size, 2], with zeros if key_dim is odd, and values
    [.., kv_heads, block_size / 2, value_dim, 2].
    """

    def key_shape(self, kv_heads: int, key_dim: int, block_size: int) -> tuple[int, ...]:
        return kv_heads, -(-key_dim // 2), block_size, 2

    def value_shape(self, kv_heads: int, value_dim: int, block_size: int) -> tuple[int, ...]:
        """See KVLayout. The block size is even."""
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

    def keys_of(self, keys: Tensor, blocks: Tensor, key_dim: int) -> Tensor:
        return keys.index_select(0, blocks).transpose(3, 4).flatten(2, 3)[:, :, :key_dim].contiguous()

    def values_of(self, values: Tensor, blocks: Tensor) -> Tensor:
        return values.index_select(0, blocks).transpose(3, 4).flatten(2, 3)


LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Types that are stored with scales, and the number in them that a vector's largest magnitude becomes."""

_SMALLEST = 1e-30
"""A vector without a larger number is stored as zeros with scales: 448 / x must be finite."""

_TINY = 2.0**-56
"""A smaller number in pairs is stored as zero, so that no sum of products is subnormal: see cpu/half_precision.h."""

_NATIVE_TYPES = {torch.float32: "SW_KV_FLOAT32", torch.bfloat16: "SW_KV_BFLOAT16", torch.int8: "SW_KV_INT8"}


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of one token in one layer."""

    num_heads: int
    """Key-value heads."""
    key_dim: int
    value_dim: int
    group: int = 1
    """Query heads of a key-value head."""

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Memory for each token, including the scales of each head's key and value if the type has them."""
        scales = 2 * torch.float32.itemsize if dtype in LARGEST else 0
        padding = self.key_dim % 2 if dtype == torch.bfloat16 else 0  # where they stand in pairs
        return self.num_heads * ((self.key_dim + padding + self.value_dim) * dtype.itemsize + scales)


class Move(NamedTuple):
    """Keys and values of one token, in all layers, that go to another place."""

    from_block: int
    from_offset: int
    to_block: int
    to_offset: int


def resolve_kv_dtype(
    asked: KVCacheDType, dtype: torch.dtype, device: torch.device, *, quantized_weights: bool
) -> torch.dtype:
    """What keys and values are stored as; `dtype` is what the model computes in.

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

    The first position of a block is a multiple of `block_size`. Within a block the heads stand outside, so that a block
    is a matrix for each head; keys are transposed, so that a query meets a row of neighbouring positions at a time.
    On CUDA only their shape is: in memory the numbers of a key stand side by side, as a tensor core reads them. On CPU
    numbers in bfloat16 stand in pairs.
    In int8 and fp8, each head's key and value has a scale of its own: its largest magnitude / 127 or 448.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
        *,
        whole_keys: bool | None = None,
    ) -> None:
        """An empty cache.

        Args:
            shapes: of each layer.
            num_blocks: of all choices together.
            block_size: positions in a block.
            dtype: what keys and values are stored as.
            device: where.
            kernels: on CPU, make moves faster.
            whole_keys: whether the numbers of a key stand side by side in memory; None: on CUDA alone.

        Raises:
            ValueError: if the kernels cannot read what the cache stores.
        """
        self.shapes = tuple(shapes)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        whole_keys = device.type == "cuda" if whole_keys is None else whole_keys
        self._in_pairs = dtype == torch.bfloat16 and device.type == "cpu" and not whole_keys
        self._layout: KVLayout = Bf16Pairs() if self._in_pairs else PlainLayout()
        self.keys: list[Tensor] = []  # each [num_blocks, kv_heads, key_dim, block_size], or see Bf16Pairs
        self.values: list[Tensor] = []  # each [num_blocks, kv_heads, block_size, value_dim], likewise
        self.key_scales: list[Tensor] = []  # each [num_blocks, kv_heads, block_size] float32; no entries without scales
        self.value_scales: list[Tensor] = []
        for shape in shapes:
            heads = (num_blocks, shape.num_heads)
            if whole_keys:
                self.keys.append(_zeros((*heads, block_size, shape.key_dim), dtype, device).mT)
            else:
                key_shape = self._layout.key_shape(shape.num_heads, shape.key_dim, block_size)
                self.keys.append(_zeros((num_blocks, *key_shape), dtype, device))
            value_shape = self._layout.value_shape(shape.num_heads, shape.value_dim, block_size)
            self.values.append(_zeros((num_blocks, *value_shape), dtype, device))
            if dtype in LARGEST:
                self.key_scales.append(_zeros((*heads, block_size), torch.float32, device))
                self.value_scales.append(_zeros((*heads, block_size), torch.float32, device))
        self._memory = None if device.type != "cpu" else [_bytes_of(tensor) for tensor in self._tensors()]
        """On CPU, of each tensor its blocks as numpy copies them: for few of them that takes an eighth of the time."""
        self._move_natively: Callable[[Sequence[Move]], None] | None = None
        if kernels is not None:
            layers = CPU.array("SwKvCache", [struct[0] for struct in cache_structs(self)])
            self._move_natively = partial(kernels.move_kv, layers)

    def write(self, layer: int, key: Tensor, value: Tensor, block_of: Tensor, offset_of: Tensor) -> None:
        """Store key and value [tokens, kv_heads, dim] of each token at its block and offset."""
        if self.dtype in LARGEST:
            key, self.key_scales[layer][block_of, :, offset_of] = _quantized(key, self.dtype)
            value, self.value_scales[layer][block_of, :, offset_of] = _quantized(value, self.dtype)
        key, value = (self._stored(t) for t in (key, value))
        self._layout.put_keys(_movable(self.keys[layer]), block_of, offset_of, _movable(key))
        self._layout.put_values(_movable(self.values[layer]), block_of, offset_of, _movable(value))

    def read_blocks(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [n, kv_heads, key_dim, block_size] and values [n, kv_heads, block_size, value_dim] of n blocks.

        They are of the stored type, but float32 if that has scales.
        """
        keys = self._layout.keys_of(_movable(self.keys[layer]), blocks, self.shapes[layer].key_dim).view(self.dtype)
        values = self._layout.values_of(_movable(self.values[layer]), blocks).view(self.dtype)
        if self.dtype in LARGEST:
            keys = keys.float() * self.key_scales[layer].index_select(0, blocks).unsqueeze(2)
            values = values.float() * self.value_scales[layer].index_select(0, blocks).unsqueeze(3)
        return keys, values

    def read_places(self, layer: int, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """The same where every position [n, block_size] is named by its block and offset."""
        keys = self._layout.keys_at(_movable(self.keys[layer]), blocks, offsets).view(self.dtype)
        keys = keys[..., : self.shapes[layer].key_dim]
        values = self._layout.values_at(_movable(self.values[layer]), blocks, offsets).view(self.dtype)
        if self.dtype in LARGEST:
            keys = keys.float() * self.key_scales[layer][blocks, :, offsets].unsqueeze(3)
            values = values.float() * self.value_scales[layer][blocks, :, offsets].unsqueeze(3)
        return keys.permute(0, 2, 3, 1).contiguous(), values.transpose(1, 2).contiguous()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in all layers. No destination is also a source."""
        if not copies:
            return
        if self._memory is not None:
            for blocks in self._memory:
                for source, destination in copies:
                    blocks[destination] = blocks[source]
            return
        pairs = torch.tensor(copies, dtype=torch.int64, device=self.keys[0].device)
        sources, destinations = pairs[:, 0], pairs[:, 1]
        for tensor in self._tensors():  # by index_copy_, which takes a tenth of the time of an assignment
            tensor.index_copy_(0, destinations, tensor.index_select(0, sources))

    def move(self, moves: Sequence[Move]) -> None:
        """Copy keys and values of tokens to other places, in all layers.

        No move reads a place that one before it has written, so it does not matter whether all are read first. It is so
        where the nodes of a path move up: they are in ascending order, and none is before the place that it goes to.
        """
        if not moves:
            return
        if self._move_natively is not None:
            self._move_natively(moves)
            return
        places = torch.tensor(moves, dtype=torch.int64, device=self.keys[0].device)
        from_block, from_offset, to_block, to_offset = places.unbind(1)
        for keys in map(_movable, self.keys):
            self._layout.put_keys(keys, to_block, to_offset, self._layout.keys_at(keys, from_block, from_offset))
        for values in map(_movable, self.values):
            self._layout.put_values(
                values, to_block, to_offset, self._layout.values_at(values, from_block, from_offset)
            )
        for scales in (*self.key_scales, *self.value_scales):
            scales[to_block, :, to_offset] = scales[from_block, :, from_offset]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks that are handed out anew.

        The reference attention multiplies masked positions with a weight of zero, which hides any number but NaN and
        infinity: without this, a computation that went wrong for one request would reach the next one to hold its
        blocks.
        """
        if not blocks:
            return
        index = torch.tensor(blocks, dtype=torch.int64, device=self.keys[0].device)
        for tensor in self._tensors():
            tensor[index] = 0

    def _stored(self, vectors: Tensor) -> Tensor:
        """Keys or values in the type of the cache, if that has no scales."""
        rounded = vectors.to(self.dtype)
        return torch.where(rounded.abs() < _TINY, 0, rounded) if self._in_pairs else rounded

    def _tensors(self) -> list[Tensor]:
        return [*map(_movable, (*self.keys, *self.values)), *self.key_scales, *self.value_scales]


class KVCaches:
    """Caches of several models, whose blocks of the same number belong together."""

    def __init__(self, *caches: KVCache) -> None:
        self._caches = caches

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for cache in self._caches:
            cache.copy_blocks(copies)

    def move(self, moves: Sequence[Move]) -> None:
        for cache in self._caches:
            cache.move(moves)

    def clear(self, blocks: Sequence[int]) -> None:
        for cache in self._caches:
            cache.clear(blocks)


def cache_structs(cache: KVCache) -> list[CData]:
    """An SwKvCache for each layer. The cache must outlive them.

    Raises:
        ValueError: if the kernels cannot read what the cache stores.
    """
    device = cache.keys[0].device
    if cache.dtype not in _NATIVE_TYPES or device.type != "cpu" or not cache.keys[0].is_contiguous():
        raise ValueError(f"the CPU kernels cannot read a cache of {cache.dtype} on {device} or one of whole keys")
    kind, null = CPU.constants("SwKvType")[_NATIVE_TYPES[cache.dtype]], CPU.ffi.NULL
    structs = []
    for layer, (shape, keys, values) in enumerate(zip(cache.shapes, cache.keys, cache.values, strict=True)):
        scales = [pointer(s[layer], *s[layer].shape) if s else null for s in (cache.key_scales, cache.value_scales)]
        numbers = pointer(keys, *keys.shape), pointer(values, *values.shape)
        sizes = cache.block_size, shape.num_heads, shape.key_dim, shape.value_dim
        structs.append(CPU.new("SwKvCache", (*numbers, *scales, kind, *sizes)))
    return structs


def _quantized(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Vectors [..., dim] in a type with scales, rounded to nearest and halves to even, and their scales [...].

    A vector with a number that is not finite gets the scale NaN, so that nothing that went wrong is hidden.
    """
    highest = vectors.float().abs().amax(-1)
    largest = torch.full_like(highest, LARGEST[dtype])  # CUDA would multiply by the reciprocal of a plain number
    usable = highest.isfinite() & (highest >= _SMALLEST)
    scales = torch.where(usable, highest / largest, torch.where(highest < _SMALLEST, 0.0, math.nan))
    factor = torch.where(usable, largest / highest, 0.0)
    scaled = (vectors * factor.unsqueeze(-1)).nan_to_num(0.0)
    return (scaled if dtype.is_floating_point else scaled.round()).to(dtype), scales


def _movable(tensor: Tensor) -> Tensor:
    """The same memory in a type that torch can index: of an 8-bit float it moves hardly anything."""
    return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """[num_blocks, bytes] the memory of a tensor whose first dimension is that of the blocks."""
    blocks = tensor if tensor.is_contiguous() else tensor.mT  # with whole keys
    bytes_of_blocks: NDArray[np.uint8] = blocks.view(torch.uint8).flatten(1).numpy()
    return bytes_of_blocks


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on CPU from the system's zero pages, which take memory and time only as they are written."""
    if device.type == "cpu":
        return huge_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)
