"""Paged attention with the C++ kernels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from model_runner.attention.backend import AttentionBackend, AttentionOptions
from model_runner.batch import Batch, Int32Array
from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.kernels.library import Kernels
from model_runner.kv_cache import KVCache, cache_structs


@dataclass(frozen=True, slots=True)
class NativeStep:
    """An SwStep and the arrays it points into."""

    struct: CData
    arrays: tuple[Int32Array, ...]
    groups: CData | None = None
    """An array with the SwStep of each further cache group, which the first points to."""


def make_step(batch: Batch, num_groups: int = 1) -> NativeStep:
    """The SwStep of a batch, for a cache with so many groups of blocks."""
    steps = [_make_step(batch.in_group(number)) for number in range(num_groups)]
    if num_groups == 1:
        return steps[0]
    groups = CPU.array("SwStep", [step.struct[0] for step in steps[1:]])
    steps[0].struct.groups = groups
    return NativeStep(steps[0].struct, tuple(array for step in steps for array in step.arrays), groups)


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
        return NativeStep(struct, numbers)
    span_last = batch.span_last.astype(np.int32)
    struct.span_last = pointer(span_last, count)
    return NativeStep(struct, (*numbers, span_last))


def attention_struct(heads: int, options: AttentionOptions) -> CData:
    """A layer's options as an SwAttention, which points into the sinks: float32, and contiguous."""
    sinks = CPU.ffi.NULL if options.sinks is None else pointer(options.sinks, heads)
    limits = options.window or 0, options.chunk or 0
    return CPU.new("SwAttention", (heads, *limits, options.scale, options.softcap or 0.0, sinks, options.sees_spans))


class NativeAttention(AttentionBackend[NativeStep]):
    """Attention in C++. A tile of keys is one block of the cache."""

    needs_clean_blocks = False

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
