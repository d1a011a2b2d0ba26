"""Indexers of transformers' models, which select the positions that attention sees, on the paged cache.

An indexer compares small queries with one small key of each token. Its keys are stored in the paged cache, as a layer
without values. Its module returns the selection, which the model hands to `paged_attention`, where transformers' own
returns indices.
"""

import inspect
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model_runner.attention.backend import IndexOptions
from model_runner.modules.step import CurrentStep, Function, StepAttention


class Mask:
    """Stands for the attention mask of models with indexers, whose code slices it and joins it with selections."""

    dtype = torch.bool

    def __init__(self, selection: Tensor | None = None) -> None:
        self.selection = selection

    def __getitem__(self, index: Any) -> "Mask":
        return self

    def __and__(self, selection: Tensor) -> "Mask":
        return Mask(selection)


def mask_of_indices(_: CurrentStep, __: Any, topk_indices: Tensor, **___: Any) -> Mask:
    """GLM-5-next's method that makes a mask of indices."""
    return Mask(topk_indices)


MASKS = {
    **dict.fromkeys(("indexed_attention", "full_attention", "sliding_attention"), Mask()),
    "linear_attention": None,
}
"""The attention masks for models with indexers, by the kind of layer."""


def lightning(
    current: CurrentStep,
    module: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    rotates_last: bool = False,
    **__: Any,
) -> Any:
    """DeepSeek-V3.2's: [1, T, hidden] and [1, T, rank of queries] -> a selection of single positions.

    `rotates_last` says which part of a key has rotary positions.
    """
    query = module.wq_b(q_resid).unflatten(-1, (module.n_heads, module.head_dim))
    query, key = _turned(module, query, _key(module, hidden_states), position_embeddings, last=rotates_last)
    return _select(current.attention, module, hidden_states, query, key)


def from_hidden(
    current: CurrentStep,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor,
    **__: Any,
) -> Any:
    """Mistral Large 4's: as `lightning`, with queries of hidden states, and in some layers no rotary positions."""
    query = module.wq_b(module.q_input_norm(hidden_states)).unflatten(-1, (module.n_heads, module.head_dim))
    query, key = module.softmax_scaling(query, position_ids, head_dim_first=False), _key(module, hidden_states)
    if module.use_rope:
        query, key = _turned(module, query, key, position_embeddings)
    return _select(current.attention, module, hidden_states, query, key)


def _key(module: Any, hidden_states: Tensor) -> Tensor:
    """[1, T, hidden] -> [1, T, 1, head_dim]."""
    norm = module.k_norm
    key: Tensor = norm(module.wk(hidden_states).to(norm.weight.dtype)).to(hidden_states.dtype).unsqueeze(2)
    return key


def _turned(
    module: Any, query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor], *, last: bool = False
) -> tuple[Tensor, Tensor]:
    """Query and key [1, T, heads, head_dim] with rotary positions in their first or last numbers."""
    turned, plain = module.qk_rope_head_dim, module.head_dim - module.qk_rope_head_dim
    parts = [torch.split(part, [plain, turned] if last else [turned, plain], -1) for part in (query, key)]
    both = rotary_of(module)(*(part[last] for part in parts), *position_embeddings, unsqueeze_dim=2)
    if last:
        return torch.cat([parts[0][0], both[0]], -1), torch.cat([parts[1][0], both[1]], -1)
    return torch.cat([both[0], parts[0][1]], -1), torch.cat([both[1], parts[1][1]], -1)


def _select(
    step: StepAttention,
    module: Any,
    hidden_states: Tensor,
    query: Tensor,
    key: Tensor,
    options: IndexOptions | None = None,
) -> Tensor:
    """A selection, of single positions without options, by the weighted sum over the heads."""
    weights = module.weights_proj(hidden_states).float() * (module.n_heads**-0.5 * module.softmax_scale)
    return step.select(query[0], key[0], weights[0], options or IndexOptions(module.index_topk))


