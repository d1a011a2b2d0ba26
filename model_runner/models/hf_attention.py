"""Paged attention for transformers' models, through transformers' attention interface.

The step's backend and metadata travel as one keyword argument from the model's call through every layer to the
attention function. So there is no global state, and the model code needs no change.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from model_runner.attention.backend import AttentionBackend, AttentionOptions

ATTENTION_NAME = "samewise"

_HARMLESS = frozenset({"position_ids", "use_cache", "is_causal", "output_attentions", "output_router_logits"})
"""Keyword arguments that models pass along and that have no effect here."""


class StepAttention:
    """An attention backend, its metadata for one step, and the step's positions [T]."""

    def __init__(self, backend: AttentionBackend[Any], metadata: Any, positions: Tensor | None = None) -> None:
        self.backend = backend
        self.metadata = metadata
        self.positions = positions

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        return self.backend.forward(layer, query, key, value, options, self.metadata)


def register_attention() -> None:
    """Register `paged_attention` with transformers, unless compile_layers registered an uncompiled version.

    Without a mask function for that name, transformers builds no mask.
    """
    if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(ATTENTION_NAME, paged_attention)


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Llama 4's factor on the queries of layers without rotary positions."""

    interval: float
    strength: float

    def __call__(self, positions: Tensor) -> Tensor:
        """Positions [T] -> factors [T, 1, 1]."""
        steps = ((positions.float() + 1) / self.interval).floor()
        return (steps.log1p() * self.strength + 1)[:, None, None]


def adapt_attention(model: nn.Module) -> None:
    """Let `paged_attention` scale queries, where the modules would take a token's place in the batch for its position.

    The modules are changed in place.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            module.attn_temperature_tuning = False
            module.query_scale = QueryScale(module.floor_scale, module.attn_scale)


def _chunk_of(module: Any) -> int | None:
    """The chunk size of a layer; transformers does not pass it on."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    is_chunked = kinds is not None and kinds[module.layer_idx] == "chunked_attention"
    chunk: int | None = config.attention_chunk_size if is_chunked else None
    return chunk


def paged_attention(  # noqa: PLR0913, PLR0917 - the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    attention: StepAttention,
    dropout: float = 0.0,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The attention function that a transformers attention module calls.

    Args:
        module: the calling module; its `layer_idx` is the layer.
        query: [1, heads, tokens, dim].
        key: [1, kv_heads, tokens, dim].
        value: [1, kv_heads, tokens, value_dim].
        attention_mask: always None, because no mask function is registered.
        scaling: factor on the scores; None: 1 / sqrt(dim).
        sliding_window: positions that a query sees, including its own; None: all.
        softcap: soft cap of the scores.
        s_aux: [heads] attention sinks, logits that take part in the softmax and have no value.
        attention: the step's attention.
        dropout: 0, because the model is in evaluation mode.
        extra: other arguments of the model's family.

    Returns:
        The output [1, tokens, heads, value_dim], and no attention weights.

    Raises:
        ValueError: if the model uses a kind of attention that is not supported.
    """
    unknown = sorted(name for name, argument in extra.items() if argument is not None and name not in _HARMLESS)
    if unknown or attention_mask is not None or dropout:
        raise ValueError(f"the model's attention needs {', '.join(unknown) or 'a mask or dropout'}: not supported")
    if extra.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError("the model's attention is not causal, so it cannot generate token by token")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    options = AttentionOptions(scale, sliding_window, softcap, _chunk_of(module), s_aux)
    queries = query[0].transpose(0, 1)
    if (query_scale := getattr(module, "query_scale", None)) is not None:
        queries = (queries * query_scale(attention.positions)).to(queries.dtype)
    output = attention(
        module.layer_idx,  # type: ignore[arg-type]
        queries,
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        options,
    )
    return output.unsqueeze(0), None
