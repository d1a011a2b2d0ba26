"""A layer of the KV cache as the Triton kernels take it."""

from model_runner.kernels.triton.kv_write import CacheLayer
from model_runner.kv_cache import KVCache


def cache_layer(cache: KVCache, layer: int) -> CacheLayer:
    """Where the kernels find a layer's keys and values."""
    scales = (cache.key_scales[layer], cache.value_scales[layer]) if cache.key_scales else (None, None)
    return CacheLayer(cache.keys[layer], cache.values[layer], *scales)
