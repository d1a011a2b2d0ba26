"""Fewer bits change the answers only a little: distributions stay near the 16-bit ones."""

import pytest
import torch
from torch import Tensor

from tests.gpu.conftest import Load
from tests.gpu.logits import Tracer
from tests.gpu.test_logits import make_prompts

CUDA = pytest.mark.cuda_only
CASES = [
    pytest.param({"quantization": "fp8"}, 0.04, id="fp8", marks=CUDA),
    pytest.param({"quantization": "fp8", "exact": False}, 0.04, id="fp8-fast", marks=CUDA),
    pytest.param({"quantization": "int4"}, 0.2, id="int4"),
    pytest.param({"quantization": "int4", "exact": False}, 0.2, id="int4-fast", marks=CUDA),
    pytest.param({"kv_cache_dtype": "fp8"}, 0.02, id="fp8-kv", marks=CUDA),
    pytest.param({"exact": False}, 0.001, id="fast", marks=CUDA),
]
"""Settings, and the Kullback-Leibler divergence allowed on average, in nats.

Rounding this model's weights and rows to e4m3 in plain torch gives 0.031.
"""


def divergence(expected: Tensor, found: Tensor) -> float:
    """Mean divergence of each row's distribution from the expected one [rows, vocab]."""
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


@pytest.mark.parametrize(("settings", "bound"), CASES)
def test_distributions_stay_near(
    settings: dict[str, object], bound: float, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(4)
    traced = [
        torch.cat([trace.logits for trace in Tracer(load("wide", **one).runner, monkeypatch).trace(prompts)])
        for one in ({}, settings)
    ]
    found = divergence(*traced)
    assert 0 < found < bound
    shuffled = traced[1][torch.randperm(len(traced[1]), generator=torch.Generator().manual_seed(0))]
    assert divergence(traced[0], shuffled) > 5 * bound  # the bound is no triviality
