"""Decoder layers of transformers against the form that they are read as."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from model_runner.spec.families import FAMILIES
from model_runner.spec.layer_spec import LayerSpec
from model_runner.spec.model_spec import read_model_spec
from model_runner.weights.checkpoint import TensorCheckpoint
from model_runner.weights.interleaved_experts import deinterleave_experts
from model_runner.weights.matrix import DerivedMatrix
from tests.model_runner.decoder_models import CASES, HYBRIDS, layer_runs, tiny_model
from tests.model_runner.decoder_oracle import run_form, with_up_first

TOKENS = 90  # beyond the windows, and beyond the original length of scaled rotary positions


def forms_of(model: PreTrainedModel) -> Sequence[LayerSpec] | None:
    spec = read_model_spec(model.config, deinterleave_experts(TensorCheckpoint(model.state_dict())))
    return None if spec is None else spec.layers


def form_of(model: PreTrainedModel, layer: int) -> LayerSpec:
    specs = forms_of(model)
    assert specs is not None
    return specs[layer]


@pytest.mark.parametrize("case", CASES)
def test_the_form_computes_what_the_layer_does(case: str) -> None:
    model = tiny_model(case)
    specs, runs = forms_of(model), layer_runs(model, TOKENS)
    assert specs is not None
    assert len(runs) == len(specs) == 4
    for spec, run in zip(specs, runs, strict=True):
        torch.testing.assert_close(run.answer, run_form(spec, run.hidden, run.cos_sin).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [*CASES, *HYBRIDS])
def test_outputs_of_merged_linears_are_found_by_the_paths_of_their_modules(case: str) -> None:
    model = tiny_model(case)
    specs = forms_of(model)
    assert specs is not None
    found = set()
    for spec in specs:
        for linear in (spec.mixer_input, spec.mixer_output, spec.parallel_output, spec.gate_up, spec.down):
            for path, matrix in zip(linear.paths, linear.matrices, strict=True) if linear is not None else ():
                derived = matrix if isinstance(matrix, DerivedMatrix) else DerivedMatrix(matrix)
                stored = derived.stored if isinstance(derived.stored, DerivedMatrix) else DerivedMatrix(derived.stored)
                weight = model.get_submodule(path).weight
                for step in (stored, derived):
                    weight = weight if step.order is None else weight[step.order.long()]
                    weight = weight if step.factors is None else weight * step.factors[:, None]
                torch.testing.assert_close(matrix.read(), weight.detach())
                found.add(path)
    modules = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    aside = ("lm_head", "embed_tokens_extend", "experts", "latent_proj", "router", ".gate", "_gate")
    assert {name for name in modules - found if not any(part in name for part in aside)} == set()


def test_every_family_has_a_case() -> None:
    types = {case.split(maxsplit=1)[0] for case in [*CASES, *HYBRIDS]}
    assert types - {"emu3"} | {"emu3_text_model", "gemma3"} == set(FAMILIES)


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
    model = tiny_model(case)
    run = layer_runs(model, TOKENS)[layer]
    answer = run_form(spoil(form_of(model, layer)), run.hidden, run.cos_sin)
    assert (run.answer - answer).abs().max() > 1e-3


def test_sizes() -> None:
    spec = form_of(tiny_model("phi3"), 0)
    assert (spec.mixer.heads, spec.mixer.kv_heads, spec.mixer.head_dim) == (4, 2, 20)
    assert (spec.hidden, spec.intermediate) == (48, 84)


@pytest.mark.parametrize("case", ["llama", "phi3"])
def test_only_what_is_merged_is_copied(case: str) -> None:
    model = tiny_model(case)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    spec = form_of(model, 0)
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
def test_what_is_different_has_no_form(model_type: str, changes: dict[str, Any]) -> None:
    assert forms_of(tiny_model(model_type, **changes)) is None
