"""Storage types of keys and values."""

import pytest
import torch

from model_runner.contract import BlockCopy, CacheGroup
from model_runner.kv_cache import KVCache, KVShape, Move, resolve_kv_dtype
from tests.model_runner.oracles.attention import read_blocks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = KVShape(2, 4, 6)
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
by_storage = pytest.mark.parametrize(("dtype", "whole_keys"), [(d, w) for d in DTYPES for w in (False, True)])


def written(dtype: torch.dtype, key: torch.Tensor, value: torch.Tensor, whole_keys: bool = False) -> KVCache:
    """A cache of four blocks whose block 1 has the key and value [kv_heads, dim] at place 3."""
    cache = KVCache([SHAPE], 4, 16, dtype, CPU, whole_keys=whole_keys)
    cache.write(0, key[None], value[None], torch.tensor([1]), torch.tensor([3]))
    return cache


@pytest.mark.parametrize(
    ("asked", "compute", "device", "quantized_weights", "stored"),
    [
        ("auto", torch.float32, CPU, False, torch.float32),
        ("auto", torch.float32, CPU, True, torch.bfloat16),
        ("auto", torch.float16, CUDA, False, torch.float16),
        ("float32", torch.float32, CPU, True, torch.float32),
        ("int8", torch.float32, CPU, False, torch.int8),
        ("bfloat16", torch.bfloat16, CUDA, False, torch.bfloat16),
        ("int8", torch.bfloat16, CUDA, False, torch.int8),
        ("fp8", torch.float16, CUDA, False, torch.float8_e4m3fn),
    ],
)
def test_type_of_the_cache(
    asked: str, compute: torch.dtype, device: torch.device, quantized_weights: bool, stored: torch.dtype
) -> None:
    assert resolve_kv_dtype(asked, compute, device, quantized_weights=quantized_weights) == stored


@pytest.mark.parametrize(
    ("asked", "compute", "device", "auto"),
    [
        ("float32", torch.bfloat16, CUDA, "bfloat16"),
        ("bfloat16", torch.float16, CUDA, "float16"),
        ("fp8", torch.float32, CPU, "bfloat16"),
        ("float16", torch.float32, CPU, "bfloat16"),
    ],
)
def test_type_that_a_device_cannot_read_is_refused(
    asked: str, compute: torch.dtype, device: torch.device, auto: str
) -> None:
    message = f"kv_cache_dtype {asked} is not supported on {device}; use auto, which is {auto} here"
    with pytest.raises(ValueError, match=message):
        resolve_kv_dtype(asked, compute, device, quantized_weights=device == CPU)


@pytest.mark.parametrize(
    ("dtype", "per_token"),
    [
        (torch.float32, 2 * 10 * 4),
        (torch.bfloat16, 2 * 10 * 2),
        (torch.int8, 2 * (10 + 8)),
        (torch.float8_e4m3fn, 2 * (10 + 8)),
    ],
)
def test_memory_is_counted_with_the_scales(dtype: torch.dtype, per_token: int) -> None:
    cache = KVCache([SHAPE], 4, 16, dtype, CPU)
    tensors = (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales)
    assert SHAPE.num_bytes(dtype) == per_token
    assert sum(tensor.nbytes for tensor in tensors) == per_token * 4 * 16


@pytest.mark.parametrize("key_dim", [4, 5])
def test_pairs_of_dimensions_and_of_places_stand_together(key_dim: int) -> None:
    shape = KVShape(2, key_dim, 3)
    cache = KVCache([shape], 2, 16, torch.bfloat16, CPU)
    key, value = torch.arange(2.0 * key_dim).view(1, 2, key_dim) + 1, torch.arange(6.0).view(1, 2, 3) + 1
    cache.write(0, key, value, torch.tensor([1]), torch.tensor([5]))
    expected = torch.nn.functional.pad(key[0], (0, key_dim % 2)).view(2, -1, 2)
    assert torch.equal(cache.keys[0][1, :, :, 5].float(), expected)
    assert torch.equal(cache.values[0][1, :, 2, :, 1].float(), value[0])
    assert cache.values[0].count_nonzero() == 6
    stored = cache.keys[0].nbytes + cache.values[0].nbytes
    assert shape.num_bytes(torch.bfloat16) * 2 * 16 == stored
    keys, _ = read_blocks(cache, 0, torch.tensor([1]))
    assert torch.equal(keys[0, :, :, 5].float(), key[0])


def test_pairs_have_no_tiny_numbers() -> None:
    numbers = torch.tensor([2.0**-56, -(2.0**-56), 2.0**-57, -1e-40])
    cache = written(torch.bfloat16, numbers.expand(2, 4), torch.zeros(2, 6))
    keys, _ = read_blocks(cache, 0, torch.tensor([1]))
    assert keys[0, 0, :, 3].tolist() == [2.0**-56, -(2.0**-56), 0, 0]


