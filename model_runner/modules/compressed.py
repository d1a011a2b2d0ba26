"""Compressed entries of DeepSeek V4: keys and values that stand for a block of positions, next to a window.

An entry is a mean of the rows of its block, and in one kind of layer of the block before, too, weighted by a softmax of
gates for each channel. It is computed with the last token of its block and stored at that token's place in the paged
cache. Rows and gates are kept in the cache as long as a later entry needs them. A query sees all entries of full
blocks, or those that an indexer selects by compressed keys of its own.
"""

from typing import Any

import torch
from torch import Tensor

from model_runner.attention.backend import IndexOptions
from model_runner.modules.indexers import gated_mean, rotary_of
from model_runner.modules.step import CurrentStep, StepAttention


def compress(
    current: CurrentStep,
    module: Any,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    *_: Any,
    **__: Any,
) -> Any:
    """[1, T, hidden] -> no entries for transformers' own attention, because ours sees them next to the window."""
    step = current.attention
    indexer = getattr(module, "indexer", None)
    entries = _entries(step, module, hidden_states, overlaps=indexer is not None)
    if indexer is None:
        selection = step.see_entries(module.compress_rate)
    else:
        selection = _select(step, indexer, hidden_states, q_residual, position_ids)
    step.put_beside(entries, selection)
    return hidden_states.new_zeros(1, 1, 0, module.head_dim), None


def _select(
    step: StepAttention, indexer: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor
) -> Tensor:
    """The entries with the highest scores, by compressed index keys."""
    key = _entries(step, indexer, hidden_states, overlaps=True)
    query = indexer.q_b_proj(q_residual).unflatten(-1, (-1, indexer.head_dim)).transpose(1, 2)
    turns = indexer.rotary_emb(hidden_states, position_ids=position_ids, layer_type=indexer.rope_layer_type)
    query = rotary_of(indexer)(query, *turns)[0].transpose(0, 1)
    scorer = indexer.scorer
    weights = scorer.weights_proj(hidden_states)[0].float() * (scorer.weights_scaling * scorer.softmax_scale)
    options = IndexOptions(indexer.index_topk, indexer.compress_rate, "last", entries=True)
    return step.select(query, key, weights, options)


def _entries(step: StepAttention, module: Any, hidden_states: Tensor, *, overlaps: bool) -> Tensor:
    """[1, T, hidden] -> [T, 1, dim]: the entry of each token that ends a block, and zeros for other tokens.

    With `overlaps`, rows have two parts: one for the next block's entry, and one for their own block's.
    """
    rate, dim = module.compress_rate, module.head_dim
    rows = torch.cat((module.kv_proj(hidden_states), module.gate_proj(hidden_states)), -1)[0]
    tokens, recalled = step.recall(rows.unsqueeze(1), rate, rate * (2 if overlaps else 1))
    values, gates = recalled.chunk(2, -1)  # [n, count, dim or 2 * dim]
    bias = module.position_bias.float()
    starts = step.positions[tokens] - (rate - 1)
    if overlaps:
        gates = torch.cat((gates[:, :rate, :dim] + bias[:, :dim], gates[:, rate:, dim:] + bias[:, dim:]), 1)
        values = torch.cat((values[:, :rate, :dim], values[:, rate:, dim:]), 1)
        is_first = (starts == 0)[:, None, None]
        gates[:, :rate].masked_fill_(is_first, -torch.inf)
        values[:, :rate].masked_fill_(is_first, 0)
    else:
        gates = gates + bias
    normed: Tensor = module.kv_norm(gated_mean(gates, values).to(hidden_states.dtype)).unsqueeze(0)
    turns = module.rotary_emb(normed, position_ids=starts.unsqueeze(0), layer_type=module.rope_layer_type)
    entries = normed.new_zeros(hidden_states.shape[1], dim)
    entries[tokens] = rotary_of(module)(normed.unsqueeze(1), *turns)[0, 0]
    return entries.unsqueeze(1)
