"""The CUDA attention against its definition and the reference, and that nothing changes it which must not."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from model_runner.attention import trial
from model_runner.attention import triton as backend
from model_runner.attention.backend import AttentionOptions
from model_runner.attention.trial import first_difference
from model_runner.attention.triton import TritonAttention, TritonMetadata
from model_runner.batch import Batch
from model_runner.kv_cache import KVCache, KVShape
from tests.model_runner.batches import Chunk, make_batch
from tests.model_runner.oracles.attention import ReferenceAttention
from tests.model_runner.sequences import (
    CHUNKS,
    CPU,
    OPTIONS,
    SINKS,
    SMALL_CHUNKS_AND_SINKS,
    WINDOW_AND_SINKS,
    Sequences,
    Sizes,
    Storage,
    check_trees,
    sinks_of,
)
from tests.model_runner.spans import OPTIONS as SPANNED
from tests.model_runner.spans import attend, definition
from tests.model_runner.triton.hopper import compiled_in

FP8 = torch.float8_e4m3fn
PLAIN, NARROW, _, CAPPED = OPTIONS
LENGTHS = [67, 40, 1]
CROWD = [[(0, 0, 7), (2, 0, 1)], [(0, 7, 50), (1, 0, 16)], [(1, 16, 40), (0, 50, 66)], [(0, 66, 67)]]
SMALL = Sizes(6, 2, key_dim=16, value_dim=32)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
CASES = [  # sizes, type of the queries, of the cache, options
    (Sizes(4, 4, 64, 64), torch.float32, torch.float32, PLAIN),
    (Sizes(6, 2, 24, 36), torch.float32, torch.float32, NARROW),
    (Sizes(7, 1, 80, 96), torch.float32, torch.float32, CAPPED),
    (Sizes(4, 2, 128, 128), torch.bfloat16, torch.bfloat16, PLAIN),
    (Sizes(6, 2, 96, 80), torch.bfloat16, torch.bfloat16, CAPPED),
    (Sizes(2, 1, 256, 256), torch.bfloat16, torch.bfloat16, CAPPED),
    (Sizes(4, 2, 64, 64), torch.float16, torch.float16, NARROW),
    (Sizes(6, 2, 64, 64), torch.float32, torch.int8, CAPPED),
    (Sizes(6, 2, 64, 64), torch.bfloat16, torch.int8, PLAIN),
    (Sizes(6, 2, 64, 64), torch.float32, FP8, PLAIN),
    (Sizes(6, 2, 64, 64), torch.float16, FP8, CAPPED),
    (Sizes(6, 2, 24, 36), torch.float32, torch.float32, SINKS),
    (Sizes(4, 2, 64, 64), torch.bfloat16, torch.bfloat16, WINDOW_AND_SINKS),
    (Sizes(6, 2, 64, 64), torch.bfloat16, torch.int8, SMALL_CHUNKS_AND_SINKS),
    (Sizes(6, 2, 24, 36), torch.float32, torch.float32, CHUNKS),
]

Make = Callable[[KVCache], TritonAttention]
Making = Callable[..., Make]
STORAGES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.int8)]
"""Types of the queries and of the cache."""


def in_turn(*options: AttentionOptions) -> pytest.MarkDecorator:
    """Each of the options, and each of the storages: the interpreter is too slow for all pairs."""
    cases = [(*STORAGES[index % 3], options[index % len(options)]) for index in range(max(3, len(options)))]
    return pytest.mark.parametrize(("dtype", "stored", "options"), cases)


def make(heads: int, *, exact: bool = True, programs: int = 4) -> Make:
    return lambda cache: TritonAttention(cache, exact=exact, num_heads=heads, num_programs=programs)


@pytest.fixture
def storage(device: torch.device) -> Storage:
    return Storage(device=device, whole_keys=True)


@pytest.mark.parametrize(
    ("sizes", "dtype", "stored", "options", "exact"),
    [*((*case, True) for case in CASES), *((*case, False) for case in CASES[1::4])],
)
def test_equals_the_definition(
    storage: Storage, sizes: Sizes, dtype: torch.dtype, stored: torch.dtype, options: AttentionOptions, exact: bool
) -> None:
    sequences = Sequences.random([1, 50, 16], sizes).to(dtype)
    step = [(0, 0, 1), (1, 0, 50), (2, 0, 16)]
    outputs = sequences.attend([step], options, make(sizes.heads, exact=exact), replace(storage, dtype=stored))
    for index, output in enumerate(outputs):
        expected = sequences.definition(index, options, stored)
        np.testing.assert_allclose(output.double().numpy(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("options", "stored"), [(PLAIN, torch.float32), (CAPPED, torch.int8), (WINDOW_AND_SINKS, torch.float32)]
)
def test_equals_the_reference_over_many_steps(storage: Storage, options: AttentionOptions, stored: torch.dtype) -> None:
    sequences = Sequences.random(LENGTHS, SMALL)
    outputs = sequences.attend(CROWD, options, make(6), replace(storage, dtype=stored))
    references = sequences.attend(CROWD, options, ReferenceAttention, Storage(stored))
    for output, reference in zip(outputs, references, strict=True):
        torch.testing.assert_close(output, reference, atol=4e-6, rtol=0)


@in_turn(PLAIN, SMALL_CHUNKS_AND_SINKS, CAPPED)
def test_rows_do_not_depend_on_chunks_neighbours_or_blocks(
    storage: Storage, dtype: torch.dtype, stored: torch.dtype, options: AttentionOptions
) -> None:
    sequences = Sequences.random(LENGTHS, SMALL).to(dtype)
    storage = replace(storage, dtype=stored)
    alone = sequences.alone(options, make(6), storage)
    crowd = sequences.attend(CROWD, options, make(6, programs=2), replace(storage, seed=1, background=torch.nan))
    for one, other in zip(alone, crowd, strict=True):
        assert torch.equal(one, other)


SPANS = {0: [(5, 9), (100, 262)], 1: [(0, 20)]}
"""One begins in the first split of keys and ends in the second."""


def test_rows_of_a_span_see_its_end(storage: Storage) -> None:
    options = replace(SPANNED, window=70)
    sequences = Sequences.random([264, 24], Sizes(1, 1, 16, 16))
    whole, parts = [[(0, 0, 264), (1, 0, 24)]], [[(1, 0, 20), (0, 0, 70)], [(0, 70, 263), (1, 20, 24)], [(0, 263, 264)]]
    together = attend(make(1), sequences, SPANS, whole, options, storage)
    apart = attend(make(1, programs=8), sequences, SPANS, parts, options, replace(storage, seed=1))
    causal = attend(make(1, programs=8), sequences, SPANS, whole, replace(options, sees_spans=False), storage)
    for index, (one, other, plain) in enumerate(zip(together, apart, causal, strict=True)):
        assert torch.equal(one, other)
        expected = definition(sequences, SPANS, index, options, torch.float32)
        np.testing.assert_allclose(one.numpy(), expected, atol=2e-5)
        expected = sequences.definition(index, replace(options, sees_spans=False))
        np.testing.assert_allclose(plain.numpy(), expected, atol=2e-5)


@in_turn(PLAIN, AttentionOptions(0.25, window=300, softcap=3.0), replace(SINKS, window=300), replace(SINKS, chunk=500))
def test_rows_do_not_depend_on_how_their_splits_are_shared_out(
    monkeypatch: pytest.MonkeyPatch,
    storage: Storage,
    dtype: torch.dtype,
    stored: torch.dtype,
    options: AttentionOptions,
) -> None:
    """The last of 650 tokens together and one by one, whole and in splits, over one program or many."""
    sequences = Sequences.random([650], Sizes(3, 1, key_dim=16, value_dim=16)).to(dtype)
    storage = replace(storage, dtype=stored, num_blocks=60)
    [table] = storage.tables([650])
    query = sequences.query[0].to(storage.device)
    options = sinks_of(options, 3, storage.device)
    outputs = []
    for programs, parts, room in ((64, [640, 650], 0), (1, [640, 641, 650], 2**20), (64, [640, 645, 649, 650], 2**20)):
        monkeypatch.setattr(backend, "_PARTIAL_SUMS", room)
        attention = make(3, programs=programs)(storage.cache(sequences.shape))
        _filled(attention, sequences, [table])
        rows = []
        for start, end in pairwise(parts):
            metadata = attention.prepare(make_batch([Chunk(range(end - start), start, table)], 16))
            assert metadata.has_merges == (room > 0)
            rows.append(attention.attend(0, query[start:end], options, metadata).cpu())
        outputs.append(torch.cat(rows))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    expected, tolerance = sequences.definition(0, options, stored)[640:], TOLERANCE[dtype]
    np.testing.assert_allclose(outputs[0].double().numpy(), expected, atol=tolerance, rtol=tolerance)


def test_queries_of_a_wider_type_than_the_cache_are_rounded_to_it(storage: Storage) -> None:
    wide = Sequences.random([40, 1], SMALL)
    step, storage = [(0, 0, 40), (1, 0, 1)], replace(storage, dtype=torch.bfloat16)
    outputs = wide.attend([step], PLAIN, make(6), storage)
    for output, narrow in zip(outputs, wide.to(torch.bfloat16).attend([step], PLAIN, make(6), storage), strict=True):
        assert output.dtype == torch.float32
        assert torch.equal(output, narrow.float())


def test_tiles_are_cut_where_programs_would_wait(monkeypatch: pytest.MonkeyPatch, storage: Storage) -> None:
    cache = replace(storage, num_blocks=60).cache(KVShape(1, 16, 16))
    batch = make_batch([Chunk([0], 649, list(range(41))), Chunk([0] * 40, 0, [50, 51, 52])], 16)
    plan = make(3, programs=64)(cache).plan(batch)
    assert plan.items[:, 6:8].tolist() == [[0, 1], [1, 2], [2, 3], [0, 1], [0, 1]]
    assert plan.merges.tolist() == [[0, 1, 649, 3, 0, 0]]
    monkeypatch.setattr(backend, "_PARTIAL_SUMS", 16 * 8)  # one row less than it takes
    plan = make(3, programs=64)(cache).plan(batch)
    assert plan.items[:, 6:8].tolist() == [[0, 3], [0, 1], [0, 1]]
    assert len(plan.merges) == 0


@in_turn(CAPPED, SMALL_CHUNKS_AND_SINKS)
def test_a_branch_of_a_tree_is_a_chain(
    storage: Storage, dtype: torch.dtype, stored: torch.dtype, options: AttentionOptions
) -> None:
    sequences = Sequences.random([50, 7, 5], SMALL).to(dtype)
    check_trees(sequences, options, make(6), replace(storage, dtype=stored, background=torch.nan))


def test_a_tree_across_a_split(storage: Storage) -> None:
    sequences = Sequences.random([262], Sizes(1, 1, 16, 16))
    tree = [-1, 0, 0, 2, 3, 4, -1, 6]  # from position 254
    outputs = sequences.attend([[(0, 0, 254)], [(0, 254, 262, tree)]], PLAIN, make(1, programs=8), storage)
    paths = Chunk(tree, 254, [], tree).paths()
    for leaf in (5, 7):
        tokens = [254 + token for token in paths[leaf]]
        chain = sequences.branch(0, [*range(254), *tokens])
        assert torch.equal(outputs[0][tokens], chain.alone(PLAIN, make(1), storage)[0][254:])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the interpreter meets NaN
@pytest.mark.parametrize(
    ("bad", "where", "stored"),
    [(torch.nan, "key", torch.float32), (torch.nan, "value", torch.int8), (torch.inf, "value", torch.float32)],
)
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(
    storage: Storage, stored: torch.dtype, bad: float, where: str
) -> None:
    options = AttentionOptions(0.25, window=30)
    sequences = Sequences.random([64, 20], Sizes(2, 2, 16, 16))
    step, storage = [(0, 0, 64), (1, 0, 20)], replace(storage, dtype=stored)
    good = sequences.attend([step], options, make(2), storage)
    getattr(sequences, where)[0][25, 1, 3] = bad
    outputs = sequences.attend([step], options, make(2), storage)
    affected = torch.zeros(64, dtype=torch.bool)
    affected[25:55] = True
    assert torch.equal(outputs[1], good[1])
    assert torch.equal(outputs[0][:, 0], good[0][:, 0])
    assert torch.equal(outputs[0][~affected], good[0][~affected])
    if (where, bad) != ("key", torch.inf):  # where a score may be minus infinity, which is a weight of zero
        assert not outputs[0][affected, 1].isfinite().all(-1).any()


def _filled(attention: TritonAttention, sequences: Sequences, tables: list[list[int]]) -> None:
    """The keys and values of all sequences go into the cache."""
    batch = make_batch([Chunk(range(len(t)), 0, b) for t, b in zip(sequences.query, tables, strict=True)], 16)
    blocks, offsets = torch.from_numpy(batch.block_of), torch.from_numpy(batch.offset_of)
    device = attention.cache.keys[0].device
    rows = (torch.cat(tensors).to(device) for tensors in (sequences.key, sequences.value))
    attention.cache.write(0, *rows, blocks.to(device), offsets.to(device))


@pytest.mark.parametrize("exact", [True, False])
def test_reserved_tensors_take_one_plan_after_the_other(storage: Storage, exact: bool) -> None:
    sequences = Sequences.random([300, 40], SMALL)
    storage = replace(storage, num_blocks=30)
    tables = storage.tables([300, 40])
    attention = make(6, exact=exact, programs=64)(storage.cache(sequences.shape))
    _filled(attention, sequences, tables)
    reserved = attention.reserve(8, max_blocks=19)
    address = reserved.plan.data_ptr(), reserved.slots.data_ptr()
    steps: list[list[Any]] = [
        [Chunk([0], 299, tables[0]), Chunk([0, 0], 38, tables[1])],
        [Chunk([0] * 4, 30, tables[1], [-1, 0, -1, 2])],
        [Chunk([0] * 8, 290, tables[0])],
    ]
    for chunks in steps:
        batch = make_batch(chunks, 16)
        plan, tokens = attention.plan(batch), len(batch.tokens)
        query = torch.randn(8, 6, 16, device=storage.device)
        reserved.load(plan)
        output = attention.attend(0, query, CAPPED, reserved)
        expected = attention.attend(0, query[:tokens], CAPPED, attention.upload(plan))
        assert torch.equal(output[:tokens], expected)
        assert not output[tokens:].any()
        assert torch.equal(attention.attend(0, query[:tokens], CAPPED, reserved), expected)
        slots = batch.block_of * 16 + batch.offset_of
        assert reserved.slots.tolist() == [*slots.tolist(), *[-1] * (8 - tokens)]
    assert address == (reserved.plan.data_ptr(), reserved.slots.data_ptr())
    with pytest.raises(ValueError, match="room for 8 tokens"):
        reserved.load(attention.plan(make_batch([Chunk([0] * 9, 0, tables[0])], 16)))
    if not exact:
        with pytest.raises(ValueError, match="tiles of 16 rows, not 128"):
            reserved.load(attention.plan(make_batch([Chunk([0] * 40, 0, tables[0])], 16)))


def test_queries_may_be_part_of_a_wider_product(storage: Storage) -> None:
    sequences = Sequences.random([20], SMALL)
    attention = make(6)(storage.cache(sequences.shape))
    tables = storage.tables([20])
    _filled(attention, sequences, tables)
    metadata = attention.prepare(make_batch([Chunk(range(20), 0, tables[0])], 16))
    wide = torch.randn(20, 10, 16, device=storage.device)
    output = attention.attend(0, wide[:, 2:8], PLAIN, metadata)
    assert torch.equal(output, attention.attend(0, wide[:, 2:8].contiguous(), PLAIN, metadata))


def test_a_step_without_tokens(storage: Storage) -> None:
    attention = make(4)(storage.cache(KVShape(2, 24, 32)))
    empty = Sequences.random([0], Sizes(4, 2)).to(torch.float32)
    rows = (t[0].to(storage.device) for t in (empty.query, empty.key, empty.value))
    output = attention.forward(0, *rows, PLAIN, attention.prepare(make_batch([Chunk([], 0, [1])], 16)))
    assert output.shape == (0, 4, 32)


def test_what_it_cannot_read_is_refused() -> None:
    with pytest.raises(ValueError, match="only caches with whole keys"):
        make(4)(Storage(device=CPU, whole_keys=False).cache(KVShape(2, 16, 16)))
    with pytest.raises(ValueError, match="a key-value head has 65 heads"):
        make(65)(Storage(device=CPU, whole_keys=True).cache(KVShape(1, 16, 16)))


@pytest.mark.hopper
def test_compiles_for_hopper() -> None:
    compiled = compiled_in("tests.model_runner.triton.compile_attention")
    assert {kernel.name for kernel in compiled} == {"_attend_kernel", "_merge_kernel"}
    assert max(kernel.spilled for kernel in compiled) <= 144  # bytes of a thread, as measured


def test_the_trial_at_the_start_compares_keys_that_are_split_with_keys_that_are_not(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an exact backend they agree, here and on a GPU."""
    if device.type == "cpu":  # the interpreter is slow
        monkeypatch.setattr(trial, "_POSITIONS", (290,))
    cache = KVCache([KVShape(1, 16, 16, 4)], 12, 32, torch.bfloat16, device, whole_keys=True)
    attention = make(4, programs=1)(cache)
    layouts: list[list[tuple[str, bool]]] = []
    plain = attention.layouts

    def noting(batch: Batch) -> Mapping[str, TritonMetadata]:
        made = plain(batch)
        layouts.append([(name, metadata.has_merges) for name, metadata in made.items()])
        return made

    attention.layouts = noting  # type: ignore[method-assign]
    assert first_difference(attention, cache, torch.bfloat16) is None
    assert [("keys split", True), ("keys not split", False)] in layouts
