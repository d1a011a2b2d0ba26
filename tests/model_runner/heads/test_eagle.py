"""EAGLE-1 heads in the formats of SafeAILab and of speculators, against a computation token by token."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runner.models.features import LAST
from model_runner.models.heads.base import HeadsError
from model_runner.models.heads.eagle import EagleHeads
from model_runner.models.heads.loading import load_heads
from tests.model_runner.heads.checkpoints import (
    DIM,
    HIDDEN,
    KV_HEADS,
    LAYER_CONFIG,
    TARGET,
    VOCAB,
    LayerOracle,
    Tensors,
    causal_attention,
    layer_shapes,
    random_tensors,
    write,
)

COUNT = 6


def published(prefix: str = "layers.0.", fc: str = "fc", *, bias: bool = True) -> Tensors:
    shapes = {f"{fc}.weight": (HIDDEN, 2 * HIDDEN), **layer_shapes(prefix), "embed_tokens.weight": (VOCAB, HIDDEN)}
    return random_tensors({**shapes, f"{fc}.bias": (HIDDEN,)} if bias else shapes)


def expected_states(tensors: Tensors, prefix: str, fc: str, embedded: Tensor, features: Tensor, theta: float) -> Tensor:
    layer = LayerOracle(tensors, prefix, theta)
    states = []
    for position, (e, f) in enumerate(zip(embedded, features, strict=True)):
        row = tensors[f"{fc}.weight"] @ torch.cat([e, f]) + tensors.get(f"{fc}.bias", torch.zeros(()))
        states.append(layer(row, row, position))
    return torch.stack(states)


def check(heads: EagleHeads, tensors: Tensors, prefix: str, fc: str, theta: float = 10000.0) -> None:
    embedded, features = torch.randn(COUNT, HIDDEN), torch.randn(COUNT, HIDDEN)
    expected = expected_states(tensors, prefix, fc, embedded, features, theta)
    attend = causal_attention()
    state = heads.first_state({LAST: features})
    positions = torch.arange(COUNT)
    head = torch.randn(VOCAB, HIDDEN)
    # The first places at once, the others one by one: the same keys are there.
    states = [heads.step(embedded[:3], state[:3], positions[:3], attend)]
    states += [heads.step(embedded[i : i + 1], state[i : i + 1], positions[i : i + 1], attend) for i in range(3, COUNT)]
    torch.testing.assert_close(torch.cat(states), expected, rtol=1e-4, atol=1e-5)
    logits = heads.logits(torch.cat(states), lambda rows: rows @ head.T)
    torch.testing.assert_close(logits, expected @ head.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_safeailab_names(tmp_path: Path, file: str, bias: bool) -> None:
    tensors = published(bias=bias)
    heads = load_heads(write(tmp_path, {**LAYER_CONFIG, "rope_theta": 500.0}, tensors, file), TARGET)
    assert isinstance(heads, EagleHeads)
    assert (heads.kind, heads.depth, heads.needs, heads.draft_ids) == ("eagle", None, (LAST,), None)
    assert (heads.kv.num_heads, heads.kv.key_dim, heads.scale) == (KV_HEADS, DIM, DIM**-0.5)
    assert heads.embed_tokens is not None
    assert torch.equal(heads.embed_tokens.weight, tensors["embed_tokens.weight"])
    check(heads, tensors, "layers.0.", "fc", 500.0)


def test_speculators_names(tmp_path: Path) -> None:
    tensors = published("transformer.", "fusion_fc", bias=False)
    del tensors["embed_tokens.weight"]
    config = {"speculators_model_type": "eagle", "transformer_layer_config": LAYER_CONFIG, "layernorms": False}
    heads = load_heads(write(tmp_path, config, tensors), TARGET)
    assert isinstance(heads, EagleHeads)
    assert heads.embed_tokens is None
    check(heads, tensors, "transformer.", "fusion_fc")


def test_half_precision_weights_become_float32(tmp_path: Path) -> None:
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in published().items()}
    heads = load_heads(write(tmp_path, LAYER_CONFIG, tensors), TARGET)
    assert isinstance(heads, EagleHeads)
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.float32}
    check(heads, {name: tensor.float() for name, tensor in tensors.items()}, "layers.0.", "fc")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hidden_size": 24}, "trained for a hidden size of 24; the target's is 16"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary scaling of type dynamic"),
        ({"num_attention_heads": 8}, r"layers\.0\.self_attn\.q_proj\.weight has the shape"),
        ({"layernorms": True}, "additional norms"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, entries: dict[str, object], message: str) -> None:
    with pytest.raises(HeadsError, match=message):
        load_heads(write(tmp_path, {**LAYER_CONFIG, **entries}, published()), TARGET)


def test_several_layers_are_refused(tmp_path: Path) -> None:
    tensors = {**published(), **random_tensors(layer_shapes("layers.1."))}
    with pytest.raises(HeadsError, match="only of one"):
        load_heads(write(tmp_path, {**LAYER_CONFIG, "num_hidden_layers": 2}, tensors), TARGET)
