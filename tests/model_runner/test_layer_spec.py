"""Decoder layers of transformers against the form they are recognised as."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from model_runner.models.families import LAYER_FAMILIES
from model_runner.models.layer_spec import LayerSpec
from model_runner.models.recognition import recognise, replace_recognised
from tests.model_runner.decoder_models import CASES, HYBRIDS, layer_runs, tiny_model
from tests.model_runner.decoder_oracle import run_form, with_up_first

TOKENS = 90  # beyond the windows, and beyond the original length of scaled rotary positions


def form_of(layer: nn.Module) -> LayerSpec:
    spec = recognise(layer)
    assert spec is not None
    return spec


@pytest.mark.parametrize("case", CASES)
def test_the_form_computes_what_the_layer_does(case: str) -> None:
    runs = layer_runs(tiny_model(case), TOKENS)
    assert len(runs) == 4
    for run in runs:
        answer = run_form(form_of(run.layer), run.hidden, run.cos_sin)
        torch.testing.assert_close(run.answer, answer.float(), rtol=1e-5, atol=1e-5)


def test_every_family_has_a_case() -> None:
    classes = {type(layer) for case in [*CASES, *HYBRIDS] for layer in tiny_model(case).model.layers}
    assert {f"{layer.__module__}.{layer.__qualname__}" for layer in classes} == set(LAYER_FAMILIES)


def with_attention(**changes: Any) -> Callable[[LayerSpec], LayerSpec]:
    return lambda spec: replace(spec, mixer=replace(spec.mixer, options=replace(spec.mixer.options, **changes)))


def with_norms(**changes: Any) -> Callable[[LayerSpec], LayerSpec]:
    return lambda spec: replace(spec, norms=replace(spec.norms, **changes))


def with_experts(**changes: Any) -> Callable[[LayerSpec], LayerSpec]:
    return lambda spec: replace(spec, experts=replace(spec.experts, **changes))


@pytest.mark.parametrize(
    ("case", "layer", "spoil"),
    [
        ("gemma2", 0, with_attention(window=None)),
        ("gemma2", 0, with_attention(window=17)),
        ("gemma2", 1, with_attention(softcap=None)),
        ("gemma3_text", 1, with_attention(softcap=2.0)),
        ("granite", 0, with_attention(scale=20**-0.5)),
        ("gemma2", 1, with_norms(mlp_post=None)),
        ("qwen3", 0, with_norms(query=None)),
        ("llama", 0, with_norms(eps=1e-6)),
        ("granite", 0, lambda spec: replace(spec, residual_scale=1.0)),
        ("mistral without windows", 0, lambda spec: replace(spec, activation="silu")),
        ("smollm3", 2, lambda spec: replace(spec, mixer=replace(spec.mixer, uses_rotary=True))),
        ("llama with biases", 0, lambda spec: replace(spec, down=replace(spec.down, bias=None))),
        ("phi3", 0, with_up_first),
        ("mixtral", 0, with_experts(normalised=False)),
        ("mixtral", 0, with_experts(top_k=1)),
        ("mixtral with all experts", 0, with_experts(activation="silu")),
        ("dots1", 1, with_experts(scale=1.0)),
        ("dots1", 1, with_experts(choice_bias=None)),
        ("dots1", 1, with_experts(scoring="softmax")),
        ("qwen2_moe", 1, with_experts(mlp_gate=None)),
    ],
)
def test_a_form_that_is_read_wrongly_is_found_out(
    case: str, layer: int, spoil: Callable[[LayerSpec], LayerSpec]
) -> None:
    run = layer_runs(tiny_model(case), TOKENS)[layer]
    answer = run_form(spoil(form_of(run.layer)), run.hidden, run.cos_sin)
    assert (run.answer - answer).abs().max() > 1e-3


def test_sizes() -> None:
    spec = form_of(tiny_model("phi3").model.layers[0])
    assert (spec.mixer.heads, spec.mixer.kv_heads, spec.mixer.head_dim) == (4, 2, 20)
    assert (spec.hidden, spec.intermediate) == (48, 84)


@pytest.mark.parametrize("case", ["llama", "phi3"])
def test_only_what_is_merged_is_copied(case: str) -> None:
    model = tiny_model(case)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    spec = form_of(model.model.layers[0])
    kept = [spec.mixer_output.weight, spec.down.weight, spec.norms.attention]
    kept += [matrix.read() for matrix in spec.gate_up.matrices]
    assert all(tensor.untyped_storage().data_ptr() in own for tensor in kept)
    assert (spec.mixer_input.weight.untyped_storage().data_ptr() in own) == (case == "phi3")
    assert not any(tensor.requires_grad for tensor in [*kept, spec.mixer_input.weight])


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("solar_open", {"n_group": 5}),  # groups of experts, of which some are left out
        ("olmoe", {"num_experts": 4}),
        ("mixtral", {"num_local_experts": 4, "hidden_act": "gelu"}),
        ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 5}),  # no such model can run
        ("granitemoehybrid", {"layer_types": ["linear_attention"] * 4, "mamba_n_heads": 8, "mamba_d_head": 12}),
        ("falcon_h1 with norms", {"mamba_norm_before_gate": True}),
        ("nemotron_h with latents", {"layers_block_type": ["moe"], "n_group": 5}),
        ("glm", {}),  # interleaved rotary positions
        ("cohere", {}),  # attention and MLP side by side
        ("hunyuan_v1_dense", {}),  # norms of the heads after the rotation
        ("ministral3", {}),  # queries scaled by position
        ("llama", {"hidden_act": "gelu"}),
        ("gemma", {"hidden_act": "relu"}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
    ],
)
def test_what_is_different_is_not_recognised(model_type: str, changes: dict[str, Any]) -> None:
    assert recognise(tiny_model(model_type, **changes).model.layers[0]) is None


class OwnLlamaLayer(LlamaDecoderLayer):
    """Might compute anything."""


class OwnLinear(nn.Linear):
    """Likewise."""


def test_a_changed_layer_is_not_recognised() -> None:
    model = tiny_model("llama")
    first, second, third, _ = model.model.layers
    assert recognise(OwnLlamaLayer(model.config, 0).eval()) is None
    first.mlp.down_proj = OwnLinear(84, 48)
    assert recognise(first) is None
    second.mlp.act_fn = nn.Identity()
    assert recognise(second) is None
    assert recognise(third) is not None
    assert recognise(third.train()) is None


def test_layers_are_gone_when_they_are_replaced() -> None:
    model = tiny_model("llama")
    layers = [weakref.ref(layer) for layer in model.model.layers]
    num_alive = []

    def make(index: int, spec: LayerSpec) -> nn.Module:
        num_alive.append(sum(layer() is not None for layer in layers[:index]))
        return nn.Identity()

    assert replace_recognised(model, make) == 4
    assert num_alive == [0, 0, 0, 0]


def test_layers_with_experts_are_replaced_where_that_is_asked_for() -> None:
    assert replace_recognised(tiny_model("qwen3_moe"), lambda index, spec: nn.Identity()) == 1  # its dense layer
    assert replace_recognised(tiny_model("qwen3_moe"), lambda index, spec: nn.Identity(), only_common=False) == 4
