"""Decoder layers of the common family as one native operator each."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model_runner.kernels.library import NativeWeight
from model_runner.kernels.structs import AttentionStruct, DecoderLayerStruct, KVCacheStruct
from model_runner.models.decoder_form import DecoderForm, replace_recognised
from model_runner.models.hf_attention import StepAttention
from model_runner.models.native_experts import ACTIVATIONS, RoutedExperts
from model_runner.models.packed import NativePacker


class FusedDecoderLayer(nn.Module):
    """Stands in for a transformers decoder layer: quantised linears, everything else in float32, all rows at once."""

    def __init__(self, index: int, form: DecoderForm, packer: NativePacker) -> None:
        super().__init__()
        self.index = index
        self._kernels = packer.kernels
        self.uses_rotary = form.uses_rotary
        self._weights = {
            name: packer.pack(linear.weight, linear.bias)
            for name, linear in (
                ("qkv", form.qkv),
                ("attention_output", form.attention_output),
                ("gate_up", form.gate_up),
                ("down", form.down),
            )
            if linear.weight.numel() > 0  # there may be no MLP beside experts
        }
        self._experts = None if form.experts is None else RoutedExperts(packer, form.experts)
        norms = form.norms
        self._norms = {
            name: factor.float().contiguous()
            for name, factor in (
                ("attention_norm", norms.attention),
                ("attention_post_norm", norms.attention_post),
                ("mlp_norm", norms.mlp),
                ("mlp_post_norm", norms.mlp_post),
                ("query_norm", norms.query),
                ("key_norm", norms.key),
            )
            if factor is not None
        }
        self.struct = _layer_struct(form, self._weights, self._norms)
        if self._experts is not None:
            self.struct.experts = ctypes.addressof(self._experts.struct)

    def part_from_twin(self) -> None:
        """Be bound by itself, if this is a copy of a layer."""
        self.struct = DecoderLayerStruct.from_buffer_copy(self.struct)

    def bind(self, cache: KVCacheStruct) -> None:
        """Say where the layer's keys and values are kept; before the first forward."""
        self.struct.cache = cache

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention: StepAttention,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> Tensor:
        """Hidden states [1, T, hidden] -> the same shape. What a layer of transformers takes beside is not needed."""
        cos, sin = self._rotation(position_embeddings)
        self.struct.rotary_dim = cos.shape[-1]
        output = self._kernels.decoder_layer(self.struct, attention.metadata.struct, cos, sin, hidden_states[0])
        return output.unsqueeze(0)

    def _rotation(self, position_embeddings: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Cos and sin [T, rotary_dim]; of width 0 for a layer that does not rotate."""
        if not self.uses_rotary:
            return torch.empty(0), torch.empty(0)
        assert position_embeddings is not None, "the model has rotary positions"
        cos, sin = position_embeddings  # each [1, T, rotary_dim]
        return cos[0].contiguous(), sin[0].contiguous()


def fuse_layers(model: nn.Module, packer: NativePacker) -> int:
    """Replace every decoder layer that is recognised; returns how many were."""
    return replace_recognised(model, lambda index, form: FusedDecoderLayer(index, form, packer), with_experts=True)


def part_layers(model: nn.Module) -> None:
    """Let each fused layer of a model's twin have a cache of its own."""
    for module in model.modules():
        if isinstance(module, FusedDecoderLayer):
            module.part_from_twin()


def bind_layers(model: nn.Module, caches: Sequence[KVCacheStruct]) -> None:
    """Give each fused layer its cache."""
    for module in model.modules():
        if isinstance(module, FusedDecoderLayer):
            module.bind(caches[module.index])


def _layer_struct(form: DecoderForm, weights: dict[str, NativeWeight], norms: dict[str, Tensor]) -> DecoderLayerStruct:
    options = form.attention
    return DecoderLayerStruct(
        hidden=form.hidden,
        intermediate=form.intermediate,
        activation=ACTIVATIONS[form.activation],
        norm_eps=form.norms.eps,
        residual_scale=form.residual_scale,
        attention=AttentionStruct(form.heads, options.window or 0, options.scale, options.softcap or 0.0),
        **{name: weight.struct for name, weight in weights.items()},
        **{name: ctypes.c_void_p(norm.data_ptr()) for name, norm in norms.items()},
    )
