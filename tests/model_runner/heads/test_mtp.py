"""DeepSeek-V3's module of multi-token prediction, in the names of the target's checkpoint.

The truth is transformers' own decoder layer with its eager attention over all tokens at once.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding

from model_runner.models.features import LAST
from model_runner.models.heads.base import HeadsError, TargetShape
from model_runner.models.heads.loading import load_heads
from model_runner.models.heads.mtp import MTPHeads
from tests.model_runner.heads.checkpoints import Tensors, rms, write

HIDDEN, VOCAB, LAYERS, EXPERTS = 32, 50, 3, 4
TARGET = TargetShape(HIDDEN, VOCAB, LAYERS)
COUNT = 5


def make_config() -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=EXPERTS,
        kv_lora_rank=8,
        q_lora_rank=12,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        rms_norm_eps=1e-5,
        num_nextn_predict_layers=1,
    )


class Truth:
    """A random module, the tensors under which it is published, and what it computes."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.config = make_config()
        self.config._attn_implementation = "eager"
        self.layer = DeepseekV3DecoderLayer(self.config, LAYERS).eval()
        for parameter in self.layer.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.rotary = DeepseekV3RotaryEmbedding(self.config)
        self.enorm, self.hnorm, self.norm = torch.rand(HIDDEN), torch.rand(HIDDEN), torch.rand(HIDDEN)
        self.eh_proj = torch.randn(HIDDEN, 2 * HIDDEN) * 0.3

    def tensors(self) -> Tensors:
        prefix = f"model.layers.{LAYERS}."
        named = {
            f"{prefix}enorm.weight": self.enorm,
            f"{prefix}hnorm.weight": self.hnorm,
            f"{prefix}eh_proj.weight": self.eh_proj,
            f"{prefix}shared_head.norm.weight": self.norm,
            f"{prefix}shared_head.head.weight": torch.zeros(VOCAB, HIDDEN),
            f"{prefix}embed_tokens.weight": torch.zeros(VOCAB, HIDDEN),
            "model.layers.0.input_layernorm.weight": torch.zeros(HIDDEN),
        }
        for name, tensor in self.layer.state_dict().items():
            if name == "mlp.experts.gate_up_proj":
                for index, both in enumerate(tensor):
                    gate, up = both.chunk(2)
                    named[f"{prefix}mlp.experts.{index}.gate_proj.weight"] = gate.clone()
                    named[f"{prefix}mlp.experts.{index}.up_proj.weight"] = up.clone()
            elif name == "mlp.experts.down_proj":
                named |= {f"{prefix}mlp.experts.{i}.down_proj.weight": one.clone() for i, one in enumerate(tensor)}
            else:
                named[prefix + name] = tensor.clone()
        return named

    @torch.no_grad()
    def states(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        embedded = embedded.clone()
        embedded[0] = 0.0  # position 0
        rows = torch.cat([rms(embedded, self.enorm), rms(hidden, self.hnorm)], dim=-1) @ self.eh_proj.T
        positions = torch.arange(len(rows)).unsqueeze(0)
        mask = torch.full((len(rows), len(rows)), float("-inf")).triu(1)[None, None]
        rotation = self.rotary(rows.unsqueeze(0), positions)
        output = self.layer(rows.unsqueeze(0), attention_mask=mask, position_embeddings=rotation)
        return output[0]


def test_states_and_logits_are_those_of_transformers(tmp_path: Path) -> None:
    truth = Truth()
    heads = load_heads(write(tmp_path, truth.config.to_dict(), truth.tensors()), TARGET)
    assert isinstance(heads, MTPHeads)
    assert (heads.kind, heads.needs, heads.draft_ids, heads.embed_tokens) == ("mtp", (LAST,), None, None)
    assert (heads.kv.num_heads, heads.kv.key_dim, heads.kv.value_dim) == (4, 20, 10)
    embedded, hidden = torch.randn(COUNT, HIDDEN), torch.randn(COUNT, HIDDEN)
    expected = truth.states(embedded, hidden)

    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys.extend(key)
        values.extend(value)
        k, v = torch.stack(keys), torch.stack(values)  # [seen, heads, dim]
        scores = torch.einsum("nhd,shd->nhs", query, k) * heads.scale
        seen = torch.arange(len(k) - len(query), len(k)).unsqueeze(1)
        scores = scores.masked_fill((torch.arange(len(k)) > seen).unsqueeze(1), float("-inf"))
        return torch.einsum("nhs,shd->nhd", scores.softmax(-1), v)

    state = heads.first_state({LAST: hidden})
    positions = torch.arange(COUNT)
    actual = [heads.step(embedded[:3], state[:3], positions[:3], attend)]
    actual += [heads.step(embedded[i : i + 1], state[i : i + 1], positions[i : i + 1], attend) for i in (3, 4)]
    torch.testing.assert_close(torch.cat(actual), expected, rtol=1e-4, atol=1e-4)
    head = torch.randn(VOCAB, HIDDEN)
    logits = heads.logits(torch.cat(actual), lambda rows: rows @ head.T)
    torch.testing.assert_close(logits, rms(expected, truth.norm) @ head.T, rtol=1e-3, atol=1e-3)


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    truth = Truth()
    config, tensors = truth.config.to_dict(), truth.tensors()
    with pytest.raises(HeadsError, match="several modules"):
        load_heads(write(tmp_path / "two", {**config, "num_nextn_predict_layers": 2}, tensors), TARGET)
    scaled = {**tensors, f"model.layers.{LAYERS}.eh_proj.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(HeadsError, match="float8"):
        load_heads(write(tmp_path / "scaled", config, scaled), TARGET)
    with pytest.raises(HeadsError, match="glm4_moe"):
        load_heads(write(tmp_path / "other", {**config, "model_type": "glm4_moe"}, tensors), TARGET)
    del tensors[f"model.layers.{LAYERS}.mlp.experts.2.up_proj.weight"]
    with pytest.raises(HeadsError, match=r"the tensor model\.layers\.3\.mlp\.experts\.2\.up_proj\.weight is missing"):
        load_heads(write(tmp_path / "lacking", config, tensors), TARGET)
