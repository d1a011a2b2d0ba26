"""The multi-token prediction module of DeepSeek-V3 (arXiv:2412.19437, section 2.2), repeated for each further token.

The state of a position is the target's hidden state h there. A step joins it with the embedding e of the next token,
eh_proj([enorm(e); hnorm(h)]), and runs one decoder layer of the target's kind. The result is the next state; the
target's own head turns shared_head.norm(state) into logits. As in other servers, the embedding counts as zero at
position 0.

The weights are part of the target's checkpoint: for L decoder layers, `num_nextn_predict_layers` in config.json is 1,
and the tensors are

    model.layers.{L}.enorm|hnorm|eh_proj|shared_head.norm.weight
    model.layers.{L}.self_attn.*, mlp.*, input_layernorm.weight, post_attention_layernorm.weight

`embed_tokens` and `shared_head.head` repeat the target's weights. Float8 checkpoints are not supported.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding

from model_runner.attention.backend import AttentionOptions
from model_runner.kv_cache import KVShape
from model_runner.models.features import LAST, Feature
from model_runner.models.heads.base import TargetShape
from model_runner.models.heads.checkpoint import HeadsCheckpoint
from model_runner.models.heads.layer import Attend, RecurrentHeads, RMSNorm
from model_runner.models.hf_attention import ATTENTION_NAME, register_attention


class _Attention:
    """Replaces the step's attention in the target's own layers."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        return self._attend(query, key, value)


class MTPHeads(RecurrentHeads):
    """The MTP module of one checkpoint."""

    kind = "mtp"

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(None, needs=(LAST,))
        register_attention()
        own: Any = copy.deepcopy(config)
        own._attn_implementation = ATTENTION_NAME
        own._experts_implementation = "eager"
        self.kv = KVShape(own.num_attention_heads, own.qk_nope_head_dim + own.qk_rope_head_dim, own.v_head_dim)
        self.enorm = RMSNorm(own.hidden_size, own.rms_norm_eps)
        self.hnorm = RMSNorm(own.hidden_size, own.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * own.hidden_size, own.hidden_size, bias=False)
        self.layer = DeepseekV3DecoderLayer(own, own.num_hidden_layers)
        self.shared_norm = RMSNorm(own.hidden_size, own.rms_norm_eps)
        self.rotary = DeepseekV3RotaryEmbedding(own)
        self.scale = self.layer.self_attn.scaling

    def first_state(self, features: Mapping[Feature, Tensor]) -> Tensor:
        return features[LAST]

    def step(self, embedded: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        embedded = embedded.where((positions > 0).unsqueeze(1), 0.0)
        rows = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state)], dim=-1)).unsqueeze(0)  # [1, n, d]
        rotation = self.rotary(rows, positions.unsqueeze(0))
        hidden: Tensor = self.layer(rows, position_embeddings=rotation, attention=_Attention(attend))
        return hidden[0]

    def logits(self, state: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        return target_head(self.shared_norm(state))


def load_mtp(checkpoint: HeadsCheckpoint, target: TargetShape) -> MTPHeads:
    """Make the heads of a checkpoint that was read with `mtp_prefix`. Raises HeadsError."""
    if checkpoint.integer("num_nextn_predict_layers") != 1:
        raise checkpoint.error("the model has several modules for multi-token prediction; only one is supported")
    if any(name.endswith("_scale_inv") for name in checkpoint.names):
        raise checkpoint.error("weights in float8 are not supported")
    config = DeepseekV3Config.from_dict(dict(checkpoint.config))
    checkpoint.check_hidden(config.hidden_size, target)
    heads = MTPHeads(config)
    prefix = mtp_prefix(checkpoint.config)
    tensors = {}
    for name, value in heads.state_dict().items():
        published = prefix + name.removeprefix("layer.").replace("shared_norm.", "shared_head.norm.")
        if ".experts." in name:
            tensors[name] = _stacked_experts(checkpoint, published, value)
        else:
            tensors[name] = checkpoint.take(published, *value.shape)
    heads.load_state_dict(tensors, assign=True)
    return heads.requires_grad_(requires_grad=False).eval()


def mtp_prefix(config: Mapping[str, Any]) -> str:
    """Prefix of the module's tensors."""
    return f"model.layers.{config['num_hidden_layers']}."


def _stacked_experts(checkpoint: HeadsCheckpoint, name: str, like: Tensor) -> Tensor:
    """All experts' matrices as [experts, outputs, inputs]; checkpoints store them one by one."""
    experts, outputs, inputs = like.shape
    base, _, kind = name.rpartition(".")
    matrices = []
    for index in range(experts):
        one = f"{base}.{index}."
        if kind == "gate_up_proj":
            halves = (checkpoint.take(f"{one}{part}_proj.weight", outputs // 2, inputs) for part in ("gate", "up"))
            matrices.append(torch.cat(list(halves)))
        else:
            matrices.append(checkpoint.take(f"{one}{kind}.weight", outputs, inputs))
    return torch.stack(matrices)
