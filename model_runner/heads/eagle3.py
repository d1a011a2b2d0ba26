"""EAGLE-3 (arXiv:2503.01840): an EAGLE layer on three of the target's hidden states, with its own vocabulary.

The first state of a position is g = fc([low; middle; high]), from the inputs of three of the target's layers. A step
runs one Llama layer whose attention sees [input_layernorm(e); hidden_norm(g)], for the embedding e of the next token,
and adds its result to g. The sum is the next state, and lm_head(norm(state)) are its logits.

Names, with the layer as `midlayer.` (SafeAILab) or `layers.0.` (`speculators`, vLLM):

    fc.weight                                     [hidden, 3 * the target's hidden]
    midlayer.input_layernorm|hidden_norm|post_attention_layernorm.weight
    midlayer.self_attn.{q,k,v}_proj.weight        [.., 2 * hidden]
    midlayer.self_attn.o_proj.weight, midlayer.mlp.{gate,up,down}_proj.weight
    norm.weight, lm_head.weight                   [draft_vocab, hidden]
    d2t                                           [draft_vocab] the target's id minus the draft's
    embed_tokens.weight                           [vocab, hidden]; optional, otherwise the target's

config.json describes the layer, with `draft_vocab_size` and, if it differs, `target_hidden_size`. In the format of
`speculators`, the layer's configuration is in `transformer_layer_config`. There, `norm_before_residual` says whether
the result is added to hidden_norm(g) instead of g, and `eagle_aux_hidden_state_layer_ids` lists the target's layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from model_runner.features import Feature, layer_input, layer_of
from model_runner.heads.base import TargetShape, to_offsets
from model_runner.heads.checkpoint import HeadsCheckpoint
from model_runner.heads.layer import (
    Attend,
    DraftLayer,
    LayerShape,
    RecurrentHeads,
    RMSNorm,
    Rotary,
    layer_config,
)

if TYPE_CHECKING:
    from transformers import LlamaConfig

_UNKNOWN_OPTIONS = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")
"""Options of newer checkpoints that are not supported."""


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """Sizes and options of an EAGLE-3 checkpoint."""

    layer: LayerShape
    features: tuple[Feature, ...]
    target_hidden: int
    draft_vocab: int
    norm_before_residual: bool = False
    embeds: bool = False
    """Whether the heads have their own embedding."""


class _JoiningLayer(DraftLayer):
    """A layer whose attention sees the embedding next to the state, each after its own norm."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape, 2 * shape.hidden)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)


class Eagle3Heads(RecurrentHeads):
    """The EAGLE-3 layer, with fc before and norm and lm_head after it."""

    kind = "eagle3"

    def __init__(self, config: "LlamaConfig", shape: Eagle3Shape, draft_ids: Tensor | None = None) -> None:
        super().__init__(draft_ids, needs=shape.features)
        layer = shape.layer
        self.config = config
        self.shape = shape
        self.kv = layer.kv
        self.scale = layer.head_dim**-0.5
        self.rotary = Rotary(config)
        self.fc = nn.Linear(len(shape.features) * shape.target_hidden, layer.hidden, bias=False)
        self.midlayer = _JoiningLayer(layer)
        self.norm = RMSNorm(layer.hidden, layer.eps)
        self.lm_head = nn.Linear(layer.hidden, shape.draft_vocab, bias=False)
        if shape.embeds:
            self.embed_tokens = nn.Embedding(config.vocab_size, layer.hidden)

    def first_state(self, features: Mapping[Feature, Tensor]) -> Tensor:
        state: Tensor = self.fc(torch.cat([features[need] for need in self.needs], dim=-1))
        return state

    def step(self, embedded: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        normed = self.midlayer.hidden_norm(state)
        rows = torch.cat([self.midlayer.input_layernorm(embedded), normed], dim=-1)
        residual = normed if self.shape.norm_before_residual else state
        hidden: Tensor = self.midlayer(residual, rows, self.rotary(positions), attend)
        return hidden

    def logits(self, state: Tensor, target_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Logits of a state by the heads' own lm_head; the target's head is ignored."""
        logits: Tensor = self.lm_head(self.norm(state))
        return logits


def default_features(num_layers: int) -> tuple[Feature, ...]:
    """The hidden states that EAGLE-3 uses if the checkpoint does not name them."""
    return layer_input(2), layer_input(num_layers // 2), layer_input(num_layers - 3)


def load_eagle3(checkpoint: HeadsCheckpoint, target: TargetShape) -> Eagle3Heads:
    """Make the heads of a checkpoint. Raises HeadsError."""
    names, entries = checkpoint.names, checkpoint.config
    asked = [option for option in _UNKNOWN_OPTIONS if entries.get(option)]
    if asked:
        raise checkpoint.error(f"their {', '.join(asked)} is not supported")
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in names else "layers.0."
    config = layer_config(
        checkpoint, {**entries.get("transformer_layer_config", entries), "vocab_size": target.vocab_size}
    )
    if "layers.1.self_attn.q_proj.weight" in names:
        raise checkpoint.error("EAGLE-3 heads with several layers are not supported, only with one")
    draft_ids = checkpoint.draft_ids(target)
    shape = Eagle3Shape(
        layer=LayerShape.of(config, names, prefix),
        features=_features(checkpoint, target),
        target_hidden=entries.get("target_hidden_size") or config.hidden_size,
        draft_vocab=target.vocab_size if draft_ids is None else len(draft_ids),
        norm_before_residual=bool(entries.get("norm_before_residual")),
        embeds="embed_tokens.weight" in names,
    )
    checkpoint.check_hidden(shape.target_hidden, target)
    if config.hidden_size != target.hidden and not shape.embeds:
        raise checkpoint.error(
            f"their layer is {config.hidden_size:,} wide and they have no embed_tokens of that width"
        )
    heads = Eagle3Heads(config, shape, draft_ids)
    checkpoint.fill(heads, {"midlayer.": prefix})
    return heads


def eagle3_checkpoint(heads: Eagle3Heads) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Config and tensors for save_heads."""
    layers = [layer_of(need) for need in heads.needs]
    config = {
        **heads.config.to_diff_dict(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": heads.shape.draft_vocab,
        "target_hidden_size": heads.shape.target_hidden,
        "eagle_aux_hidden_state_layer_ids": layers,
        "norm_before_residual": heads.shape.norm_before_residual,
    }
    tensors = dict(heads.state_dict())
    if heads.draft_ids is not None:
        tensors["d2t"] = to_offsets(heads.draft_ids)
        is_drafted = torch.zeros(heads.config.vocab_size, dtype=torch.bool)
        is_drafted[heads.draft_ids.cpu()] = True
        tensors["t2d"] = is_drafted
    return config, tensors


def _features(checkpoint: HeadsCheckpoint, target: TargetShape) -> tuple[Feature, ...]:
    layers = checkpoint.config.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        return default_features(target.num_layers)
    if len(layers) != 3 or not all(isinstance(layer, int) and 0 <= layer < target.num_layers for layer in layers):
        raise checkpoint.error(
            f"they use hidden states of layers {layers}; supported are three of the model's {target.num_layers} layers"
        )
    return tuple(layer_input(layer) for layer in layers)
