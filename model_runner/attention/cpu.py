"""Paged attention by the C++ kernels, and what they need to know of the cache."""

import torch
from torch import Tensor

from model_runner.attention.backend import AttentionBackend, AttentionOptions
from model_runner.batch import Batch
from model_runner.kernels.library import Kernels
from model_runner.kernels.step import NativeStep, make_step
from model_runner.kernels.structs import AttentionStruct, KVCacheStruct
from model_runner.kv_cache import KVCache

_KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class NativeAttention(AttentionBackend[NativeStep]):
    """Attention in C++, on tiles that are the blocks of the cache."""

    needs_clean_blocks = False

    def __init__(self, kernels: Kernels, cache: KVCache) -> None:
        self._kernels = kernels
        self._cache = cache  # the structs point into it
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


def cache_structs(cache: KVCache) -> list[KVCacheStruct]:
    """For each layer, where the kernels find its keys and values. The cache must outlive them.

    Raises:
        ValueError: if they cannot read what the cache stores.
    """
    if cache.dtype not in _KV_TYPES or cache.keys[0].device.type != "cpu":
        raise ValueError(f"the CPU kernels cannot read a cache of {cache.dtype} on {cache.keys[0].device}")
    structs = []
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        _, kv_heads, key_dim, block_size = keys.shape
        scales = [s[layer].data_ptr() if s else None for s in (cache.key_scales, cache.value_scales)]
        sizes = (block_size, kv_heads, key_dim, values.shape[3])
        structs.append(KVCacheStruct(keys.data_ptr(), values.data_ptr(), *scales, _KV_TYPES[cache.dtype], *sizes))
    return structs
