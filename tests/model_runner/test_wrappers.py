"""Models for images or sounds that run natively: their text is their language model's, and is read from their files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench.tiny_models import VOCAB_SIZE, auto_class, write_tiny_model
from model_runner.spec.families import WRAPPERS, find_family
from model_runner.spec.model_folder import open_checkpoint
from model_runner.spec.model_spec import ModelSpec, read_model_spec
from model_runner.weights.checkpoint import TensorCheckpoint
from model_runner.weights.interleaved_experts import deinterleave_experts

TYPES = ["gemma3", "idefics3", "llava", "nemotron_h_omni", "qianfan_ocr"]
"""One for each way in which files name the weights, and for each place of the head."""


def language_model(model: Any) -> dict[str, Tensor]:
    """The weights of a model's decoder and head, by the names of a model for text alone."""
    decoder = model.get_decoder().state_dict()
    tensors = {
        f"model.{name.removeprefix('model.')}": tensor for name, tensor in decoder.items() if "lm_head" not in name
    }
    [head] = [module for name, module in model.named_modules() if name.endswith("lm_head")]
    return tensors | {"lm_head.weight": head.weight.detach()}


def weights_of(spec: ModelSpec) -> list[Tensor]:
    norms = [layer.norms for layer in spec.layers]
    small = [norm for one in norms for norm in (one.attention, one.mlp, one.query, one.key) if norm is not None]
    angles = [frequencies.angles for frequencies in spec.frequencies.values()]
    return [spec.embedding.read(), spec.norm, *small, *angles, *(linear.weight for linear in spec.linears)]


@pytest.mark.parametrize("model_type", TYPES)
def test_the_text_is_the_language_models(model_type: str, tmp_path: Path) -> None:
    write_tiny_model(model_type, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    whole = auto_class(config).from_pretrained(tmp_path).eval()
    text = AutoModelForCausalLM.from_config(config.get_text_config()).eval()
    text.load_state_dict(language_model(whole))
    tokens = torch.randint(3, VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(whole(input_ids=tokens).logits, text(input_ids=tokens).logits)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint is not None
    found = read_model_spec(config, checkpoint)
    expected = read_model_spec(text.config, deinterleave_experts(TensorCheckpoint(text.state_dict())))
    assert found is not None
    assert expected is not None
    for one, other in zip(weights_of(found), weights_of(expected), strict=True):
        assert torch.equal(one, other)
    for name in ("embedding_scale", "norm_eps", "logits_scale", "logits_softcap", "rotary_kinds"):
        assert getattr(found, name) == getattr(expected, name), name


def test_a_language_model_of_another_family_is_not_native() -> None:
    assert find_family("llava", "llama") == find_family("llama", "llama")
    assert find_family("llava", "olmo2") is None
    assert find_family("paligemma", "gemma") is None  # its images see each other
    assert find_family("gemma3", "gemma3_text") != find_family("gemma3_text", "gemma3_text")
    assert set(TYPES) <= WRAPPERS.keys()