def test_int8_keeps_the_largest_magnitude_and_rounds_the_rest() -> None:
    key = torch.tensor([[127.0, -0.5, 1.5, 0.4], [0.0, 0.0, -2.54, 1.27]])
    cache = written(torch.int8, key, torch.zeros(2, 6))
    assert cache.keys[0][1, :, :, 3].tolist() == [[127, 0, 2, 0], [0, 0, -127, 64]]
    torch.testing.assert_close(cache.key_scales[0][1, :, 3], torch.tensor([1.0, 0.02]))
    assert cache.value_scales[0][1, :, 3].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_visible(dtype: torch.dtype, bad: float) -> None:
    key, value = torch.ones(2, 4), torch.ones(2, 6)
    key[1, 2] = value[0, 5] = bad
    keys, values = read_blocks(written(dtype, key, value), 0, torch.tensor([1]))
    assert not keys[0, 1, 2, 3].isfinite()
    assert not values[0, 0, 3, 5].isfinite()
    assert keys[0, 0, :, 3].tolist() == [1] * 4
    assert values[0, 1, 3].tolist() == [1] * 6


@pytest.mark.parametrize("bits", range(0x100))
def test_fp8_keeps_what_it_stores(bits: int) -> None:
    number = torch.tensor([bits], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    if number.isfinite():
        key = torch.cat([number, torch.tensor([448.0, 0.0, -448.0])]).expand(2, -1)
        keys, _ = read_blocks(written(torch.float8_e4m3fn, key, torch.zeros(2, 6)), 0, torch.tensor([1]))
        assert torch.equal(keys[0, :, :, 3], key)


@by_storage
def test_tokens_are_moved_with_all_that_belongs_to_them(dtype: torch.dtype, whole_keys: bool) -> None:
    cache = written(dtype, torch.randn(2, 4), torch.randn(2, 6), whole_keys)
    source = cache.read_places(0, torch.tensor([[1]]), torch.tensor([[3]]))
    cache.move([Move(1, 3, 2, 5)])
    assert all(tensor.any() for tensor in source)
    for one, other in zip(source, cache.read_places(0, torch.tensor([[2]]), torch.tensor([[5]])), strict=True):
        assert torch.equal(one, other)


@by_storage
def test_blocks_are_copied_with_all_that_belongs_to_them(dtype: torch.dtype, whole_keys: bool) -> None:
    cache = written(dtype, torch.randn(2, 4), torch.randn(2, 6), whole_keys)
    before = read_blocks(cache, 0, torch.tensor([1]))
    cache.copy_blocks([BlockCopy(1, 2)])
    for old, copy in zip(before, read_blocks(cache, 0, torch.tensor([2])), strict=True):
        assert old.any()
        assert torch.equal(copy, old)


@by_storage
def test_what_was_written_is_read(dtype: torch.dtype, whole_keys: bool) -> None:
    cache = KVCache([SHAPE], 4, 16, dtype, CPU, whole_keys=whole_keys)
    if whole_keys:
        assert cache.keys[0].mT.is_contiguous()
    else:
        assert cache.keys[0].shape == ((4, 2, 2, 16, 2) if dtype == torch.bfloat16 else (4, 2, 4, 16))
    tokens, written = torch.arange(64), (torch.rand(64, 2, 4) + 0.5, torch.rand(64, 2, 6) + 0.5)
    cache.write(0, *written, tokens // 16, tokens % 16)
    keys, values = read_blocks(cache, 0, torch.tensor([2, 0]))
    error = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.int8: 2**-6, torch.float8_e4m3fn: 2**-4}[dtype]
    for stored, rows in zip((keys.mT, values), written, strict=True):  # stored: [2, kv_heads, block_size, dim]
        wanted = torch.stack([rows[32:48], rows[:16]]).transpose(1, 2)
        torch.testing.assert_close(stored.float(), wanted, atol=0, rtol=error)


def test_layers_with_windows_have_blocks_of_their_own() -> None:
    shapes = [KVShape(2, 8, 8), KVShape(2, 8, 8, window=16), KVShape(2, 8, 8, window=99)]
    groups = [CacheGroup("window", 3, 16), CacheGroup("page", 2)]
    cache = KVCache(shapes, 5, 16, torch.float32, torch.device("cpu"), groups=groups)
    assert (cache.group_of, cache.num_blocks_of) == ([0, 1, 0], [5, 3, 5])
    for layer in range(3):
        cache.keys[layer].copy_(torch.arange(len(cache.keys[layer])).view(-1, 1, 1, 1))
    cache.copy_blocks([BlockCopy(4, 1), BlockCopy(2, 0, 1)])
    cache.move([Move(3, 0, 0, 5), Move(2, 1, 1, 7, 1)])
    heads = [keys[:, 0, 0] for keys in cache.keys]  # [blocks, 16]
    expected = [[0, 4, 2, 3, 4], [2, 1, 2], [0, 4, 2, 3, 4]]
    assert [keys[:, -1].tolist() for keys in heads] == expected
    assert [keys[:, 5].tolist() for keys in heads] == [[3, 4, 2, 3, 4], [2, 1, 2], [3, 4, 2, 3, 4]]
    assert heads[1][:, 7].tolist() == [2, 2, 2]
