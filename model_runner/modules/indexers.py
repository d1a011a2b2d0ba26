"""Indexers of transformers' models, which select the positions that attention sees, on the paged cache.

An indexer compares small queries with one small key of each token. Its keys are stored in the paged cache, as a layer
without values. Its module returns the selection, which the model hands to `paged_attention`, where transformers' own
returns indices.
"""

import inspect
from collections.abc import Callable
from functools import partial, reduce
from types import MethodType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_runner.attention.backend import IndexOptions
from model_runner.modules.mixers import FindStates


class Selecting(Protocol):
    """Selects positions for the tokens of one forward pass."""

    positions: Tensor
    """[T] of these tokens."""

    def select(self, query: Tensor, key: Tensor, weights: Tensor | None, options: IndexOptions) -> Tensor:
        """The arguments and the result of `AttentionBackend.select`, without the layer."""
        ...

    def recall(self, rows: Tensor, block: int, count: int) -> tuple[Tensor, Tensor]:
        """The arguments and the result of `AttentionBackend.recall`, without the layer."""
        ...


FindAttention = Callable[[], Selecting | None]
"""Finds the attention of the pass that a model is in; None outside of the engine."""
Function = Callable[..., Any]


class Mask:
    """Stands for the attention mask of models with indexers, whose code slices it and joins it with selections."""

    dtype = torch.bool

    def __init__(self, selection: Tensor | None = None) -> None:
        self.selection = selection

    def __getitem__(self, index: Any) -> "Mask":
        return self

    def __and__(self, selection: Tensor) -> "Mask":
        return Mask(selection)


def _mask(find: FindAttention, original: Function, topk_indices: Tensor, **keywords: Any) -> Any:
    """GLM-5-next's method that makes a mask of its indices."""
    return original(topk_indices, **keywords) if find() is None else Mask(topk_indices)


MASKS = {
    **dict.fromkeys(("indexed_attention", "full_attention", "sliding_attention"), Mask()),
    "linear_attention": None,
}
"""The attention masks for models with indexers, by the kind of layer."""


def hook_indexers(model: nn.Module, find: FindAttention, find_states: FindStates) -> int:
    """Have every known indexer of a model select by the attention that `find` returns.

    While it returns None, they compute as before.

    Args:
        model: changed in place.
        find: finds the attention.
        find_states: finds the states, for indexers that pool keys.

    Returns:
        How many indexers there are.
    """
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "build_attention_mask_from_topk"):
            own = MethodType(type(module).build_attention_mask_from_topk, module)
            module.build_attention_mask_from_topk = partial(_mask, find, own)
    indexers: list[Any] = [module for module in modules if type(module).__name__ in INDEXERS]
    for indexer in indexers:
        own = MethodType(type(indexer).forward, indexer)
        ours = INDEXERS[type(indexer).__name__]
        if ours is _by_pools:
            ours = partial(ours, _Pooling(model, indexer, find_states))
        indexer.forward = partial(ours, find, own, indexer)
    return len(indexers)


def _lightning(
    find: FindAttention,
    original: Function,
    module: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *arguments: Any,
    rotates_last: bool = False,
    **keywords: Any,
) -> Any:
    """DeepSeek-V3.2's: [1, T, hidden] and [1, T, rank of queries] -> a selection of single positions.

    `rotates_last` says which part of a key has rotary positions.
    """
    step = find()
    if step is None:
        return original(hidden_states, q_resid, position_embeddings, *arguments, **keywords)
    query = module.wq_b(q_resid).unflatten(-1, (module.n_heads, module.head_dim))
    query, key = _turned(module, query, _key(module, hidden_states), position_embeddings, last=rotates_last)
    return _select(step, module, hidden_states, query, key)


def _from_hidden(
    find: FindAttention,
    original: Function,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor,
    **keywords: Any,
) -> Any:
    """Mistral Large 4's: as `_lightning`, with queries of hidden states, and in some layers no rotary positions."""
    step = find()
    if step is None:
        return original(hidden_states, position_embeddings, attention_mask, position_ids, **keywords)
    query = module.wq_b(module.q_input_norm(hidden_states)).unflatten(-1, (module.n_heads, module.head_dim))
    query, key = module.softmax_scaling(query, position_ids, head_dim_first=False), _key(module, hidden_states)
    if module.use_rope:
        query, key = _turned(module, query, key, position_embeddings)
    return _select(step, module, hidden_states, query, key)


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
    step: Selecting,
    module: Any,
    hidden_states: Tensor,
    query: Tensor,
    key: Tensor,
    options: IndexOptions | None = None,
) -> Tensor:
    """A selection, of single positions without options, by the weighted sum over the heads."""
    weights = module.weights_proj(hidden_states).float() * (module.n_heads**-0.5 * module.softmax_scale)
    return step.select(query[0], key[0], weights[0], options or IndexOptions(module.index_topk))


