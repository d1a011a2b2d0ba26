"""Embeddings are looked up as they are stored, with the values that they have in float32."""

import numpy as np
import pytest
import torch
from torch import Tensor

from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.kernels.library import Kernels, ModelPass, embedding_struct
from model_runner.speculative.growing import GrowthLimits
from model_runner.speculative.heads import HydraProposer
from tests.model_runner.kernels.drafting import CASES, choice_step, prepared, random_features, random_heads, target_step
from tests.model_runner.kernels.drafting import random_embedding as embedding_of
from tests.model_runner.kernels.test_block_formats import name, random_blocks

HIDDEN = 256
TOKENS = np.array([3, 0, 19, 3], np.int32)


def states(kernels: Kernels, embedding: CData, scale: float = 1.0) -> Tensor:
    """The normed embeddings of TOKENS, times a scale before the norm, by a model without layers."""
    head, norm = kernels.pack("int8", torch.zeros(16, HIDDEN)), torch.ones(HIDDEN)
    parts = {"embedding": embedding[0], "norm": pointer(norm, HIDDEN), "head": head.struct[0]}
    model = CPU.new("SwModel", hidden=HIDDEN, embedding_scale=scale, norm_eps=0.5, **parts)
    last = torch.empty(len(TOKENS), HIDDEN)
    wanted = ModelPass(TOKENS, np.zeros(0, np.int32), torch.empty(0, 16), last=last)
    kernels.forward(model, CPU.new("SwStep", num_tokens=len(TOKENS)), wanted)
    return last


@pytest.mark.parametrize("number", [2, 8, 12, 14, 20], ids=name)
def test_blocks(kernels: Kernels, number: int) -> None:
    blocks = torch.from_numpy(random_blocks(number, 20, HIDDEN)).clone()
    values = kernels.unpack(number, blocks, HIDDEN)
    expected = states(kernels, embedding_struct(values), 1.5)
    assert torch.equal(states(kernels, embedding_struct(blocks, number), 1.5), expected)
    assert not torch.equal(states(kernels, embedding_struct(blocks, number), 1.25), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(kernels: Kernels, dtype: torch.dtype) -> None:
    table = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    values = table.float()
    assert torch.equal(states(kernels, embedding_struct(table)), states(kernels, embedding_struct(values)))


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"embedding in torch\.float64 cannot be looked up"):
        embedding_struct(torch.zeros(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="take contiguous numbers"):
        embedding_struct(torch.zeros(3, 8, dtype=torch.uint8)[:, :4], 12)


def test_drafts(kernels: Kernels) -> None:
    case = CASES[0]
    step = target_step([choice_step(index, 12) for index in range(5)], random_features(case))
    embedding = embedding_of(case)
    stored = embedding.weight.detach().bfloat16()
    embedding.weight.data = stored.float()
    proposer = HydraProposer(prepared(kernels, random_heads(case)), embedding, GrowthLimits(case.depth))
    expected = proposer.propose(step)
    assert proposer._native_draft is not None
    proposer._native_draft.embedding = embedding_struct(stored)[0]
    assert proposer.propose(step) == expected
    doubled = stored * 2
    proposer._native_draft.embedding = embedding_struct(doubled)[0]
    assert proposer.propose(step) != expected
