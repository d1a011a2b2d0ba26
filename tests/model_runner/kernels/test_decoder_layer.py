"""The native decoder layer: what transformers' layer computes with the same packed weights, and independent rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model_runner.kernels.library import Kernels
from model_runner.native.packer import NativePacker
from model_runner.spec.layer_spec import LayerSpec
from tests.model_runner.decoder_models import CASES, HYBRIDS
from tests.model_runner.decoder_oracle import with_up_first
from tests.model_runner.kernels.decoder_runs import (
    LENGTHS,
    FusedModel,
    OneLayer,
    agree,
    layer_errors,
)

WHOLE = [(sequence, 0, length) for sequence, length in enumerate(LENGTHS)]
CROWD = [
    [(0, 0, 7), (2, 0, 1)],
    [(0, 7, 50), (1, 0, 16), (2, 1, 5)],
    [(1, 16, 40), (0, 50, 51)],
    *([(0, position, position + 1)] for position in (51, 52)),
    [(0, 53, 70)],
]


# Its attention hides what is beyond a window by the mask alone, which the interface of attention does not see.
MASKED = {"qwen2_moe with windows"}


@pytest.mark.parametrize("case", [case for case in [*CASES, *HYBRIDS] if case not in MASKED])
def test_equals_the_layer_of_transformers(case: str, kernels: Kernels) -> None:
    assert agree(layer_errors(case, NativePacker(kernels, "int8")))


INT4_SIZES = [
    {"hidden_size": 64, "head_dim": 24, "intermediate_size": 96},  # whole groups in every linear
    {"hidden_size": 64},  # not so after the attention and after the activation: these stay in int8
]


@pytest.mark.parametrize("sizes", INT4_SIZES)
@pytest.mark.parametrize("case", ["llama with biases", "gemma2", "qwen3", "mixtral"])
def test_equals_the_layer_of_transformers_in_int4(case: str, sizes: dict[str, int], kernels: Kernels) -> None:
    assert agree(layer_errors(case, NativePacker(kernels, "int4"), **sizes))


@pytest.mark.parametrize("case", ["llama with biases", "gemma2", "qwen3"])
def test_equals_the_layer_of_transformers_with_rotated_rows(case: str, kernels: Kernels) -> None:
    assert agree(layer_errors(case, NativePacker(kernels, "int8_rotated")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("case", ["llama with biases", "gemma2"])
def test_caches_of_other_types(case: str, dtype: torch.dtype, kernels: Kernels) -> None:
    assert agree(layer_errors(case, NativePacker(kernels, "int8"), dtype=dtype))


def with_attention(**changes: Any) -> Callable[[LayerSpec], LayerSpec]:
    return lambda spec: replace(spec, mixer=replace(spec.mixer, options=replace(spec.mixer.options, **changes)))


def with_norms(**changes: Any) -> Callable[[LayerSpec], LayerSpec]:
    return lambda spec: replace(spec, norms=replace(spec.norms, **changes))


def without_bias(name: str) -> Callable[[LayerSpec], LayerSpec]:
    return lambda spec: replace(spec, **{name: replace(getattr(spec, name), bias=None)})


@pytest.mark.parametrize(
    ("case", "spoil"),
    [
        ("mistral", with_attention(window=17)),
        ("gemma2", with_attention(softcap=None)),
        ("granite", with_attention(scale=20**-0.5)),
        ("llama", with_norms(eps=1e-6)),
        ("gemma2", with_norms(attention_post=None)),
        ("gemma2", with_norms(mlp_post=None)),
        ("qwen3", with_norms(query=None)),
        ("qwen3", with_norms(key=None)),
        ("granite", lambda spec: replace(spec, residual_scale=1.0)),
        ("mistral without windows", lambda spec: replace(spec, activation="silu")),
        ("llama", lambda spec: replace(spec, activation="gelu_tanh")),
        ("llama", lambda spec: replace(spec, mixer=replace(spec.mixer, uses_rotary=False))),
        ("llama with biases", without_bias("mixer_input")),
        ("llama with biases", without_bias("mixer_output")),
        ("llama with biases", without_bias("down")),
        ("llama", with_up_first),
    ],
)
def test_a_layer_that_computes_something_else_is_found_out(
    case: str, spoil: Callable[[LayerSpec], LayerSpec], kernels_library: Path
) -> None:
    assert not agree(layer_errors(case, NativePacker(Kernels(kernels_library, threads=1), "int8"), spoil))


@pytest.mark.parametrize("case", [*CASES, *HYBRIDS])
def test_rows_do_not_depend_on_neighbours_chunks_or_blocks(case: str, kernels: Kernels) -> None:
    model = FusedModel(case, kernels)
    crowd = model.logits(CROWD, seed=1)
    for sequence, length in enumerate(LENGTHS):
        alone = model.logits([[(sequence, 0, length)]])[sequence]
        assert alone.isfinite().all()
        assert torch.equal(alone, crowd[sequence])


@pytest.mark.parametrize("case", ["llama with biases", "gemma2"])
def test_rows_do_not_depend_on_neighbours_chunks_or_blocks_when_they_are_rotated(case: str, kernels: Kernels) -> None:
    model = FusedModel(case, kernels, "int8_rotated")
    crowd = model.logits(CROWD, seed=1)
    for sequence, length in enumerate(LENGTHS):
        alone = model.logits([[(sequence, 0, length)]])[sequence]
        assert alone.isfinite().all()
        assert torch.equal(alone, crowd[sequence])


@pytest.mark.parametrize("sizes", INT4_SIZES)
def test_rows_do_not_depend_on_neighbours_chunks_or_blocks_in_int4(sizes: dict[str, int], kernels: Kernels) -> None:
    model = FusedModel("qwen3", kernels, "int4", **sizes)
    crowd = model.logits(CROWD, seed=1)
    for sequence, length in enumerate(LENGTHS):
        alone = model.logits([[(sequence, 0, length)]])[sequence]
        assert alone.isfinite().all()
        assert torch.equal(alone, crowd[sequence])


def test_the_number_of_threads_does_not_matter(kernels: Kernels, kernels_library: Path) -> None:
    results = []
    for threads in (1, 2, 3):
        team = Kernels(kernels_library, threads, kernels.isa)
        results.append(torch.cat(FusedModel("gemma3_text", team).logits(CROWD)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_no_tokens(kernels: Kernels) -> None:
    layer = OneLayer.of("llama", kernels)
    assert layer(torch.empty(0, layer.width), []).shape == (0, layer.width)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("case", ["llama", "gemma3_text", "exaone4"])
def test_what_is_not_finite_stays_in_its_sequence(case: str, broken: float, kernels: Kernels) -> None:
    layer = OneLayer.of(case, kernels)
    hidden = torch.randn(sum(LENGTHS), layer.width, generator=torch.Generator().manual_seed(0))
    whole = layer(hidden, WHOLE)
    row = LENGTHS[0] + 30  # of the second sequence
    hidden[row, 3] = broken
    result = layer(hidden, WHOLE)
    assert result[row].isnan().all()
    for rows in (slice(0, row), slice(sum(LENGTHS[:2]), None)):
        assert torch.equal(result[rows], whole[rows])
    # Later computations in the same places are not affected.
    hidden[row, 3] = 1
    again = layer(hidden, WHOLE)
    assert again.isfinite().all()
