"""Decoder layers of known families on CUDA: four products, attention, and four small kernels.

Nothing here waits for the GPU or derives a shape from data on it, so a forward pass can be captured in a CUDA graph.
"""

import copy
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from model_runner.attention.backend import AttentionOptions
from model_runner.attention.triton import cache_layer
from model_runner.cuda.linear import GROUPED_EXPERTS_NAME, MakeProduct, grouped_experts
from model_runner.features import decoder_layers
from model_runner.kernels.triton.linear import activate_and_multiply
from model_runner.kernels.triton.norm import add_and_norm, rms_norm
from model_runner.kernels.triton.rotary import rotate_and_write
from model_runner.kv_cache import KVCache
from model_runner.modules.attention import ATTENTION_NAME, paged_attention
from model_runner.modules.step import StepAttention
from model_runner.spec.layer_spec import AttentionSpec, LayerSpec
from model_runner.spec.model_spec import read_model_spec
from model_runner.weights.checkpoint import TensorCheckpoint
from model_runner.weights.interleaved_experts import deinterleave_experts
from model_runner.weights.matrix import Linear


class CacheAttention(Protocol):
    """Attention to keys and values that are already in the cache."""

    cache: KVCache

    def slots(self, layer: int, metadata: Any) -> Tensor:
        """[T] int64 slots of the step's tokens in the layer's blocks, for `write_kv`."""
        ...

    def attend(self, layer: int, query: Tensor, options: AttentionOptions, metadata: Any) -> Tensor:
        """Query [T, heads, head_dim] -> [T, heads, head_dim], as AttentionBackend.forward without keys and values."""
        ...


