"""Random modules for multi-token prediction, as they are published, and what they compute."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, Glm4MoeConfig, Glm4MoeLiteConfig, PretrainedConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm_lite

from bench.tiny_models import tiny_config
from tests.model_runner.heads.checkpoints import EPS, Tensors, random_tensors, rms, silu

LAYERS = 3
_SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "rms_norm_eps": EPS,
    "num_nextn_predict_layers": 1,
}


_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}


def deepseek_config() -> PretrainedConfig:
    """With experts and latent attention."""
    return DeepseekV3Config(**_SIZES, **_LATENT, num_key_value_heads=4)


def glm_lite_config() -> PretrainedConfig:
    """With experts and latent attention."""
    return Glm4MoeLiteConfig(**_SIZES, **_LATENT, num_key_value_heads=4)


def glm_config() -> PretrainedConfig:
    """With experts and grouped heads, of whose dimensions half are rotated."""
    return Glm4MoeConfig(**_SIZES, num_key_value_heads=2, head_dim=16, use_qk_norm=True)


def one_by_one(tensors: Tensors) -> Tensors:
    """The tensors with each expert's matrices on their own."""
    named = {}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".experts.")
        for index, one in enumerate(tensor if base else ()):
            parts = zip(("gate", "up"), one.chunk(2), strict=True) if kind == "gate_up_proj" else [("down", one)]
            named |= {f"{base}.experts.{index}.{part}_proj.weight": matrix.clone() for part, matrix in parts}
        if not base:
            named[name] = tensor
    return named


