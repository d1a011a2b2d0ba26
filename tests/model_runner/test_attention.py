"""Paged attention against a float64 definition, and its independence from everything that must not matter."""

import numpy as np
import pytest
import torch

from model_runner.attention.backend import AttentionOptions
from tests.model_runner.oracles.attention import ReferenceAttention
from tests.model_runner.sequences import (
    CHUNKS,
    CROWD,
    INDEXED,
    LENGTHS,
    LIMITED,
    OPTIONS,
    SINKS,
    Sequences,
    Sizes,
    Storage,
    check_trees,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("options", [*OPTIONS, *LIMITED, *INDEXED])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1), (1, 1)])
def test_equals_the_definition(options: AttentionOptions, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    sequences = Sequences.random([1, 70, 16], Sizes(heads, kv_heads))
    outputs = sequences.attend([[(0, 0, 1), (1, 0, 70), (2, 0, 16)]], options, storage=Storage(dtype))
    for index, output in enumerate(outputs):
        np.testing.assert_allclose(output.numpy(), sequences.definition(index, options, dtype), atol=2e-6)


@pytest.mark.parametrize("options", [*OPTIONS, *LIMITED, *INDEXED[:3]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (7, 1), (1, 1)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_do_not_depend_on_chunks_neighbours_or_blocks(
    options: AttentionOptions, heads: int, kv_heads: int, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sequences = Sequences.random(LENGTHS, Sizes(heads, kv_heads))
        alone = sequences.alone(options)
        crowd = sequences.attend(CROWD, options, storage=Storage(seed=1))
        for one, other in zip(alone, crowd, strict=True):
            assert torch.equal(one, other)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("options", [*OPTIONS, *LIMITED, *INDEXED[:3]])
def test_a_branch_of_a_tree_is_a_chain(options: AttentionOptions, dtype: torch.dtype) -> None:
    check_trees(Sequences.random([70, 30, 20], Sizes(6, 2)), options, ReferenceAttention, Storage(dtype))


@pytest.mark.parametrize("wrong", [SINKS, CHUNKS, *INDEXED])
def test_options_that_are_ignored_would_be_found_out(wrong: AttentionOptions) -> None:
    sequences = Sequences.random([70], Sizes(4, 2))
    errors = np.abs(sequences.definition(0, OPTIONS[0]) - sequences.definition(0, wrong)).max((1, 2))
    assert (errors[48:] > 0.01).all()


def test_long_rows_are_cut_into_bounded_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences.random([90], Sizes(2, 1, key_dim=8))
    whole = sequences.attend([[(0, 0, 90)]], OPTIONS[0])[0]
    monkeypatch.setattr("tests.model_runner.oracles.attention._PAIRS_AT_ONCE", 3)
    assert torch.equal(whole, sequences.attend([[(0, 0, 90)]], OPTIONS[0])[0])
