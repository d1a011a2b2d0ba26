"""Paged attention by the C++ kernels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from model_runner.attention.backend import AttentionBackend, AttentionOptions
from model_runner.batch import Batch, Int32Array
from model_runner.kernels.library import Kernels
from model_runner.kernels.structs import AttentionStruct, StepStruct
from model_runner.kv_cache import KVCache, cache_structs


@dataclass(frozen=True, slots=True)
class NativeStep:
    """A step, and the arrays that its struct points into."""

    struct: StepStruct
    arrays: tuple[Int32Array, ...]


def make_step(batch: Batch) -> NativeStep:
    """The step of a batch on the CPU."""
    table = batch.block_table()
    num_choices, width = table.shape
    arrays: list[npt.NDArray[Any]] = [
        np.searchsorted(batch.choice_of, np.arange(num_choices + 1)),  # first_token
        batch.positions,
        batch.block_of,
        batch.offset_of,
        table,
    ]
    if batch.paths is not None:
        arrays += [batch.paths.start, batch.paths.first, batch.paths.places]
    numbers = tuple(np.ascontiguousarray(array, dtype=np.int32) for array in arrays)
    struct = StepStruct(len(batch.positions), num_choices, width, *map(_address, numbers))
    return NativeStep(struct, numbers)


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class NativeAttention(AttentionBackend[NativeStep]):
    """Attention in C++, on tiles that are the blocks of the cache."""

    needs_clean_blocks = False

    def __init__(self, kernels: Kernels, cache: KVCache) -> None:
        self._kernels = kernels
        self.cache = cache
        self._structs = cache_structs(cache)

    def prepare(self, batch: Batch) -> NativeStep:
        """See AttentionBackend.prepare."""
        return make_step(batch)

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, metadata: NativeStep
    ) -> Tensor:
        """See AttentionBackend.forward."""
        struct = AttentionStruct(query.shape[1], options.window or 0, options.scale, options.softcap or 0.0)
        rows = (tensor.float().contiguous() for tensor in (query, key, value))
        return self._kernels.attention(self._structs[layer], metadata.struct, struct, *rows).to(query.dtype)
