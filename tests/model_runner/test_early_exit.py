"""The head on hidden states from between the layers: after the last one, it must say what the model says."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config

from model_runner.batch import prompt_batch
from model_runner.config import Quantization, RunnerConfig
from model_runner.features import LAST, Feature, FeatureTap, layer_input
from model_runner.platforms.choose import choose_platform
from model_runner.scoring.early_exit import EarlyExit, HFEarlyExit, find_early_exit
from model_runner.target import TargetModel

FAMILIES = ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3"]
TOKENS = [1, 17, 203, 5, 88]


def leaving_the_last_layer(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """The result of `run`, and the last layer's output meanwhile."""
    kept: list[Tensor] = []
    layers: Any = model.get_decoder().layers  # type: ignore[operator]
    hook = layers[-1].register_forward_hook(lambda module, arguments, output: kept.append(output[0].clone()))
    logits = run()
    hook.remove()
    return logits, kept[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_after_the_last_layer_it_is_the_models_own_answer(tiny_model: Callable[[str], Path], family: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family)).eval()
    with torch.inference_mode():
        logits, hidden = leaving_the_last_layer(model, lambda: model(torch.tensor([TOKENS])).logits[0])
    early_exit = HFEarlyExit(model)
    assert early_exit.num_layers == 3
    torch.testing.assert_close(early_exit(hidden), logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(early_exit(hidden * torch.rand_like(hidden)), logits, atol=0.1)


def as_served(
    folder: Path, quantization: Quantization, needs: Collection[Feature] = ()
) -> tuple[TargetModel, EarlyExit | None]:
    config = RunnerConfig(folder, device="cpu", quantization=quantization)
    platform = choose_platform(config)
    shape = platform.inspect(folder)
    model = platform.load(folder, shape)
    attention = platform.attention(platform.make_cache(shape.kv, 1, 32))
    return platform.make_target(model, attention, 32, needs), platform.find_early_exit(model)


def without_last_layer(folder: Path, to: Path) -> Path:
    """A checkpoint with the same weights and one layer fewer."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers = model.model.layers[:-1]
    model.config.num_hidden_layers -= 1
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:-1]
    model.save_pretrained(to)
    return to


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "gemma2"])
def test_with_the_model_as_served_to_the_last_bit(
    tiny_model: Callable[[str], Path], tmp_path: Path, family: str, quantization: Quantization
) -> None:
    """The last layer's input gives the logits of a model without that layer."""
    target, early_exit = as_served(tiny_model(family), quantization, (layer_input(2),))
    batch = prompt_batch([TOKENS], 32)
    target.forward(batch)
    hidden = target.features()[layer_input(2)]
    shorter, _ = as_served(without_last_layer(tiny_model(family), tmp_path), quantization)
    logits = shorter.forward(batch)
    assert early_exit is not None
    assert early_exit.num_layers == 3
    assert torch.equal(early_exit(hidden), logits)
    assert torch.equal(early_exit(hidden[2:3]), logits[2:3])


def test_it_leaves_the_model_and_its_taps_alone(tiny_model: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).eval()
    with torch.inference_mode():
        before = model(torch.tensor([TOKENS])).logits
        HFEarlyExit(model)(torch.randn(4, 64))
        tap = FeatureTap(model, (LAST,))
        assert torch.equal(model(torch.tensor([TOKENS])).logits, before)
    assert tap.take()[LAST].shape == (5, 64)


def test_a_model_that_does_not_take_it_is_found_out() -> None:
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=50, n_positions=8, n_embd=32, n_layer=2, n_head=2))
    assert find_early_exit(model.eval()) is not None
    model.transformer.register_forward_hook(lambda module, arguments, output: output.to_tuple())
    assert find_early_exit(model) is None
