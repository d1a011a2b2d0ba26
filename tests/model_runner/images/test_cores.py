"""A tower's cores: attention has the same bits in any number of threads, or uses one."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_runner.images.cores import SharedAttention, TowerCores
from model_runner.kernels.library import Kernels

NUM_THREADS = 4


@pytest.fixture
def cores(kernels_library: Path) -> Iterator[TowerCores]:
    """Cores that no step uses. The calling thread computes features, with one thread of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    made = TowerCores(Kernels(kernels_library, 1))
    made.take()
    yield made
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_the_same_bits_in_any_number_of_threads(cores: TowerCores, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    for heads, width, places, masked in itertools.product((1, 3, 16), (24, 64, 72, 80), (1, 49, 257), (False, True)):
        drawn = torch.randn(3, 1, places, heads, width, generator=draw).to(dtype)
        query, key, value = drawn.transpose(2, 3)
        mask = torch.randn(places, places, generator=draw).to(dtype) if masked else None
        alone = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        with SharedAttention(cores):
            shared = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        assert torch.equal(alone, shared)
    assert cores._shares_attention


def test_attention_that_depends_on_threads_uses_one(cores: TowerCores, caplog: pytest.LogCaptureFixture) -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query + 1e-6 * torch.get_num_threads()

    query = torch.zeros(1, 2, 8, 16)
    for _ in range(2):
        assert torch.equal(cores.attend(attention, (query, query, query), {}), attention(query, query, query))
    assert caplog.text.count("depends on the number of threads") == 1