def by_blocks(
    current: CurrentStep,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> Any:
    """MiniMax M3's: [1, T, hidden] -> a selection of blocks for each key-value head, or each group of these."""
    if module.config.num_key_value_heads % module.num_heads:
        raise ValueError(f"{module.num_heads} index heads do not fit {module.config.num_key_value_heads} key heads")
    dim = module.head_dim
    query = module.q_norm(module.q_proj(hidden_states).unflatten(-1, (-1, dim)))
    key = module.k_norm(module.k_proj(hidden_states).unflatten(-1, (1, dim)))
    turns = (part[..., :dim] for part in position_embeddings)
    query, key = rotary_of(module)(query, key, *turns, unsqueeze_dim=2)
    options = IndexOptions(module.topk_blocks, module.block_size, local=module.local_blocks)
    return current.attention.select(query[0], key[0], None, options)


def by_pools(
    rotary: Any,
    current: CurrentStep,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any,
    *_: Any,
    **__: Any,
) -> Any:
    """Qwen4's: [1, T, hidden] -> a selection of blocks, whose keys are means of their tokens' keys.

    `rotary` makes the rotary positions. A block's key is stored with its last token, and has the rotary position of the
    first. Other tokens' keys are unused.
    """
    size, dim = module.compress_ratio, module.index_head_dim
    mean = torch.full((dim, size), 1 / size)
    query, raw = module.index_qk_proj(hidden_states).unflatten(-1, (-1, dim)).split((module.index_n_heads, 1), 2)
    key = module.k_layernorm(current.states.convolve(raw[0, :, 0], mean, None, None).unsqueeze(0))
    starts = (current.attention.positions - (size - 1)).clamp(min=0)
    turns = rotary(key, starts.expand(3, 1, -1))
    turn = rotary_of(module)
    cos, sin = position_embeddings
    query = turn(module.q_layernorm(query), cos=cos, sin=sin, unsqueeze_dim=2)
    key = turn(key.unsqueeze(2), cos=turns[0], sin=turns[1], unsqueeze_dim=2)
    weights = query.new_full(query.shape[1:3], dim**-0.5)
    return current.attention.select(query[0], key[0], weights, IndexOptions(module.block_topk, size, "last"))


def by_gated_pools(current: CurrentStep, module: Any, hidden_states: Tensor, q_resid: Tensor, **_: Any) -> Any:
    """GLM-5-next's: [1, T, hidden] -> a selection of blocks, whose keys are means weighted by gates.

    A block's key is stored with its last token. Other tokens' keys are unused.
    """
    if not module.index_kpool_always_select_tail:
        raise ValueError("index_kpool_always_select_tail false is not supported")
    size = module.index_kpool
    gates = F.linear(hidden_states, module.index_kpool_compress_gate)
    rows = torch.cat((_key(module, hidden_states)[0], gates[0].unsqueeze(1)), -1)
    tokens, recalled = current.attention.recall(rows, size, size)
    keys, gates = recalled.chunk(2, -1)
    key = hidden_states.new_zeros(1, hidden_states.shape[1], 1, module.head_dim)
    key[0, tokens, 0] = gated_mean(gates + module.index_kpool_compress_ape.float(), keys).to(key.dtype)
    query = module.wq_b(q_resid).unflatten(-1, (module.n_heads, module.head_dim))
    return _select(
        current.attention, module, hidden_states, query, key, IndexOptions(module.index_topk // size, size, "last")
    )


def gated_mean(gates: Tensor, rows: Tensor) -> Tensor:
    """Means of rows [n, count, dim] -> [n, dim], weighted by a softmax of gates [n, count, dim] for each channel.

    Rows are added in order, whatever n is.
    """
    weights = (gates - gates.amax(1, keepdim=True)).exp()
    total, divisor = (reduce(torch.add, part.unbind(1)) for part in (weights * rows, weights))
    return total / divisor


def rotary_of(module: Any) -> Function:
    """The function that applies rotary positions in a module's own forward."""
    forward = inspect.unwrap(type(module).forward)
    name = next(name for name in _ROTARIES if name in forward.__code__.co_names)
    rotary: Function = forward.__globals__[name]
    return rotary


_ROTARIES = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")
