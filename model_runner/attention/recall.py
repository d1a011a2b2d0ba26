"""Rows that are kept by position in the paged cache, and read back where a block of positions ends."""

# Short: two backends use it.

import numpy as np
import torch
from torch import Tensor

from model_runner.batch import Batch, IntArray, TreePaths
from model_runner.kv_cache import KVCache


def recall(cache: KVCache, layer: int, rows: Tensor, sizes: tuple[int, int], batch: Batch) -> tuple[Tensor, Tensor]:
    """`AttentionBackend.recall` for a batch; `sizes` are the block's, and how many rows are read."""
    block, count = sizes
    own = batch.in_group(cache.group_of[layer])
    places = (torch.from_numpy(of).to(cache.device) for of in (own.block_of, own.offset_of))
    cache.write(layer, rows, rows[..., :0], *places)
    tokens = np.flatnonzero((own.positions + 1) % block == 0)
    position = own.positions[tokens, None]
    wanted = (position - count + 1 + np.arange(count)).clip(0)
    if own.paths is not None:
        wanted = places_of(own.paths, tokens, position, wanted)
    blocks = own.block_table()[own.choice_of[tokens, None], wanted // cache.block_size]
    found = (torch.from_numpy(of).to(cache.device) for of in (blocks.astype(np.int64), wanted % cache.block_size))
    keys, _ = cache.read_places(layer, *found)
    return torch.from_numpy(tokens), keys[:, 0].transpose(1, 2).float()


def places_of(paths: TreePaths, token: IntArray, position: IntArray, key_position: IntArray) -> IntArray:
    """Places of the key positions [pairs, block_size] that tokens [pairs] at positions [pairs, 1] see."""
    start = paths.start[token, None]
    on_path = (key_position >= start) & (key_position <= position)
    entry = paths.first[token, None] + key_position - start
    places = key_position.copy()
    places[on_path] = paths.places[entry[on_path]]
    return places