class CudaDecoderLayer(nn.Module):
    """Replaces a transformers decoder layer.

    Every intermediate result is rounded once, to the type of the hidden states; transformers rounds some of them twice.
    A row's result depends on other rows only if the products or the attention do.
    """

    def __init__(self, index: int, spec: LayerSpec, make_product: MakeProduct) -> None:
        super().__init__()
        self.index = index
        self._activation = spec.activation
        assert isinstance(spec.mixer, AttentionSpec), "recurrent layers stay modules"
        assert spec.mixer_input is not None
        assert spec.mixer_output is not None
        self._options = spec.mixer.options
        self._uses_rotary = spec.mixer.uses_rotary
        self._residual_scale = spec.residual_scale
        self._qkv = _Projection(spec.mixer_input, make_product)
        self._attention_output = _Projection(spec.mixer_output, make_product)
        assert spec.gate_up is not None, "layers without an MLP have experts"
        assert spec.down is not None
        self._gate_up = _Projection(spec.gate_up, make_product)
        self._down = _Projection(spec.down, make_product)
        norms = spec.norms
        self._eps = norms.eps
        self._attention_norm, self._attention_post_norm = _float(norms.attention), _float(norms.attention_post)
        self._mlp_norm, self._mlp_post_norm = _float(norms.mlp), _float(norms.mlp_post)
        self._head_norms = _float(norms.query), _float(norms.key)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention: StepAttention,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> Tensor:
        """Hidden states [1, T, hidden] -> the same shape. Other arguments of transformers' layers are ignored."""
        attention.num_calls += 1
        x = hidden_states[0]
        mixed = self._attend(x, attention, position_embeddings)
        x, inner = self._add(x, self._attention_output, mixed, self._attention_post_norm, self._mlp_norm)
        del mixed
        gated = activate_and_multiply(self._gate_up(inner), self._activation)  # [T, intermediate]
        del inner
        x, _inner = self._add(x, self._down, gated, self._mlp_post_norm, None)
        return x.unsqueeze(0)

    def _attend(self, x: Tensor, attention: StepAttention, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        """X [T, hidden] -> [T, heads * head_dim]; also writes keys and values to the cache."""
        backend, metadata = cast("CacheAttention", attention.backend), attention.metadata
        inner = x if self._attention_norm is None else rms_norm(x, self._attention_norm, self._eps)
        query = rotate_and_write(
            self._qkv(inner),
            self._rotation(position_embeddings),
            self._head_norms,
            self._eps,
            backend.slots(self.index, metadata),
            cache_layer(backend.cache, self.index),
        )
        mixed = backend.attend(self.index, query, self._options, metadata)  # [T, heads, head_dim]
        return mixed.flatten(1)

    def _rotation(self, position_embeddings: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        """Cos and sin [T, rotary_dim]; None for a layer without rotary positions."""
        if not self._uses_rotary:
            return None
        assert position_embeddings is not None, "the model has rotary positions"
        cos, sin = position_embeddings  # each [1, T, rotary_dim]
        return cos[0], sin[0]

    def _add(
        self, x: Tensor, projection: "_Projection", rows: Tensor, post_norm: Tensor | None, norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """X plus the projected rows, and the same after the next norm; both [T, hidden]."""
        if post_norm is None and self._residual_scale == 1:
            x = projection(rows, x)
            return x, x if norm is None else rms_norm(x, norm, self._eps)
        x, inner = add_and_norm(x, projection(rows), self._residual_scale, post_norm, norm, self._eps)
        return x, x if inner is None else inner


def replace_layers(model: PreTrainedModel, make_product: MakeProduct) -> int:
    """Replace the decoder layers of a known family that have only attention and an MLP.

    Replaced layers are freed at once: memory may not hold all weights twice.

    Returns:
        How many layers were replaced.
    """
    spec = read_model_spec(model.config, deinterleave_experts(TensorCheckpoint(model.state_dict())))
    if spec is None:
        return 0
    replaced, layers, remaining = 0, decoder_layers(model), list(reversed(spec.layers))
    del spec
    for index in range(len(layers)):
        layer = remaining.pop()
        if not _is_special(layer):
            layers[index] = CudaDecoderLayer(index, layer, make_product)
            replaced += 1
    return replaced


def _is_special(spec: LayerSpec) -> bool:
    is_plain = isinstance(spec.mixer, AttentionSpec) and not spec.mixer.is_gated and spec.parallel is None
    return spec.experts is not None or not is_plain or spec.norms.heads_together


class _Projection:
    """A linear layer whose rows may be added to a residual."""

    def __init__(self, linear: Linear, make_product: MakeProduct) -> None:
        self._product = make_product(linear.weight)
        self._bias = linear.bias

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """Rows [n, in], residual [n, out] -> [n, out]."""
        return self._product(rows, self._bias, residual)


def _float(factor: Tensor | None) -> Tensor | None:
    return None if factor is None else factor.float().contiguous()


_TOLERANCE = 1e-4
"""For float32 arithmetic; half precision or another formula differs by more."""
_TRIED_WIDTH = 24
"""Width of the rows on which norms without a weight are tried. They take any width."""
_INVARIANT = (nn.LayerNorm, nn.RMSNorm)


class CudaNorm(nn.Module):
    """Replaces an RMS norm, or layer norm without bias, over the last dimension."""

    def __init__(self, weight: Tensor | None, factor: Tensor | None, eps: float, *, is_centred: bool) -> None:
        """Without a factor, it is 1. `weight` is the norm's own: blocks of Mamba convert what they pass to its type."""
        super().__init__()
        self.weight = weight
        self._factor = factor
        self._eps = eps
        self._is_centred = is_centred

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., width] -> the same shape and type."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        factor = rows.new_ones(rows.shape[-1], dtype=torch.float32) if self._factor is None else self._factor
        return rms_norm(rows, factor, self._eps, is_centred=self._is_centred).view(hidden_states.shape)


@dataclass(frozen=True, slots=True)
class ReplacedNorms:
    """Result of `replace_norms`."""

    replaced: int
    varying: frozenset[str]
    """Classes of norms that were not replaced and may vary with the batch."""


def replace_norms(model: nn.Module) -> ReplacedNorms:
    """Replace every norm that is found to compute x / sqrt(mean(x²) + eps) * factor.

    Candidates are modules of a class whose name ends in "Norm", with an eps and at most a one-dimensional weight. The
    factor can be 1, the weight or 1 + weight (Gemma), and x can be centred first (Cohere). A trial on random float32
    rows decides which formula the module computes.
    """
    replaced, varying = 0, set()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not type(child).__name__.endswith("Norm") or isinstance(child, (CudaNorm, *_INVARIANT)):
                continue
            if (norm := _recognised(child)) is None:
                varying.add(type(child).__name__)
            else:
                setattr(parent, name, norm)
                replaced += 1
    return ReplacedNorms(replaced, frozenset(varying))


def _recognised(module: nn.Module) -> CudaNorm | None:
    """The equivalent CudaNorm, or None."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    eps = next(
        (own for name in ("eps", "variance_epsilon") if isinstance(own := getattr(module, name, None), float)), None
    )
    if eps is None or parameters.keys() - {"weight"} or (weight is not None and weight.dim() != 1):
        return None
    own = torch.ones(_TRIED_WIDTH) if weight is None else weight.detach().float()
    generator = torch.Generator().manual_seed(0)
    # Not centred, and rows of very different magnitudes, so that the mean and eps matter.
    rows = torch.randn(4, len(own), generator=generator) + 0.5
    rows = (rows * torch.tensor([[1e-3], [0.1], [1.0], [30.0]])).to(own.device)
    try:
        answer = copy.deepcopy(module).float()(rows)
    except (TypeError, ValueError, RuntimeError):
        return None  # it takes other arguments
    for factor in (own,) if weight is None else (own, 1 + own):
        for is_centred in (False, True):
            if _is_near(answer, _norm(rows, factor, eps, is_centred=is_centred)):
                return CudaNorm(weight, None if weight is None else factor, eps, is_centred=is_centred)
    return None


def _norm(rows: Tensor, factor: Tensor, eps: float, *, is_centred: bool) -> Tensor:
    """Float64 reference of CudaNorm."""
    x = rows.double()
    if is_centred:
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * factor.double()


def _is_near(answer: object, expected: Tensor) -> bool:
    if not isinstance(answer, Tensor) or answer.shape != expected.shape:
        return False
    return torch.allclose(answer.double(), expected, rtol=_TOLERANCE, atol=_TOLERANCE)


def compile_layers(model: PreTrainedModel) -> int:
    """Compile each of transformers' own decoder layers at its first call.

    Layers of the same class share compiled code, for any number of tokens above one. The attention stays uncompiled
    because it depends on the step, and the experts because torch's compiler lacks options of their kernels.
    This registers the uncompiled versions of both with transformers, for other models as well.

    Returns:
        How many of transformers' own layers there are.

    Raises:
        UnsupportedModelError: if the model's decoder layers cannot be found.
    """
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(paged_attention))  # type: ignore[no-untyped-call]
    ALL_EXPERTS_FUNCTIONS.register(GROUPED_EXPERTS_NAME, torch.compiler.disable(grouped_experts))  # type: ignore[no-untyped-call]
    own = [layer for layer in decoder_layers(model) if not isinstance(layer, CudaDecoderLayer)]
    for layer in own:
        layer.compile(dynamic=True)
    return len(own)
