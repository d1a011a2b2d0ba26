"""Reference implementation of a LayerSpec in plain torch and float64."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from model_runner.spec.layer_family import ClampedGate
from model_runner.spec.layer_spec import ExpertsSpec, LayerSpec
from model_runner.weights.matrix import DenseMatrix, Linear


def _norm(x: Tensor, factor: Tensor | None, eps: float) -> Tensor:
    if factor is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * factor.double()


def _linear(linear: Linear, x: Tensor) -> Tensor:
    y = x @ linear.weight.double().T
    return y if linear.bias is None else y + linear.bias.double()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [heads, tokens, head_dim]: the two halves of the leading rotary_dim dimensions are pairs."""
    width = cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return torch.cat([x[..., :width] * cos + rotated * sin, x[..., width:]], dim=-1)


def _attention(spec: LayerSpec, x: Tensor, cos_sin: tuple[Tensor, Tensor] | None) -> Tensor:
    heads = (
        _linear(spec.mixer_input, x).unflatten(-1, (-1, spec.mixer.head_dim)).transpose(0, 1)
    )  # [heads, tokens, head_dim]
    query, key, value = heads.split([spec.mixer.heads, spec.mixer.kv_heads, spec.mixer.kv_heads])
    query = _norm(query, spec.norms.query, spec.norms.eps)
    key = _norm(key, spec.norms.key, spec.norms.eps)
    if spec.mixer.uses_rotary:
        assert cos_sin is not None
        repeats = 1 if spec.mixer.options.sinks is None else 2  # gpt-oss's modules compute each pair's angle once
        cos, sin = (angles.repeat(1, repeats).double() for angles in cos_sin)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
    group = spec.mixer.heads // spec.mixer.kv_heads
    scores = (
        query @ key.repeat_interleave(group, 0).transpose(1, 2) * spec.mixer.options.scale
    )  # [heads, tokens, tokens]
    if spec.mixer.options.softcap is not None:
        scores = spec.mixer.options.softcap * (scores / spec.mixer.options.softcap).tanh()
    places = torch.arange(len(x), device=x.device)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < (spec.mixer.options.window or len(x)))
    scores = scores.masked_fill(~seen, -torch.inf)
    if (sinks := spec.mixer.options.sinks) is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(x), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(x)]
    mixed = weights @ value.repeat_interleave(group, 0)
    return _linear(spec.mixer_output, mixed.transpose(0, 1).flatten(1))


_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def route(experts: ExpertsSpec, x: Tensor) -> tuple[Tensor, Tensor]:
    """ExpertsSpec of rows x [tokens, hidden] and their weights; both [tokens, top_k]."""
    logits = x.double() @ experts.router.double().T
    if experts.router_bias is not None:
        logits += experts.router_bias.double()
    scores = logits.softmax(-1) if experts.scoring == "softmax" else logits.sigmoid()
    bias = 0 if experts.choice_bias is None else experts.choice_bias.double()
    chosen = (scores + bias).topk(experts.top_k).indices
    weights = scores.gather(1, chosen)
    return chosen, weights / (weights.sum(1, keepdim=True) if experts.normalised else 1) * experts.scale


def sum_of_experts(experts: ExpertsSpec, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """[tokens, hidden] of rows x [tokens, hidden] and their experts [tokens, k]."""
    gate_up, down = (
        torch.stack([linear.weight.double() for linear in linears]) for linears in (experts.gate_up, experts.down)
    )
    gate, up = (torch.einsum("th,tkoh->tko", x.double(), gate_up[chosen]) + _biases(experts.gate_up)[chosen]).chunk(
        2, dim=-1
    )
    outputs = torch.einsum("tki,tkhi->tkh", _gated(experts, gate, up), down[chosen]) + _biases(experts.down)[chosen]
    return torch.einsum("tkh,tk->th", outputs, weights.double())


def _biases(linears: Sequence[Linear]) -> Tensor:
    """[experts, outputs] in float64."""
    nothing = torch.zeros(linears[0].outputs)
    return torch.stack([nothing if linear.bias is None else linear.bias for linear in linears]).double()


def _gated(experts: ExpertsSpec, gate: Tensor, up: Tensor) -> Tensor:
    if not isinstance(experts.activation, ClampedGate):
        return _ACTIVATIONS[experts.activation](gate) * up
    alpha, limit = experts.activation.alpha, experts.activation.limit
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * (alpha * gate).sigmoid()


def run_experts(experts: ExpertsSpec, x: Tensor, beside: Tensor) -> Tensor:
    """The experts' output plus the output of the parallel MLP, all [tokens, hidden]."""
    gate = 1.0 if experts.mlp_gate is None else (x @ experts.mlp_gate.double()).sigmoid().unsqueeze(-1)
    return sum_of_experts(experts, x, *route(experts, x)) + gate * beside


def run_form(spec: LayerSpec, hidden: Tensor, cos_sin: tuple[Tensor, Tensor] | None) -> Tensor:
    """The layer's answer [tokens, hidden] in float64 to one whole sequence; cos and sin are [tokens, rotary_dim]."""
    activation = _ACTIVATIONS[spec.activation]
    norms, x = spec.norms, hidden.double()
    added = _attention(spec, _norm(x, norms.attention, norms.eps), cos_sin)
    x = x + spec.residual_scale * _norm(added, norms.attention_post, norms.eps)
    inner = _norm(x, norms.mlp, norms.eps)
    added = torch.zeros_like(inner)
    if spec.gate_up is not None and spec.down is not None:
        gate, up = _linear(spec.gate_up, inner).chunk(2, dim=-1)
        added = _linear(spec.down, activation(gate) * up)
    if spec.experts is not None:
        added = run_experts(spec.experts, inner, added)
    return x + spec.residual_scale * _norm(added, norms.mlp_post, norms.eps)


def with_up_first(spec: LayerSpec) -> LayerSpec:
    """A wrong form: gate and up are exchanged."""
    assert spec.gate_up is not None
    gate, up = spec.gate_up.weight.chunk(2)
    return replace(spec, gate_up=Linear([DenseMatrix(up), DenseMatrix(gate)]))
