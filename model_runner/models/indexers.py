"""Indexers of transformers' models, which select the positions that attention sees, on the paged cache.

An indexer compares small queries with one small key of each token. Its keys are stored in the paged cache like those of
attention. Its module returns the selection, which the model hands to `paged_attention`, where transformers' own returns
indices.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from model_runner.attention.backend import IndexOptions


class Selecting(Protocol):
    """Selects positions for the tokens of one forward pass."""

    def select(self, query: Tensor, key: Tensor, weights: Tensor | None, options: IndexOptions) -> Tensor:
        """The arguments and the result of `AttentionBackend.select`, without the layer."""
        ...


FindAttention = Callable[[], Selecting | None]
"""Finds the attention of the pass that a model is in; None outside of the engine."""
Function = Callable[..., Any]

NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""The attention mask for models with indexers, whose code slices it. The paged attention knows it by identity."""


def hook_indexers(model: nn.Module, find: FindAttention) -> int:
    """Have every known indexer of a model select by the attention that `find` returns; returns how many there are.

    While it returns None, they compute as before.
    """
    indexers: list[Any] = [module for module in model.modules() if type(module).__name__ in INDEXERS]
    for indexer in indexers:
        own = MethodType(type(indexer).forward, indexer)
        indexer.forward = partial(INDEXERS[type(indexer).__name__], find, own, indexer)
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
    both = _rotary(module)(*(part[last] for part in parts), *position_embeddings, unsqueeze_dim=2)
    if last:
        return torch.cat([parts[0][0], both[0]], -1), torch.cat([parts[1][0], both[1]], -1)
    return torch.cat([both[0], parts[0][1]], -1), torch.cat([both[1], parts[1][1]], -1)


def _select(step: Selecting, module: Any, hidden_states: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A selection of single positions by the weighted sum over the heads."""
    weights = module.weights_proj(hidden_states).float() * (module.n_heads**-0.5 * module.softmax_scale)
    return step.select(query[0], key[0], weights[0], IndexOptions(module.index_topk))


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
    query, key = _rotary(module)(query, key, *turns, unsqueeze_dim=2)
    options = IndexOptions(module.topk_blocks, module.block_size, local=module.local_blocks)
    return step.select(query[0], key[0], None, options)


def _rotary(module: Any) -> Function:
    """The function that applies rotary positions in a module's own forward."""
    forward = inspect.unwrap(type(module).forward)
    name = next(name for name in _ROTARIES if name in forward.__code__.co_names)
    rotary: Function = forward.__globals__[name]
    return rotary


_ROTARIES = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")
INDEXERS: dict[str, Function] = {
    "AXK2Indexer": _lightning,
    "DeepseekV32Indexer": _lightning,
    "Dots3NoteTextIndexer": _lightning,
    "GlmMoeDsaIndexer": _lightning,
    **dict.fromkeys(("HYV4Indexer", "HYV4VLIndexer"), partial(_lightning, rotates_last=True)),
    "MiniMaxM3VLIndexer": _by_blocks,
    "MistralLarge4TextIndexer": _from_hidden,
}
"""Our forward of each indexer, by class."""
