"""Hidden states taken from a target's forward pass, against what transformers reports."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model_runner.config import RunnerConfig
from model_runner.features import LAST, FeatureTap, layer_input
from model_runner.refusal import UnsupportedModelError
from model_runner.training.examples import TargetForTraining

TOKENS = [1, 17, 203, 5, 88, 45, 300, 2]
NEEDS = (LAST, layer_input(0), layer_input(2))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_features_are_the_hidden_states_of_transformers(tiny_model: Callable[[str], Path], family: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family)).eval()
    tap = FeatureTap(model, NEEDS)
    with torch.no_grad():
        output = model(torch.tensor([TOKENS]), output_hidden_states=True, logits_to_keep=1)
    taken = tap.take()
    assert set(taken) == set(NEEDS)
    assert torch.equal(taken[layer_input(0)], output.hidden_states[0][0])
    assert torch.equal(taken[layer_input(2)], output.hidden_states[2][0])
    assert torch.equal(taken[LAST], output.hidden_states[-1][0])
    assert tap.take() == {}


@pytest.mark.parametrize("quantization", ["int8", "none"])
def test_features_of_the_model_as_served(tiny_model: Callable[[str], Path], quantization: str) -> None:
    """With layers of ours in place of transformers', whose numbers are rounded to integers in int8."""
    folder = tiny_model("llama")
    served = TargetForTraining(RunnerConfig(folder, device="cpu", quantization=quantization), NEEDS, 64)  # type: ignore[arg-type]
    taken = served.features(TOKENS)
    again = served.features(TOKENS)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        output = model(torch.tensor([TOKENS]), output_hidden_states=True)
    for need, index in zip(NEEDS, (-1, 0, 2), strict=True):
        expected = output.hidden_states[index][0]
        error = (taken[need] - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() < (0.05 if quantization == "int8" else 1e-3)
        assert torch.equal(taken[need], again[need])


def test_a_tap_that_needs_nothing_or_is_closed_leaves_the_model_alone(tiny_model: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).eval()

    def num_hooks() -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    before = num_hooks()
    FeatureTap(model, ())
    assert num_hooks() == before
    tap = FeatureTap(model, NEEDS)
    assert num_hooks() == before + 3
    tap.close()
    assert num_hooks() == before


def test_layers_that_are_not_there_are_refused(tiny_model: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).eval()
    with pytest.raises(UnsupportedModelError, match="need the input of layer 9, but the model has only 3 layers"):
        FeatureTap(model, (layer_input(9),))
