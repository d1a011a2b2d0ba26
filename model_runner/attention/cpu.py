"""Paged attention by the C++ kernels."""

from torch import Tensor

from model_runner.attention.backend import AttentionBackend, AttentionOptions
from model_runner.batch import Batch
from model_runner.kernels.library import Kernels
from model_runner.kernels.step import NativeStep, make_step
from model_runner.kernels.structs import AttentionStruct
from model_runner.kv_cache import KVCache, cache_structs


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
