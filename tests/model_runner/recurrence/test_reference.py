"""The reference against transformers, and its exactness."""

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn, mamba2_chunk_scan
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from model_runner.recurrence.states import RecurrentShape
from tests.model_runner.oracles.recurrence import ReferenceRecurrence
from tests.model_runner.recurrence.exactness import ExactnessTests, whole
from tests.model_runner.recurrence.streams import GDN, KDA, SSD, Inputs, MakeBackend, World


@pytest.fixture
def make() -> MakeBackend:
    return ReferenceRecurrence


class TestReference(ExactnessTests):
    """In plain torch."""


def own(shape: RecurrentShape, inputs: Inputs) -> Tensor:
    """[n, heads, value_dim]."""
    return whole(shape, ReferenceRecurrence, inputs).recurrent.unflatten(1, (shape.heads, -1))


@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_gated_delta_net_is_transformers(rule: str) -> None:
    inputs = Inputs.random(GDN, 80, 3)
    rows = (inputs.query * GDN.key_dim**0.5, inputs.key, inputs.value, inputs.log_decay, inputs.beta)
    [expected] = getattr(qwen3_next, rule)(*(row[None] for row in rows))[0]
    torch.testing.assert_close(own(GDN, inputs), expected, atol=1e-5, rtol=1e-5)


def test_kda_is_transformers() -> None:
    inputs = Inputs.random(KDA, 80, 3)
    rows = (inputs.query * KDA.key_dim**0.5, inputs.key, inputs.value, inputs.log_decay, inputs.beta)
    [expected] = recurrent_kimi_delta_attention(*(row[None] for row in rows), None, False)[0]
    torch.testing.assert_close(own(KDA, inputs), expected, atol=1e-5, rtol=1e-5)


def test_mamba2_is_transformers() -> None:
    inputs = Inputs.random(SSD, 80, 3)
    dt = inputs.beta + 0.1
    a = -torch.rand(SSD.heads, generator=torch.Generator().manual_seed(0))
    [expected] = mamba2_chunk_scan(inputs.value[None], dt[None], a, inputs.key[None], inputs.query[None], 16)
    ours = Inputs(inputs.query, inputs.key, inputs.value * dt[..., None], a * dt, inputs.beta, inputs.x)
    torch.testing.assert_close(own(SSD, ours), expected, atol=1e-5, rtol=1e-5)


def test_lightning_has_a_constant_decay() -> None:
    inputs = Inputs.random(SSD, 80, 3)
    slopes = torch.linspace(0.01, 1, SSD.heads)
    ours = Inputs(inputs.query, inputs.key, inputs.value, -slopes.expand(80, SSD.heads), inputs.beta, inputs.x)
    distance = torch.arange(80)[:, None] - torch.arange(80)
    weights = (-slopes[:, None, None] * distance).exp().tril()  # [heads, 80, 80]
    scores = torch.einsum("qhd,khd->hqk", *(t.repeat_interleave(3, 1) for t in (inputs.query, inputs.key)))
    expected = torch.einsum("hqk,khd->qhd", scores * weights, inputs.value)
    torch.testing.assert_close(own(SSD, ours), expected, atol=1e-5, rtol=1e-5)


def test_convolution_is_transformers() -> None:
    inputs, world = Inputs.random(GDN, 80, 3), World(GDN, ReferenceRecurrence)
    [expected] = causal_conv1d_fn(inputs.x.T[None], world.weight, world.bias, activation="silu")
    torch.testing.assert_close(whole(GDN, ReferenceRecurrence, inputs).conv, expected.T, atol=1e-5, rtol=1e-5)
