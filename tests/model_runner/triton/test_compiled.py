"""Compiled decoder layers against the same uncompiled."""

from collections.abc import Iterator
from functools import partialmethod

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from model_runner.cuda.layer import compile_layers, replace_layers
from model_runner.kv_cache import KVCache, KVShape
from model_runner.modules.attention import ATTENTION_NAME, paged_attention, register_attention
from model_runner.modules.target import HFTargetModel
from tests.conftest import tiny_config
from tests.model_runner.oracles.attention import ReferenceAttention
from tests.model_runner.triton.layers import BLOCK, NUM_BLOCKS, Step, TorchProduct, step_batch

STEPS: list[Step] = [[(0, 0, 18), (1, 0, 3)], [(0, 18, 19)], [(0, 19, 20), (1, 3, 9)]]


@pytest.fixture(autouse=True)
def nothing_compiled_stays() -> Iterator[None]:
    yield
    torch.compiler.reset()
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def served_model(family: str, device: torch.device) -> PreTrainedModel:
    register_attention()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family)).to(device).eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def logits(model: PreTrainedModel, device: torch.device) -> list[Tensor]:
    """After each of the steps."""
    config = model.config
    dim = config.hidden_size // config.num_attention_heads
    shapes = [KVShape(config.num_key_value_heads, dim, dim)] * config.num_hidden_layers
    attention = ReferenceAttention(KVCache(shapes, NUM_BLOCKS, BLOCK, torch.float32, device))
    target = HFTargetModel(model, attention)
    return [target.forward(step_batch(step)) for step in STEPS]


@pytest.mark.filterwarnings("ignore")  # of torch's own making, in its compiler
def test_experts_compiled(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":  # g++ takes minutes: what is captured is run as it is
        monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    model = served_model("mixtral", device)
    expected = logits(model, device)
    assert compile_layers(model) == model.config.num_hidden_layers
    counters.clear()
    for one, other in zip(logits(model, device), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] > 0
    logits(model, device)
    compiled = counters["frames"]["total"]
    logits(model, device)
    assert counters["frames"]["total"] == compiled  # nothing anew for what was seen


def test_nothing_is_left_to_compile(device: torch.device) -> None:
    model = served_model("llama", device)
    assert replace_layers(model, TorchProduct) == model.config.num_hidden_layers
    assert compile_layers(model) == 0
