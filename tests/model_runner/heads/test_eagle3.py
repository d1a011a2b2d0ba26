"""EAGLE-3 heads in the formats of SafeAILab and of speculators, against a computation token by token."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runner.heads.base import HeadsError
from model_runner.heads.eagle3 import Eagle3Heads
from model_runner.heads.loading import load_heads
from tests.model_runner.heads.checkpoints import (
    DIM,
    HEADS,
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
    rms,
    write,
)

IDS = torch.tensor([0, 3, 4, 10, 11, 12, 30, 39])
COUNT = 5


def published(prefix: str, *, embeds: bool = False, norms_heads: bool = False) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}hidden_norm.weight": (HIDDEN,),
        **layer_shapes(prefix, 2 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (len(IDS), HIDDEN),
    }
    if embeds:
        shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    if norms_heads:
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (DIM,) for name in ("q", "k")}
    is_drafted = torch.zeros(VOCAB, dtype=torch.bool)
    is_drafted[IDS] = True
    return {**random_tensors(shapes), "d2t": IDS - torch.arange(len(IDS)), "t2d": is_drafted}


class Oracle:
    """One place after the other."""

    def __init__(self, tensors: Tensors, prefix: str, *, norm_before_residual: bool) -> None:
        self.tensors = tensors
        self.prefix = prefix
        self.norm_before_residual = norm_before_residual
        self.layer = LayerOracle(tensors, prefix)

    def first_state(self, features: Mapping[str, Tensor]) -> Tensor:
        return torch.cat(list(features.values()), dim=-1) @ self.tensors["fc.weight"].T

    def step(self, embedded: Tensor, state: Tensor, position: int) -> Tensor:
        e = rms(embedded, self.tensors[f"{self.prefix}input_layernorm.weight"])
        g = rms(state, self.tensors[f"{self.prefix}hidden_norm.weight"])
        return self.layer(g if self.norm_before_residual else state, torch.cat([e, g]), position)

    def logits(self, state: Tensor) -> Tensor:
        return self.tensors["lm_head.weight"] @ rms(state, self.tensors["norm.weight"])


def check(heads: Eagle3Heads, oracle: Oracle) -> None:
    """Some places with the target's features, then two that feed on the heads' own states."""
    embedded = torch.randn(COUNT + 2, HIDDEN)
    features = {need: torch.randn(COUNT, HIDDEN) for need in heads.needs}
    expected = [oracle.step(embedded[i], state, i) for i, state in enumerate(oracle.first_state(features).unbind(0))]
    for position in (COUNT, COUNT + 1):
        expected.append(oracle.step(embedded[position], expected[-1], position))

    attend = causal_attention()
    states = [heads.step(embedded[:COUNT], heads.first_state(features), torch.arange(COUNT), attend)]
    for position in (COUNT, COUNT + 1):
        at = slice(position, position + 1)
        states.append(heads.step(embedded[at], states[-1][-1:], torch.arange(position, position + 1), attend))
    actual = torch.cat(states)
    torch.testing.assert_close(actual, torch.stack(expected), rtol=1e-4, atol=1e-5)
    logits = torch.stack([oracle.logits(state) for state in expected])
    torch.testing.assert_close(heads.logits(actual), logits, rtol=1e-4, atol=1e-4)


def test_safeailab_names(tmp_path: Path) -> None:
    tensors = published("midlayer.")
    config = {**LAYER_CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(IDS)}
    heads = load_heads(write(tmp_path, config, tensors, "pytorch_model.bin"), TARGET)
    assert isinstance(heads, Eagle3Heads)
    assert (heads.kind, heads.depth, heads.needs) == ("eagle3", None, ("layers.2", "layers.4", "layers.5"))
    assert torch.equal(heads.draft_ids, IDS)
    assert heads.embed_tokens is None
    check(heads, Oracle(tensors, "midlayer.", norm_before_residual=False))


@pytest.mark.parametrize("norm_before_residual", [True, False])
def test_speculators_names(tmp_path: Path, norm_before_residual: bool) -> None:
    tensors = published("layers.0.", embeds=True)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(IDS),
        "norm_before_residual": norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "transformer_layer_config": LAYER_CONFIG,
    }
    heads = load_heads(write(tmp_path, config, tensors), TARGET)
    assert isinstance(heads, Eagle3Heads)
    assert heads.needs == ("layers.1", "layers.3", "layers.6")
    assert heads.embed_tokens is not None
    check(heads, Oracle(tensors, "layers.0.", norm_before_residual=norm_before_residual))


def test_a_layer_with_norms_on_queries_and_keys(tmp_path: Path) -> None:
    tensors = published("layers.0.", norms_heads=True)
    layer = {**LAYER_CONFIG, "model_type": "qwen3"}
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    heads = load_heads(write(tmp_path, config, tensors), TARGET)
    assert isinstance(heads, Eagle3Heads)
    check(heads, Oracle(tensors, "layers.0.", norm_before_residual=False))


def test_heads_narrower_than_the_target(tmp_path: Path) -> None:
    """They have an embedding of their own, and fc takes the target's width."""
    tensors = published("midlayer.", embeds=True)
    wide = type(TARGET)(hidden=20, vocab_size=VOCAB, num_layers=8)
    tensors["fc.weight"] = torch.randn(HIDDEN, 60) * 0.3
    heads = load_heads(write(tmp_path, {**LAYER_CONFIG, "target_hidden_size": 20}, tensors), wide)
    assert isinstance(heads, Eagle3Heads)
    features = {need: torch.randn(2, 20) for need in heads.needs}
    expected = torch.cat(list(features.values()), dim=-1) @ tensors["fc.weight"].T
    torch.testing.assert_close(heads.first_state(features), expected)

    del tensors["embed_tokens.weight"]
    with pytest.raises(HeadsError, match="no embed_tokens of that width"):
        load_heads(write(tmp_path / "none", {**LAYER_CONFIG, "target_hidden_size": 20}, tensors), wide)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, "three of the model's 8"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "three of the model's 8"),
        ({"target_hidden_size": 20}, "hidden size of 20, but the model's is 16"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"num_attention_heads": HEADS * 2, "num_key_value_heads": KV_HEADS}, "has the shape"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, entries: dict[str, object], message: str) -> None:
    with pytest.raises(HeadsError, match=message):
        load_heads(write(tmp_path, {**LAYER_CONFIG, **entries}, published("midlayer.")), TARGET)


def test_draft_tokens_outside_the_target_are_refused(tmp_path: Path) -> None:
    tensors = published("midlayer.")
    tensors["d2t"] = tensors["d2t"] + 10
    with pytest.raises(HeadsError, match="outside the target's vocabulary"):
        load_heads(write(tmp_path, LAYER_CONFIG, tensors), TARGET)
