"""Paged attention for transformers' models, through transformers' attention interface.

The step's attention travels as a keyword argument from the model's call through every layer to `paged_attention`. Some
families' layers drop it; their modules have it from the model's `CurrentStep`. The functions at the end are for
families that do not use the interface.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from model_runner.attention.backend import AttentionOptions
from model_runner.modules.indexers import Mask
from model_runner.modules.step import CurrentStep, StepAttention, step_of

ATTENTION_NAME = "samewise"

_HARMLESS = frozenset(
    {
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)
"""Keyword arguments that models pass along and that have no effect here."""


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


def scale_by_position(module: Any, _: CurrentStep, __: nn.Module) -> None:
    """Let `paged_attention` scale queries, where Llama 4 would take a token's place in the batch for its position."""
    if module.attn_temperature_tuning and not module.use_rope:
        module.attn_temperature_tuning = False
        module.query_scale = QueryScale(module.floor_scale, module.attn_scale)


def see_images(module: Any, _: CurrentStep, __: nn.Module) -> None:
    """Let the rows of an image see each other."""
    module.sees_spans = True


def see_images_in_windows(module: Any, _: CurrentStep, __: nn.Module) -> None:
    """Let the rows of an image see each other in layers with a window, if the configuration says so."""
    module.sees_spans = module.is_sliding and module.config.use_bidirectional_attention == "vision"


def _chunk_of(module: Any) -> int | None:
    """The chunk size of a layer; transformers does not pass it on."""
    config = getattr(module, "config", None)
    size: int | None = getattr(config, "attention_chunk_size", None)
    if config is None or size is None or config.layer_types[module.layer_idx] != "chunked_attention":
        return None
    return size


def _check_kind(module: nn.Module, extra: Mapping[str, Any], *, needs_more: bool) -> None:
    """Raise ValueError for a kind of attention that is not supported."""
    unknown = sorted(name for name, argument in extra.items() if argument is not None and name not in _HARMLESS)
    if unknown or needs_more:
        raise ValueError(f"the model's attention needs {', '.join(unknown) or 'a mask or dropout'}: not supported")
    if extra.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError("the model's attention is not causal, so it cannot generate token by token")


def paged_attention(  # noqa: PLR0913, PLR0917 - the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    attention: StepAttention | None = None,
    dropout: float = 0.0,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The attention function that a transformers attention module calls.

    Args:
        module: the calling module.
        query: [1, heads, tokens, dim].
        key: [1, kv_heads, tokens, dim].
        value: [1, kv_heads, tokens, value_dim].
        attention_mask: None, because no mask function is registered, or from MASKS.
        scaling: factor on the scores; None: 1 / sqrt(dim).
        sliding_window: positions that a query sees, including its own; None: all.
        softcap: soft cap of the scores.
        s_aux: [heads] attention sinks, logits that take part in the softmax and have no value.
        indices: the selection of the layer's indexer, or of an earlier one.
        block_indices: the same, where the family calls it so.
        attention: the step's attention; None where the family's layers drop it: the module has it, too.
        dropout: 0, because the model is in evaluation mode.
        extra: other arguments of the model's family.

    Returns:
        The output [1, tokens, heads, value_dim], and no attention weights.

    Raises:
        ValueError: if the model uses a kind of attention that is not supported.
    """
    _check_kind(module, extra, needs_more=isinstance(attention_mask, Tensor) or dropout > 0)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    selections = indices, block_indices, getattr(attention_mask, "selection", None)
    selection = next((one for one in selections if one is not None), None)
    sees = getattr(module, "sees_spans", False)
    options = AttentionOptions(scale, sliding_window, softcap, _chunk_of(module), s_aux, selection, sees_spans=sees)
    step = attention or step_of(module).attention
    queries = query[0].transpose(0, 1)
    if (query_scale := getattr(module, "query_scale", None)) is not None:
        queries = (queries * query_scale(step.positions)).to(queries.dtype)
    if (latents := getattr(module, "latents", None)) is not None:
        queries = latents.absorb(queries)
    output = step.of(module, queries, key[0].transpose(0, 1), value[0].transpose(0, 1), options)
    return (output if latents is None else latents.expand(output)).unsqueeze(0), None


def gpt_neo(
    current: CurrentStep, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, None]:
    """A method between a module's products: heads [1, heads, tokens, dim] -> the same shape, and no weights."""
    window = module.config.window_size if module.attention_type == "local" else None
    return _attend(current, module, query, key, value, 1.0, window), None


def gpt_neox_japanese(
    current: CurrentStep, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, None]:
    """As `gpt_neo`."""
    return _attend(current, module, query, key, value, 1 / float(module.norm_factor)), None


def openai_gpt(current: CurrentStep, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> list[Tensor]:
    """As `gpt_neo`, with keys [1, heads, dim, tokens]."""
    scale = value.shape[-1] ** -0.5 if module.scale else 1.0
    return [_attend(current, module, query, key.transpose(-2, -1), value, scale)]


def xglm(current: CurrentStep, module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """A whole attention module, which has no method for its middle: [1, T, hidden] -> the same shape."""
    rows = (projection(hidden_states) for projection in (module.q_proj, module.k_proj, module.v_proj))
    query, key, value = (part.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for part in rows)
    output = _attend(current, module, query, key, value, module.scaling)
    return module.out_proj(output.transpose(1, 2).flatten(2)), None


def falcon(
    current: CurrentStep,
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> tuple[Tensor, None]:
    """As `xglm`. Each group of heads has its queries, then its key and its value.

    Raises:
        ValueError: if scores depend on distances.
    """
    if alibi is not None:
        raise ValueError("the model's attention has a bias by distance (alibi): not supported")
    groups = module.num_kv_heads if module.new_decoder_architecture or module.multi_query else module.num_heads
    rows = module.query_key_value(hidden_states).unflatten(-1, (groups, -1, module.head_dim))
    parts = rows[..., :-2, :].flatten(2, 3), rows[..., -2, :], rows[..., -1, :]
    query, key, value = (part.transpose(1, 2) for part in parts)
    rotate = type(module).forward.__globals__["apply_rotary_pos_emb"]
    query, key = rotate(query, key, *position_embeddings)
    output = _attend(current, module, query, key, value, module.inv_norm_factor)
    return module.dense(output.transpose(1, 2).flatten(2)), None


def _attend(
    current: CurrentStep,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention for families that do not use transformers' interface: [1, heads, tokens, dim] in and out."""
    output, _ = paged_attention(module, query, key, value, None, scale, window, attention=current.attention)
    return output.transpose(1, 2)