class NextN:
    """A module of DeepSeek's form. The truth is transformers' own layer, with its eager attention, over all tokens."""

    def __init__(self, kind: str = "deepseek_v3") -> None:
        torch.manual_seed(3)
        classes: dict[str, Any] = {
            "deepseek_v3": (deepseek_config, deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RotaryEmbedding),
            "glm4_moe_lite": (
                glm_lite_config,
                glm_lite.Glm4MoeLiteDecoderLayer,
                glm_lite.Glm4MoeLiteRotaryEmbedding,
            ),
            "glm4_moe": (glm_config, glm.Glm4MoeDecoderLayer, glm.Glm4MoeRotaryEmbedding),
        }
        make, layer, rotary = classes[kind]
        self.config = make()
        self.config._attn_implementation = "eager"
        self.layer = layer(self.config, LAYERS - 1).eval()
        for tensor in self.layer.state_dict().values():
            nn.init.normal_(tensor, std=0.3)
        self.rotary = rotary(self.config)
        hidden = self.config.hidden_size
        self.enorm, self.hnorm, self.norm = torch.rand(hidden), torch.rand(hidden), torch.rand(hidden)
        self.eh_proj = torch.randn(hidden, 2 * hidden) * 0.3

    def tensors(self) -> Tensors:
        prefix = f"model.layers.{LAYERS}."
        size = (self.config.vocab_size, self.config.hidden_size)
        named = {
            f"{prefix}enorm.weight": self.enorm,
            f"{prefix}hnorm.weight": self.hnorm,
            f"{prefix}eh_proj.weight": self.eh_proj,
            f"{prefix}shared_head.norm.weight": self.norm,
            f"{prefix}shared_head.head.weight": torch.zeros(size),
            f"{prefix}embed_tokens.weight": torch.zeros(size),
            "model.layers.0.input_layernorm.weight": torch.zeros(size[1]),
        }
        return named | one_by_one({prefix + name: one.clone() for name, one in self.layer.state_dict().items()})

    @torch.no_grad()
    def states(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """States [n, d] after the first n positions, from the embeddings of the tokens after them."""
        embedded = embedded.clone()
        embedded[0] = 0.0  # position 0
        rows = torch.cat([rms(embedded, self.enorm), rms(hidden, self.hnorm)], dim=-1) @ self.eh_proj.T
        positions = torch.arange(len(rows)).unsqueeze(0)
        mask = torch.full((len(rows), len(rows)), float("-inf")).triu(1)[None, None]
        rotation = self.rotary(rows.unsqueeze(0), positions)
        output: Tensor = self.layer(rows.unsqueeze(0), attention_mask=mask, position_embeddings=rotation)
        return output[0]

    def logits(self, states: Tensor, head: Tensor) -> Tensor:
        return rms(states, self.norm) @ head.T


@dataclass
class Qwen:
    """A module of Qwen's form. The truth is plain formulas in float64, one token at a time."""

    kind: str = "qwen3_5_text"
    weights: Tensors = field(default_factory=dict)
    """Without the prefix; random by default."""
    config: Any = None
    """The target's configuration; by default a tiny model's."""

    def __post_init__(self) -> None:
        self.config = self.config or tiny_config(self.kind)
        self.weights = self.weights or random_tensors(self._shapes(), seed=5)

    def tensors(self) -> Tensors:
        return {f"mtp.{name}": tensor.clone() for name, tensor in self.weights.items()}

    def states(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """States [n, d] after the first n positions, from the embeddings of the tokens after them."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states = []
        for position, (e, h) in enumerate(zip(embedded.double(), hidden.double(), strict=True)):
            joined = torch.cat([self._norm(e, "pre_fc_norm_embedding"), self._norm(h, "pre_fc_norm_hidden")])
            row = self._times("fc.weight", joined)
            row = row + self._attention(self._norm(row, "layers.0.input_layernorm"), position, keys, values)
            row = row + self._mlp(self._norm(row, "layers.0.post_attention_layernorm"))
            states.append(self._norm(row, "norm"))
        return torch.stack(states)

    def logits(self, states: Tensor, head: Tensor) -> Tensor:
        return states @ head.double().T

    def _times(self, name: str, row: Tensor) -> Tensor:
        return self.weights[name].double() @ row

    def _norm(self, row: Tensor, name: str) -> Tensor:
        mean = (row * row).mean(-1, keepdim=True)
        return row / torch.sqrt(mean + self.config.rms_norm_eps) * (1 + self.weights[f"{name}.weight"].double())

    def _rotated(self, heads: Tensor, position: int) -> Tensor:
        """Heads [n, dim], whose first dimensions are rotated."""
        num = int(self.config.head_dim * self.config.rope_parameters["partial_rotary_factor"])
        theta = self.config.rope_parameters["rope_theta"]
        angles = position * theta ** (-2 * torch.arange(num // 2, dtype=torch.float64) / num)
        pairs = torch.complex(heads[:, : num // 2], heads[:, num // 2 : num])
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag, heads[:, num:]], dim=-1)

    def _attention(self, row: Tensor, position: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        prefix, dim = "layers.0.self_attn.", self.config.head_dim
        query, gate = self._times(f"{prefix}q_proj.weight", row).view(-1, 2, dim).unbind(1)  # [heads, dim]
        key, value = (self._times(f"{prefix}{name}_proj.weight", row).view(-1, dim) for name in ("k", "v"))
        query = self._rotated(self._norm(query, f"{prefix}q_norm"), position)
        keys.append(self._rotated(self._norm(key, f"{prefix}k_norm"), position))
        values.append(value)
        group = len(query) // len(key)
        k, v = (torch.stack(past).repeat_interleave(group, dim=1) for past in (keys, values))  # [seen, heads, dim]
        scores = torch.einsum("hd,shd->hs", query, k) * dim**-0.5
        output = torch.einsum("hs,shd->hd", scores.softmax(-1), v) / (1 + torch.exp(-gate))
        return self._times(f"{prefix}o_proj.weight", output.flatten())

    def _mlp(self, row: Tensor) -> Tensor:
        prefix = "layers.0.mlp."
        if self.kind == "qwen3_5_text":
            return self._swiglu(prefix, row)
        chances = self._times(f"{prefix}gate.weight", row).softmax(-1)
        best = chances.topk(self.config.num_experts_per_tok)
        weight = 1 / (1 + torch.exp(-self._times(f"{prefix}shared_expert_gate.weight", row)))
        output = weight * self._swiglu(f"{prefix}shared_expert.", row)
        for share, index in zip(best.values / best.values.sum(), best.indices, strict=True):
            gate, up = (self.weights[f"{prefix}experts.gate_up_proj"][index].double() @ row).chunk(2)
            output = output + share * (self.weights[f"{prefix}experts.down_proj"][index].double() @ (silu(gate) * up))
        return output

    def _swiglu(self, prefix: str, row: Tensor) -> Tensor:
        gate, up = (self._times(f"{prefix}{name}_proj.weight", row) for name in ("gate", "up"))
        return self._times(f"{prefix}down_proj.weight", silu(gate) * up)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.config
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        norms += ("layers.0.input_layernorm", "layers.0.post_attention_layernorm")
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, 2 * hidden),
            **{f"{name}.weight": (hidden,) for name in norms},
            "layers.0.self_attn.q_proj.weight": (2 * heads * dim, hidden),
            "layers.0.self_attn.k_proj.weight": (kv_heads * dim, hidden),
            "layers.0.self_attn.v_proj.weight": (kv_heads * dim, hidden),
            "layers.0.self_attn.o_proj.weight": (hidden, heads * dim),
            "layers.0.self_attn.q_norm.weight": (dim,),
            "layers.0.self_attn.k_norm.weight": (dim,),
        }
        if self.kind == "qwen3_5_text":
            return shapes | _swiglu_shapes("layers.0.mlp.", hidden, config.intermediate_size)
        inner = config.moe_intermediate_size
        return shapes | {
            "layers.0.mlp.gate.weight": (config.num_experts, hidden),
            "layers.0.mlp.experts.gate_up_proj": (config.num_experts, 2 * inner, hidden),
            "layers.0.mlp.experts.down_proj": (config.num_experts, hidden, inner),
            "layers.0.mlp.shared_expert_gate.weight": (1, hidden),
            **_swiglu_shapes("layers.0.mlp.shared_expert.", hidden, config.shared_expert_intermediate_size),
        }


def _swiglu_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    names = ("gate", "up", "down")
    return {f"{prefix}{name}_proj.weight": (hidden, inner) if name == "down" else (inner, hidden) for name in names}
