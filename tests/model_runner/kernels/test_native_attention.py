"""The native attention against its definition and the reference, and that nothing changes it which must not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from model_runner.attention.backend import AttentionOptions, IndexOptions
from model_runner.attention.cpu import NativeAttention
from model_runner.kernels.library import Kernels
from model_runner.kv_cache import KVCache, KVShape
from tests.model_runner.batches import Chunk, make_batch
from tests.model_runner.oracles.attention import ReferenceAttention
from tests.model_runner.sequences import (
    CHUNKS,
    CPU,
    CROWD,
    INDEXED,
    LENGTHS,
    LIMITED,
    OPTIONS,
    SINKS,
    SMALL_CHUNKS_AND_SINKS,
    WINDOW_AND_SINKS,
    Indexed,
    Sequences,
    Sizes,
    Storage,
    check_trees,
)

DTYPES = [torch.float32, torch.bfloat16, torch.int8]
PLAIN, NARROW, ONE_BLOCK, CAPPED = OPTIONS
CASES = [  # sizes, block size, options
    (Sizes(1, 1, key_dim=12, value_dim=12), 16, PLAIN),
    (Sizes(6, 2, key_dim=20, value_dim=100), 16, CAPPED),
    (Sizes(6, 2, key_dim=24, value_dim=36), 48, NARROW),
    (Sizes(7, 1, key_dim=96, value_dim=80), 32, ONE_BLOCK),
    (Sizes(9, 3, key_dim=64, value_dim=64), 32, PLAIN),
    (Sizes(9, 3, key_dim=64, value_dim=64), 32, CAPPED),
    (Sizes(6, 2, key_dim=25, value_dim=37), 16, NARROW),
    (Sizes(31, 1, key_dim=16, value_dim=33), 64, CAPPED),  # more heads than a unit of work usually has
    (Sizes(9, 3, key_dim=64, value_dim=64), 32, SINKS),
    (Sizes(6, 2, key_dim=20, value_dim=100), 16, WINDOW_AND_SINKS),
    (Sizes(7, 1, key_dim=25, value_dim=37), 48, SMALL_CHUNKS_AND_SINKS),
    (Sizes(6, 2, key_dim=64, value_dim=64), 32, CHUNKS),
    (Sizes(31, 1, key_dim=16, value_dim=33), 64, INDEXED[0]),
    (Sizes(9, 3, key_dim=64, value_dim=64), 32, INDEXED[1]),
    (Sizes(6, 2, key_dim=20, value_dim=36), 16, INDEXED[2]),
    (Sizes(6, 2, key_dim=20, value_dim=36), 48, INDEXED[3]),
    (Sizes(7, 1, key_dim=25, value_dim=37), 16, INDEXED[4]),
]

Make = Callable[[KVCache], NativeAttention]
by_dtype = pytest.mark.parametrize("dtype", DTYPES)
by_case = pytest.mark.parametrize(("sizes", "block_size", "options"), CASES)


@pytest.fixture
def make(kernels: Kernels) -> Make:
    return lambda cache: NativeAttention(kernels, cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@by_case
def test_equals_the_definition(
    make: Make, sizes: Sizes, block_size: int, options: AttentionOptions, dtype: torch.dtype
) -> None:
    sequences = Sequences.random([1, 70, 16], sizes)
    outputs = sequences.attend([[(0, 0, 1), (1, 0, 70), (2, 0, 16)]], options, make, Storage(dtype, block_size))
    for index, output in enumerate(outputs):
        np.testing.assert_allclose(output.numpy(), sequences.definition(index, options, dtype), atol=4e-6)


@by_case
def test_bfloat16_is_rounded_attention(make: Make, sizes: Sizes, block_size: int, options: AttentionOptions) -> None:
    """Now and then a weight falls to the other side of a half, which changes its row by a small part of that weight."""
    sequences = Sequences.random([1, 70, 16], sizes)
    storage = Storage(torch.bfloat16, block_size)
    outputs = sequences.attend([[(0, 0, 1), (1, 0, 70), (2, 0, 16)]], options, make, storage)
    for index, output in enumerate(outputs):
        errors = np.abs(output.numpy() - sequences.rounded_definition(index, options, block_size)).max(-1)
        assert (errors < 4e-6).mean() > 0.75
        assert errors.max() < 5e-3
        if isinstance(options, Indexed):  # rounded queries may select other positions
            continue
        exact = sequences.definition(index, options, torch.bfloat16)
        np.testing.assert_allclose(output.numpy(), exact, atol=0.03)


def test_unrounded_attention_would_be_found_out() -> None:
    sequences = Sequences.random([70], Sizes(2, 1))
    exact = sequences.definition(0, PLAIN, torch.bfloat16)
    errors = np.abs(exact - sequences.rounded_definition(0, PLAIN, 16)).max(-1)
    assert (errors < 4e-6).mean() < 0.1


@by_dtype
@pytest.mark.parametrize("options", [PLAIN, CAPPED, WINDOW_AND_SINKS, *INDEXED[:3]])
def test_equals_the_reference_over_many_steps(make: Make, options: AttentionOptions, dtype: torch.dtype) -> None:
    sequences = Sequences.random(LENGTHS, Sizes(6, 2))
    if isinstance(options, Indexed) and dtype == torch.bfloat16:
        sequences = sequences.to(dtype).to(torch.float32)  # rounded queries would select other positions
    outputs = [sequences.attend(CROWD, options, kind, Storage(dtype)) for kind in (make, ReferenceAttention)]
    for native, reference in zip(*outputs, strict=True):
        torch.testing.assert_close(native, reference, atol=0.02 if dtype == torch.bfloat16 else 4e-6, rtol=0)


@by_dtype
@by_case
def test_rows_do_not_depend_on_chunks_neighbours_or_blocks(
    make: Make, sizes: Sizes, block_size: int, options: AttentionOptions, dtype: torch.dtype
) -> None:
    sequences = Sequences.random(LENGTHS, sizes)
    alone = sequences.alone(options, make, Storage(dtype, block_size))
    crowd = sequences.attend(CROWD, options, make, Storage(dtype, block_size, seed=1))
    for one, other in zip(alone, crowd, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [PLAIN, CAPPED, WINDOW_AND_SINKS, INDEXED[0], INDEXED[1]])
def test_sums_are_those_of_the_softmax(make: Make, options: AttentionOptions) -> None:
    """The logarithm of a row's sum, from its highest score on, by both backends and in bfloat16."""
    sequences = Sequences.random([70], Sizes(6, 2))
    found = []
    for kind, dtype in ((make, torch.float32), (ReferenceAttention, torch.float32), (make, torch.bfloat16)):
        sums = torch.full((70, 6, 2), torch.nan)
        sequences.attend([[(0, 0, 70)]], replace(options, sums=sums), kind, Storage(dtype))
        found.append(sums[..., 0] + sums[..., 1].log())
    expected = torch.from_numpy(sequences.log_sums(0, options)).float()
    torch.testing.assert_close(found[0], expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(found[1], expected, atol=2e-5, rtol=0)
    assert ((found[2] - expected).abs() < 0.05).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_of_blocks_with_entries_only_the_last_position_is_seen(make: Make, dtype: torch.dtype) -> None:
    """Rows before the first entry see nothing, and their sums are 0."""
    options = Indexed(0.25, index=IndexOptions(2, block=4, pools="last", entries=True))
    sequences = Sequences.random([40, 20, 9], Sizes(6, 2))
    step = [(s, 0, len(query)) for s, query in enumerate(sequences.query)]
    outputs = []
    for kind in (make, ReferenceAttention):
        sums = torch.full((69, 6, 2), torch.nan)
        outputs.append(sequences.attend([step], replace(options, sums=sums), kind, Storage(dtype)))
        positions = torch.cat([torch.arange(len(query)) for query in sequences.query])
        assert torch.equal(sums[..., 1] == 0, (positions < 3)[:, None].expand(-1, 6))
    for s, (native, reference) in enumerate(zip(*outputs, strict=True)):
        torch.testing.assert_close(native[3:], reference[3:], atol=4e-6, rtol=0)
        np.testing.assert_allclose(native[3:].numpy(), sequences.definition(s, options, dtype)[3:], atol=4e-6)


@by_dtype
def test_an_indexer_that_selects_everything_changes_nothing(make: Make, dtype: torch.dtype) -> None:
    sequences = Sequences.random(LENGTHS, Sizes(6, 2))
    plain = sequences.attend(CROWD, PLAIN, make, Storage(dtype))
    for top in (60, 83):
        indexed = sequences.attend(CROWD, Indexed(PLAIN.scale, index=IndexOptions(top)), make, Storage(dtype))
        for one, other in zip(plain, indexed, strict=True):
            assert torch.equal(one[:top], other[:top])
            assert (one[top:] != other[top:]).any() or len(one) <= top


@by_dtype
@pytest.mark.parametrize("options", [PLAIN, CAPPED, INDEXED[0]])
def test_rows_do_not_depend_on_threads(
    make: Make, kernels: Kernels, kernels_library: Path, options: AttentionOptions, dtype: torch.dtype
) -> None:
    single = Kernels(kernels_library, threads=1, isa=kernels.isa)
    sequences = Sequences.random(LENGTHS, Sizes(9, 3))
    alone = sequences.alone(options, lambda cache: NativeAttention(single, cache), Storage(dtype))
    step = [(s, 0, length) for s, length in enumerate(LENGTHS)]
    for one, other in zip(alone, sequences.attend([step], options, make, Storage(dtype)), strict=True):
        assert torch.equal(one, other)


@by_dtype
@pytest.mark.parametrize(
    ("options", "block_size"),
    [(options, (16, 32)[index % 2]) for index, options in enumerate([*OPTIONS, *LIMITED, *INDEXED[:3]])],
)
def test_a_branch_of_a_tree_is_a_chain(
    make: Make, block_size: int, options: AttentionOptions, dtype: torch.dtype
) -> None:
    sequences = Sequences.random([70, 30, 20], Sizes(6, 2, key_dim=21, value_dim=36))
    check_trees(sequences, options, make, Storage(dtype, block_size))


@by_dtype
@pytest.mark.parametrize("options", [PLAIN, CAPPED, SMALL_CHUNKS_AND_SINKS, INDEXED[0], INDEXED[3]])
def test_what_is_left_in_a_block_does_not_leak(make: Make, options: AttentionOptions, dtype: torch.dtype) -> None:
    sequences = Sequences.random(LENGTHS, Sizes(6, 2, key_dim=20, value_dim=36))
    clean = sequences.attend(CROWD, options, make, Storage(dtype))
    stale = sequences.attend(CROWD, options, make, Storage(dtype, background=torch.nan))
    for one, other in zip(clean, stale, strict=True):
        assert torch.equal(one, other)
    check_trees(Sequences.random([70, 30, 20], Sizes(6, 2)), options, make, Storage(dtype, background=torch.nan))


@by_dtype
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(
    make: Make, dtype: torch.dtype, bad: float, where: str
) -> None:
    options = AttentionOptions(0.25, window=30)
    sequences = Sequences.random([80, 20], Sizes(2, 2))
    good = sequences.attend([[(0, 0, 80), (1, 0, 20)]], options, make, Storage(dtype))
    getattr(sequences, where)[0][25, 1, 3] = bad
    outputs = sequences.attend([[(0, 0, 80), (1, 0, 20)]], options, make, Storage(dtype))
    affected = torch.zeros(80, dtype=torch.bool)
    affected[25:55] = True
    assert torch.equal(outputs[1], good[1])
    assert torch.equal(outputs[0][:, 0], good[0][:, 0])
    assert torch.equal(outputs[0][~affected], good[0][~affected])
    if (where, bad) != ("key", torch.inf):  # where a score may be minus infinity, which is a weight of zero
        assert not outputs[0][affected, 1].isfinite().all(-1).any()


@by_dtype
def test_the_cache_gets_what_the_reference_writes(make: Make, dtype: torch.dtype) -> None:
    sizes = Sizes(2, 2, key_dim=20, value_dim=36)
    sequences = Sequences.random([9], sizes)
    for tensors in (sequences.key, sequences.value):
        rows = tensors[0]
        rows[0] = 0
        rows[1] = 1e-31
        rows[2, 0, 0], rows[2, 1, 1] = torch.nan, torch.inf
        rows[3] = torch.arange(rows[3].numel()).view(rows[3].shape) / 2 - 5  # ties, once scaled by 127
        rows[3, :, 0] = 127
        rows[4] = 1 + 2**-8 * torch.arange(rows[4].numel()).view(rows[4].shape)  # ties of bfloat16
        rows[5] *= 1e37
        rows[6] = 2.0**-56 * torch.linspace(-1.1, 1.1, rows[6].numel()).view(rows[6].shape)  # the smallest in pairs
    shape = sequences.shape
    caches = []
    for kind in (make, ReferenceAttention):
        caches.append(KVCache([shape], 2, 16, dtype, CPU))
        attention = kind(caches[-1])
        batch = make_batch([Chunk(range(9), 0, [1])], 16)
        attention.forward(
            0, sequences.query[0], sequences.key[0], sequences.value[0], OPTIONS[0], attention.prepare(batch)
        )
    for name in ("keys", "values", "key_scales", "value_scales"):
        for native, reference in zip(*(getattr(cache, name) for cache in caches), strict=True):
            torch.testing.assert_close(native, reference, rtol=0, atol=0, equal_nan=True)


def test_a_step_without_tokens(make: Make) -> None:
    sizes = Sizes(4, 2)
    attention = make(KVCache([KVShape(2, 24, 32)], 2, 16, torch.float32, CPU))
    batch = make_batch([Chunk([], 0, [1])], 16)
    empty = Sequences.random([0], sizes)
    output = attention.forward(0, empty.query[0], empty.key[0], empty.value[0], OPTIONS[0], attention.prepare(batch))
    assert output.shape == (0, 4, 32)


def test_other_types_of_cache_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="float16"):
        make(KVCache([KVShape(2, 24, 32)], 2, 16, torch.float16, CPU))
