"""Writing to the paged cache against KVCache.write, and rotation against transformers'."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from model_runner.kernels.triton.kv_write import CacheLayer, write_kv
from model_runner.kernels.triton.rotary import rotate_and_write
from model_runner.kv_cache import KVCache, KVShape

BLOCK = 16
NUM_BLOCKS = 5
KV_HEADS = 3
SLOTS = [3, 17, 79, 16, 40, 0]
EPS = 0.01

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in the interpreter


def tensors_of(cache: KVCache) -> list[torch.Tensor]:
    return [*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales]


def make_cache(dtype: torch.dtype, device: torch.device, key_dim: int = 20, value_dim: int = 24) -> KVCache:
    """Full of ones, so that what is not written shows."""
    cache = KVCache([KVShape(KV_HEADS, key_dim, value_dim)], NUM_BLOCKS, BLOCK, dtype, device, whole_keys=True)
    for tensor in tensors_of(cache):
        tensor.fill_(1)
    return cache


def layer_of(cache: KVCache) -> CacheLayer:
    scales = (cache.key_scales[0], cache.value_scales[0]) if cache.key_scales else ()
    return CacheLayer(cache.keys[0], cache.values[0], *scales)


def assert_equal(one: KVCache, other: KVCache) -> None:
    for a, b in zip(tensors_of(one), tensors_of(other), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def write(cache: KVCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
    cache.write(0, key, value, slots // BLOCK, slots % BLOCK)


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [None, torch.int8])
@pytest.mark.parametrize("has_whole_keys", [False, True])
def test_the_same_bits_as_the_cache_writes(
    dtype: torch.dtype, stored: torch.dtype | None, has_whole_keys: bool, device: torch.device
) -> None:
    key = random(len(SLOTS), KV_HEADS, 20, dtype=dtype, device=device)
    value = random(len(SLOTS), KV_HEADS, 24, dtype=dtype, device=device, seed=1)
    key[0, 0, 3], value[1, 1, 0], key[2, 2], value[2, 0], key[3, 1] = torch.nan, torch.inf, 0, -torch.inf, 1e-31
    key[4, 2, :2] = torch.tensor([254.0, 1.0])  # a half: to the even 0
    slots = torch.tensor(SLOTS, device=device)
    expected, cache = (make_cache(stored or dtype, device) for _ in range(2))
    if not has_whole_keys:
        cache.keys = [keys.contiguous() for keys in cache.keys]
    write(expected, key, value, slots)
    write_kv(key, value, slots, layer_of(cache))
    assert_equal(cache, expected)


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    wide = random(len(SLOTS), 5 * KV_HEADS, 20, dtype=torch.bfloat16, device=device)
    key, value = wide[:, 1 : 1 + KV_HEADS], wide[:, 6 : 6 + KV_HEADS]
    slots = torch.tensor(SLOTS, device=device)
    expected, cache = (make_cache(torch.bfloat16, device, 20, 20) for _ in range(2))
    write(expected, key, value, slots)
    write_kv(key, value, slots, layer_of(cache))
    assert_equal(cache, expected)


def test_fp8(device: torch.device) -> None:
    """Values are within half a unit in the last of fp8's four digits; scales, zeros and NaN are as in int8."""
    key = random(len(SLOTS), KV_HEADS, 20, dtype=torch.bfloat16, device=device)
    key[0, 0, 3], key[1, 1, 0], key[2, 2], key[3, 1] = torch.nan, torch.inf, 0, 1e-31
    slots = torch.tensor(SLOTS, device=device)
    heads = NUM_BLOCKS, KV_HEADS, BLOCK
    stored = [torch.zeros(*heads, 20, dtype=torch.float8_e4m3fn, device=device) for _ in range(2)]
    scales = [torch.ones(heads, device=device) for _ in range(2)]
    write_kv(key, key, slots, CacheLayer(stored[0].mT, stored[1], *scales))
    block, place = slots // BLOCK, slots % BLOCK
    highest = key.float().abs().amax(-1)
    largest = torch.full_like(highest, 448)  # CUDA multiplies by the reciprocal of a plain number
    scale = torch.where(highest < 1e-30, 0, highest / largest)
    scale[0, 0] = scale[1, 1] = torch.nan
    factor = torch.where(scale > 0, largest / highest, 0)
    numbers = (key.float() * factor[:, :, None]).nan_to_num(0.0)
    for tensor, own_scales in zip(stored, scales, strict=True):
        torch.testing.assert_close(own_scales[block, :, place], scale, rtol=0, atol=0, equal_nan=True)
        read = tensor.float()[block, :, place]
        assert torch.equal(read, numbers.to(torch.float8_e4m3fn).float())
        assert ((read - numbers).abs() <= numbers.abs() / 16 + 2**-10).all()
        assert (tensor.float() != 0).sum() == (read != 0).sum()  # nothing elsewhere


