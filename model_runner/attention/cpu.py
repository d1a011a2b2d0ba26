"""Paged attention with the C++ kernels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_runner.attention.backend import AttentionBackend, AttentionOptions, IndexOptions
from model_runner.batch import Batch, Int32Array, IntArray, TreePaths
from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.kernels.library import Kernels
from model_runner.kv_cache import KVCache, cache_structs

_BITS = 16
"""Positions in a number of a selection."""


@dataclass(frozen=True, slots=True)
class NativeStep:
    """An SwStep and the arrays it points into."""

    struct: CData
    arrays: tuple[Int32Array, ...]
    batch: Batch
    groups: CData | None = None
    """An array with the SwStep of each further cache group, which the first points to."""


def make_step(batch: Batch, num_groups: int = 1) -> NativeStep:
    """The SwStep of a batch, for a cache with so many groups of blocks."""
    steps = [_make_step(batch.in_group(number)) for number in range(num_groups)]
    if num_groups == 1:
        return steps[0]
    groups = CPU.array("SwStep", [step.struct[0] for step in steps[1:]])
    steps[0].struct.groups = groups
    return NativeStep(steps[0].struct, tuple(array for step in steps for array in step.arrays), batch, groups)


def _make_step(batch: Batch) -> NativeStep:
    table = batch.block_table()
    count, (num_choices, width) = len(batch.positions), table.shape
    arrays: list[tuple[npt.NDArray[Any], tuple[int, ...]]] = [
        (np.searchsorted(batch.choice_of, np.arange(num_choices + 1)), (num_choices + 1,)),  # first_token
        (batch.positions, (count,)),
        (batch.block_of, (count,)),
        (batch.offset_of, (count,)),
        (table, (num_choices, width)),
    ]
    if (paths := batch.paths) is not None:
        arrays += [(paths.start, (count,)), (paths.first, (count + 1,)), (paths.places, (int(paths.first[-1]),))]
    numbers = tuple(np.ascontiguousarray(array, dtype=np.int32) for array, _ in arrays)
    pointers = (pointer(array, *shape) for array, (_, shape) in zip(numbers, arrays, strict=True))
    struct = CPU.new("SwStep", (count, num_choices, width, *pointers))
    if batch.span_last is None:
        return NativeStep(struct, numbers, batch)
    span_last = batch.span_last.astype(np.int32)
    struct.span_last = pointer(span_last, count)
    return NativeStep(struct, (*numbers, span_last), batch)


def attention_struct(heads: int, options: AttentionOptions) -> CData:
    """A layer's options as an SwAttention, which points into sinks (float32, contiguous), selection and sums."""
    sinks = CPU.ffi.NULL if options.sinks is None else pointer(options.sinks, heads)
    limits = options.window or 0, options.chunk or 0
    selected = (CPU.ffi.NULL, 0, 0)
    if (selection := options.selection) is not None:
        selected = (pointer(selection, *selection.shape), *selection.shape[1:])
    sums = CPU.ffi.NULL if options.sums is None else pointer(options.sums, *options.sums.shape)
    return CPU.new(
        "SwAttention",
        (heads, *limits, options.scale, options.softcap or 0.0, sinks, *selected, sums, options.sees_spans),
    )


class NativeAttention(AttentionBackend[NativeStep]):
    """Attention in C++. A tile of keys is one block of the cache."""

    def __init__(self, kernels: Kernels, cache: KVCache) -> None:
        self._kernels = kernels
        self.cache = cache
        self._structs = cache_structs(cache)

    def prepare(self, batch: Batch) -> NativeStep:
        return make_step(batch, self.cache.num_groups)

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, metadata: NativeStep
    ) -> Tensor:
        struct = attention_struct(query.shape[1], options)
        rows = (tensor.float().contiguous() for tensor in (query, key, value))
        return self._kernels.attention(self._structs[layer], metadata.struct, struct, *rows).to(query.dtype)

    def attend(self, layer: int, query: Tensor, options: AttentionOptions, metadata: NativeStep) -> Tensor:
        struct = attention_struct(query.shape[1], options)
        rows = query.float().contiguous()
        return self._kernels.attention(self._structs[layer], metadata.struct, struct, rows).to(query.dtype)

    def select(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        weights: Tensor | None,
        options: IndexOptions,
        metadata: NativeStep,
    ) -> Tensor:
        """Returns [tokens, selections, width] uint16: bit p % 16 of number p // 16 says whether position p is seen."""
        count, heads, dim = query.shape
        width = metadata.struct.table_width * self.cache.block_size // _BITS
        selected = torch.empty(count, heads if weights is None else 1, width, dtype=torch.uint16)
        rows = [part.float().contiguous() for part in (query, key, *(() if weights is None else (weights,)))]
        shapes = (count, heads, dim), (count, 1, dim), (count, heads)
        numbers = [pointer(part, *shape) for part, shape in zip(rows, shapes, strict=False)]
        pools = CPU.constants("SwPooling")["SW_HIGHEST" if options.pools == "highest" else "SW_LAST"]
        indexer = CPU.new("SwIndexer", (heads, options.top, options.block, pools, options.local, options.entries))
        weighted = numbers[2] if weights is not None else CPU.ffi.NULL
        outputs = pointer(selected, *selected.shape), width
        self._kernels.call(
            "sw_select", self._structs[layer], metadata.struct, indexer, *numbers[:2], weighted, *outputs
        )
        return selected

    def see_entries(self, block: int, metadata: NativeStep) -> Tensor:
        count, width = metadata.struct.num_tokens, metadata.struct.table_width * self.cache.block_size
        is_last = np.arange(1, width + 1) % block == 0
        numbers = np.packbits(is_last, bitorder="little").view(np.uint16)
        return torch.from_numpy(numbers).expand(count, 1, -1).contiguous()

    def recall(self, layer: int, rows: Tensor, block: int, count: int, metadata: NativeStep) -> tuple[Tensor, Tensor]:
        return recall(self.cache, layer, rows, (block, count), metadata.batch)


def recall(cache: KVCache, layer: int, rows: Tensor, sizes: tuple[int, int], batch: Batch) -> tuple[Tensor, Tensor]:
    """`AttentionBackend.recall` for a batch; `sizes` are the block's, and how many rows are read."""
    block, count = sizes
    own = batch.in_group(cache.group_of[layer])
    places = (torch.from_numpy(of).to(cache.device) for of in (own.block_of, own.offset_of))
    cache.write(layer, rows, rows[..., :0], *places)
    tokens = np.flatnonzero((own.positions + 1) % block == 0)
    position = own.positions[tokens, None]
    wanted = (position - count + 1 + np.arange(count)).clip(0)
    if own.paths is not None:
        wanted = places_of(own.paths, tokens, position, wanted)
    blocks = own.block_table()[own.choice_of[tokens, None], wanted // cache.block_size]
    found = (torch.from_numpy(of).to(cache.device) for of in (blocks.astype(np.int64), wanted % cache.block_size))
    keys, _ = cache.read_places(layer, *found)
    return torch.from_numpy(tokens), keys[:, 0].transpose(1, 2).float()


def places_of(paths: TreePaths, token: IntArray, position: IntArray, key_position: IntArray) -> IntArray:
    """Places of the key positions [pairs, block_size] that tokens [pairs] at positions [pairs, 1] see."""
    start = paths.start[token, None]
    on_path = (key_position >= start) & (key_position <= position)
    entry = paths.first[token, None] + key_position - start
    places = key_position.copy()
    places[on_path] = paths.places[entry[on_path]]
    return places