def _by_blocks(
    find: FindAttention,
    original: Function,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """MiniMax M3's: [1, T, hidden] -> a selection of blocks for each key-value head, or each group of these."""
    step = find()
    if step is None:
        return original(hidden_states, position_embeddings, *arguments, **keywords)
    if module.config.num_key_value_heads % module.num_heads:
        raise ValueError(f"{module.num_heads} index heads do not fit {module.config.num_key_value_heads} key heads")
    dim = module.head_dim
    query = module.q_norm(module.q_proj(hidden_states).unflatten(-1, (-1, dim)))
    key = module.k_norm(module.k_proj(hidden_states).unflatten(-1, (1, dim)))
    turns = (part[..., :dim] for part in position_embeddings)
    query, key = rotary_of(module)(query, key, *turns, unsqueeze_dim=2)
    options = IndexOptions(module.topk_blocks, module.block_size, local=module.local_blocks)
    return step.select(query[0], key[0], None, options)


class _Pooling:
    """States, rotary positions of other tokens and the weights of a mean, for Qwen4's indexers."""

    def __init__(self, model: nn.Module, indexer: Any, find: FindStates) -> None:
        self.find = find
        self.rotary: Any = next(module for module in model.modules() if type(module).__name__ in _POSITIONS)
        self.weights = torch.full((indexer.index_head_dim, indexer.compress_ratio), 1 / indexer.compress_ratio)


def _by_pools(
    pooling: _Pooling,
    find: FindAttention,
    original: Function,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """Qwen4's: [1, T, hidden] -> a selection of blocks, whose keys are means of their tokens' keys.

    A block's key is stored with its last token. It has the rotary position of the first. Other tokens' keys are unused.
    """
    step, states = find(), pooling.find()
    if step is None or states is None:
        return original(hidden_states, position_embeddings, attention_mask, *arguments, **keywords)
    size, dim = module.compress_ratio, module.index_head_dim
    query, raw = module.index_qk_proj(hidden_states).unflatten(-1, (-1, dim)).split((module.index_n_heads, 1), 2)
    key = module.k_layernorm(states.convolve(raw[0, :, 0], pooling.weights, None, None).unsqueeze(0))
    starts = (step.positions - (size - 1)).clamp(min=0)
    turns = pooling.rotary(key, starts.expand(3, 1, -1))
    turn = rotary_of(module)
    cos, sin = position_embeddings
    query = turn(module.q_layernorm(query), cos=cos, sin=sin, unsqueeze_dim=2)
    key = turn(key.unsqueeze(2), cos=turns[0], sin=turns[1], unsqueeze_dim=2)
    weights = query.new_full(query.shape[1:3], dim**-0.5)
    return step.select(query[0], key[0], weights, IndexOptions(module.block_topk, size, "last"))


def _by_gated_pools(
    find: FindAttention, original: Function, module: Any, hidden_states: Tensor, q_resid: Tensor, **keywords: Any
) -> Any:
    """GLM-5-next's: [1, T, hidden] -> a selection of blocks, whose keys are means weighted by gates.

    A block's key is stored with its last token. Other tokens' keys are unused.
    """
    step = find()
    if step is None:
        return original(hidden_states, q_resid, **keywords)
    if not module.index_kpool_always_select_tail:
        raise ValueError("index_kpool_always_select_tail false is not supported")
    size = module.index_kpool
    gates = F.linear(hidden_states, module.index_kpool_compress_gate)
    rows = torch.cat((_key(module, hidden_states)[0], gates[0].unsqueeze(1)), -1)
    tokens, recalled = step.recall(rows, size, size)
    keys, gates = recalled.chunk(2, -1)
    key = hidden_states.new_zeros(1, hidden_states.shape[1], 1, module.head_dim)
    key[0, tokens, 0] = gated_mean(gates + module.index_kpool_compress_ape.float(), keys).to(key.dtype)
    query = module.wq_b(q_resid).unflatten(-1, (module.n_heads, module.head_dim))
    return _select(step, module, hidden_states, query, key, IndexOptions(module.index_topk // size, size, "last"))


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


_POSITIONS = ("Qwen4ExpTextRotaryEmbedding",)
_ROTARIES = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")
INDEXERS: dict[str, Function] = {
    "AXK2Indexer": _lightning,
    "DeepseekV32Indexer": _lightning,
    "Dots3NoteTextIndexer": _lightning,
    "Glm5NextTextIndexer": _by_gated_pools,
    "GlmMoeDsaIndexer": _lightning,
    **dict.fromkeys(("HYV4Indexer", "HYV4VLIndexer"), partial(_lightning, rotates_last=True)),
    "MiniMaxM3VLIndexer": _by_blocks,
    "MistralLarge4TextIndexer": _from_hidden,
    "Qwen4ExpTextQSAIndexer": _by_pools,
}
"""Our forward of each indexer, by class."""