@pytest.mark.parametrize("rotary_dim", [0, 8, 20])
@pytest.mark.parametrize("normed", ["both", "none", "keys"])
@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.float32, torch.float32), (torch.bfloat16, torch.int8), (torch.float16, torch.float16)]
)
def test_rotation(dtype: torch.dtype, stored: torch.dtype, normed: str, rotary_dim: int, device: torch.device) -> None:
    heads, dim = 7, 20
    qkv = random(len(SLOTS), (heads + 2 * KV_HEADS) * dim, dtype=dtype, device=device)
    angles = random(len(SLOTS), rotary_dim // 2, dtype=torch.float32, device=device, seed=1).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    factors = [random(dim, dtype=torch.float32, device=device, seed=seed) for seed in (2, 3)]
    query_factor, key_factor = (factors[0] if normed == "both" else None, factors[1] if normed != "none" else None)
    slots = torch.tensor(SLOTS, device=device)
    cache, expected = (make_cache(stored, device, dim, dim) for _ in range(2))
    result = rotate_and_write(
        qkv, (cos, sin) if rotary_dim else None, (query_factor, key_factor), EPS, slots, layer_of(cache)
    )

    # Transformers' rotation in float32, then one rounding.
    query, key, value = qkv.view(len(SLOTS), -1, dim).split([heads, KV_HEADS, KV_HEADS], dim=1)
    query, key = normed_heads(query.float(), query_factor), normed_heads(key.float(), key_factor)
    if rotary_dim:
        turned = apply_rotary_pos_emb(
            query[None, ..., :rotary_dim], key[None, ..., :rotary_dim], cos.float()[None], sin.float()[None], 2
        )
        query[..., :rotary_dim], key[..., :rotary_dim] = turned[0][0], turned[1][0]
    assert result.dtype == dtype
    if normed == "none":
        write(expected, key.to(dtype), value, slots)
        assert torch.equal(result, query.to(dtype))
        assert_equal(cache, expected)
        return
    tolerance = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(result.float(), query, rtol=tolerance, atol=1e-6)
    # Keys need not be equal to the bit: compare with the result of write_kv for keys in float32.
    full = make_cache(torch.float32, device, dim, dim)
    rotate_and_write(qkv, (cos, sin) if rotary_dim else None, (query_factor, key_factor), EPS, slots, layer_of(full))
    own = full.keys[0][slots // BLOCK, :, :, slots % BLOCK]
    torch.testing.assert_close(own, key, rtol=tolerance, atol=1e-6)
    write(expected, own.to(dtype), value, slots)
    assert_equal(cache, expected)


def normed_heads(x: Tensor, factor: Tensor | None) -> Tensor:
    return x.clone() if factor is None else x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * factor


def test_where_the_queries_go(device: torch.device) -> None:
    qkv = random(2, 8 * 20, dtype=torch.float32, device=device)
    cache, slots = make_cache(torch.float32, device, 20, 20), torch.tensor([5, 6], device=device)
    out = torch.empty(2, 2, 20, device=device)
    assert rotate_and_write(qkv, None, (None, None), EPS, slots, layer_of(cache), out) is out
    assert torch.equal(out.flatten(1), qkv[:, :40])


def test_no_tokens(device: torch.device) -> None:
    cache, slots = make_cache(torch.float32, device, 20, 20), torch.empty(0, dtype=torch.int64, device=device)
    heads = torch.empty(0, KV_HEADS, 20, device=device)
    write_kv(heads, heads, slots, layer_of(cache))
    result = rotate_and_write(torch.empty(0, 8 * 20, device=device), None, (None, None), EPS, slots, layer_of(cache))
    assert result.shape == (0, 2, 20)
    assert_equal(cache, make_cache(torch.float32, device, 20, 20))
