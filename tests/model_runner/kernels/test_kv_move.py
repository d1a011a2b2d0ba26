"""Moving keys and values natively against moving them in torch."""

import random

import pytest
import torch

from model_runner.kernels.library import Kernels
from model_runner.kv_cache import KVCache, KVShape, Move

CPU = torch.device("cpu")
SHAPES = (KVShape(2, 24, 40), KVShape(1, 5, 3), KVShape(3, 16, 16))
NUM_BLOCKS, BLOCK = 12, 32


def filled(dtype: torch.dtype, kernels: Kernels | None) -> KVCache:
    """A cache in which every number is another one."""
    cache = KVCache(SHAPES, NUM_BLOCKS, BLOCK, dtype, CPU, kernels)
    generator = torch.Generator().manual_seed(1)
    for tensor in contents(cache):
        tensor.copy_(torch.randint(-128, 128, tensor.shape, generator=generator))
    return cache


def contents(cache: KVCache) -> list[torch.Tensor]:
    return [*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales]


def accepted_paths(seed: int) -> list[Move]:
    """For each of some choices, nodes in ascending order go to the places after its last token."""
    generator = random.Random(seed)
    blocks = generator.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    moves = []
    for first in range(0, NUM_BLOCKS, 3):
        end = generator.randint(1, 2 * BLOCK)
        nodes = sorted(generator.sample(range(30), generator.randint(0, 8)))
        for depth, node in enumerate(nodes):
            (from_at, from_offset), (to_at, to_offset) = (divmod(end + place, BLOCK) for place in (node, depth))
            if node != depth:
                moves.append(Move(blocks[first + from_at], from_offset, blocks[first + to_at], to_offset))
    return moves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_equal_to_torch(kernels: Kernels, dtype: torch.dtype) -> None:
    for seed in range(20):
        native, reference = filled(dtype, kernels), filled(dtype, None)
        moves = accepted_paths(seed)
        assert moves
        native.move(moves)
        reference.move(moves)
        for one, other in zip(contents(native), contents(reference), strict=True):
            assert torch.equal(one, other)
        before = contents(filled(dtype, None))
        assert all(not torch.equal(one, old) for one, old in zip(contents(native), before, strict=True))


def test_nothing_to_move(kernels: Kernels) -> None:
    cache = filled(torch.float32, kernels)
    cache.move([])
    for one, other in zip(contents(cache), contents(filled(torch.float32, None)), strict=True):
        assert torch.equal(one, other)


def test_a_type_that_the_kernels_cannot_read_is_refused(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="float16"):
        KVCache(SHAPES, NUM_BLOCKS, BLOCK, torch.float16, CPU, kernels)
