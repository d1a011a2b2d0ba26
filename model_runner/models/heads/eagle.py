"""EAGLE-1 (arXiv:2401.15077; EAGLE-2, arXiv:2406.16858, has the same heads): guesses the target's next feature.

The state of a place is the target's hidden state f there. A step joins it with the embedding e of the token after it,
fc([e; f]), and runs one layer of Llama that has no norm before its attention; what comes out takes the place of f, and
the target's own matrix makes logits of it.

Published names (SafeAILab), with the configuration of the layer as config.json:

    embed_tokens.weight    [vocab, hidden]; the target's, where it is left out
    fc.weight|bias         [hidden, 2 * hidden]
    layers.0.self_attn.{q,k,v,o}_proj.weight, layers.0.post_attention_layernorm.weight,
    layers.0.mlp.{gate,up,down}_proj.weight

The format of `speculators` calls fc `fusion_fc` and the layer `transformer`, and has the configuration of the layer
inside `transformer_layer_config`.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from model_runner.models.features import LAST, Feature
from model_runner.models.heads.base import TargetShape
from model_runner.models.heads.checkpoint import HeadsCheckpoint
from model_runner.models.heads.layer import Attend, DraftLayer, LayerShape, RecurrentHeads, Rotary, layer_config

_PUBLISHED = "layers.0."
_SPECULATORS = "transformer."


class EagleHeads(RecurrentHeads):
    """One layer, and the fc before it."""

    kind = "eagle"

    def __init__(self, config: LlamaConfig, shape: LayerShape, *, fc_bias: bool, embeds: bool) -> None:
        super().__init__(None, needs=(LAST,))
        self.kv = shape.kv
        self.scale = shape.head_dim**-0.5
        self.rotary = Rotary(config)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=fc_bias)
        self.layer = DraftLayer(shape)
        if embeds:
            self.embed_tokens = nn.Embedding(config.vocab_size, shape.hidden)

    def first_state(self, features: Mapping[Feature, Tensor]) -> Tensor:
        """See RecurrentHeads."""
        return features[LAST]

    def step(self, embedded: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See RecurrentHeads."""
        rows = self.fc(torch.cat([embedded, state], dim=-1))
        hidden: Tensor = self.layer(rows, rows, self.rotary(positions), attend)
        return hidden

    def logits(self, state: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """See RecurrentHeads."""
        return target_head(state)


def load_eagle(checkpoint: HeadsCheckpoint, target: TargetShape) -> EagleHeads:
    """Raises HeadsError."""
    names = checkpoint.names
    is_speculators = "speculators_model_type" in checkpoint.config
    prefix = _SPECULATORS if is_speculators else _PUBLISHED
    if checkpoint.config.get("layernorms") or f"{prefix}input_layernorm.weight" in names:
        raise checkpoint.error("EAGLE heads with additional norms are not supported")
    entries = checkpoint.config.get("transformer_layer_config", {}) if is_speculators else checkpoint.config
    config = layer_config(checkpoint, {**entries, "vocab_size": target.vocab_size})
    if config.num_hidden_layers != 1 and f"{_PUBLISHED[:-2]}1.self_attn.q_proj.weight" in names:
        raise checkpoint.error(f"EAGLE heads of {config.num_hidden_layers} layers are not supported, only of one")
    checkpoint.check_hidden(config.hidden_size, target)
    fc = "fusion_fc" if is_speculators else "fc"
    heads = EagleHeads(
        config,
        LayerShape.of(config, names, prefix),
        fc_bias=f"{fc}.bias" in names,
        embeds="embed_tokens.weight" in names,
    )
    renamed = {"layer.": prefix, "fc.": f"{fc}."}
    checkpoint.fill(heads, renamed)
    return heads
