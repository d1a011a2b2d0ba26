"""Paged attention in plain torch for any device: the reference that the native backends are tested against.

Every query row is paired with each KV block it sees. A pair is one matrix product of fixed shape, [heads per kv head,
dim] x [dim, block_size], whatever the batch. A row's partial sums are added in the order of positions. Blocks start at
multiples of the block size, so prefill, chunks and decoding split the keys at the same places and round alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from model_runner.attention.backend import AttentionBackend, AttentionOptions
from model_runner.batch import Batch, Int32Array, IntArray, TreePaths
from model_runner.kv_cache import KVCache

_PAIRS_AT_ONCE = 512
"""Bounds the memory of gathered blocks. Results do not depend on it."""


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Query rows and the (row, block) pairs they see. Rows with most blocks come first.

    Pairs are ordered by the ordinal of the block within its row, then by row: the pairs of ordinal j belong to the
    first `widths[j]` rows.
    """

    rows: Tensor  # [n] query rows
    pair_row: Tensor  # [pairs] index into rows
    pair_block: Tensor  # [pairs] physical block; with trees [pairs, block_size], one per position
    pair_offset: Tensor | None  # [pairs, block_size] offset of each position in its block; None when in order
    bias: Tensor  # [pairs, 1, 1, block_size] 0 where the row sees the key, -inf elsewhere
    widths: list[int]

    def to(self, device: torch.device) -> "RowTiles":
        """A copy on a device."""
        offset = None if self.pair_offset is None else self.pair_offset.to(device)
        rows, pair_row, block, bias = (t.to(device) for t in (self.rows, self.pair_row, self.pair_block, self.bias))
        return RowTiles(rows, pair_row, block, offset, bias, self.widths)


@dataclass(frozen=True, slots=True)
class ReferenceMetadata:
    """The batch and its tiles for each window and chunk size."""

    batch: Batch
    block_of: Tensor  # [tokens] as in Batch
    offset_of: Tensor  # [tokens]
    tiles: dict[tuple[int | None, int | None, bool], list[RowTiles]] = field(default_factory=dict)


class ReferenceAttention(AttentionBackend[Sequence[ReferenceMetadata]]):
    """Attention over gathered blocks."""

    needs_clean_blocks = True

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def prepare(self, batch: Batch) -> Sequence[ReferenceMetadata]:
        """For each group of blocks. Tiles are made when the first layer with their window and chunk needs them."""
        return [self._prepare(batch.in_group(number)) for number in range(self._cache.num_groups)]

    def _prepare(self, batch: Batch) -> ReferenceMetadata:
        device = self._cache.device
        block_of, offset_of = (torch.from_numpy(of).to(device) for of in (batch.block_of, batch.offset_of))
        return ReferenceMetadata(batch, block_of, offset_of)

    def forward(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
        metadata: Sequence[ReferenceMetadata],
    ) -> Tensor:
        own = metadata[self._cache.group_of[layer]]
        self._cache.write(layer, key, value, own.block_of, own.offset_of)
        return self.attend(layer, query, options, metadata)

    def attend(
        self, layer: int, query: Tensor, options: AttentionOptions, metadata: Sequence[ReferenceMetadata]
    ) -> Tensor:
        own = metadata[self._cache.group_of[layer]]
        limits = options.window, options.chunk, options.sees_spans
        tiles = own.tiles.get(limits)
        if tiles is None:
            tiles = _make_tiles(own.batch, self._cache.block_size, options, query.device)
            own.tiles[limits] = tiles
        output = query.new_empty(*query.shape[:2], self._cache.shapes[layer].value_dim)  # [tokens, heads, value_dim]
        for part in tiles:
            output[part.rows] = self._attend(layer, query, part, options)
        return output

    def _attend(self, layer: int, query: Tensor, part: RowTiles, options: AttentionOptions) -> Tensor:
        """Output [rows, heads, value_dim] for the rows of `part`."""
        keys, values = self._read(layer, part, query.dtype)
        pairs, kv_heads, dim, block_size = keys.shape
        group = query.shape[1] // kv_heads
        rows = query.index_select(0, part.rows).to(keys.dtype)
        queries = rows.index_select(0, part.pair_row).view(pairs * kv_heads, group, dim)

        scores = _batched_product(queries, keys.view(-1, dim, block_size)).float().mul_(options.scale)
        if options.softcap is not None:
            scores.div_(options.softcap).tanh_().mul_(options.softcap)
        scores = scores.view(pairs, kv_heads, group, block_size).add_(part.bias)

        highest = _fold(scores.amax(-1), part.widths, torch.maximum)  # [rows, kv_heads, group]
        if options.sinks is not None:
            sinks = options.sinks.float().view(kv_heads, group)
            highest = torch.maximum(highest, sinks)
        weights = scores.sub_(highest.index_select(0, part.pair_row).unsqueeze(-1)).exp_()
        total = _fold(weights.sum(-1), part.widths, torch.add)
        if options.sinks is not None:
            total += (sinks - highest).exp_()
        weighted = _batched_product(
            weights.view(-1, group, block_size).to(values.dtype), values.view(pairs * kv_heads, block_size, -1)
        )
        summed = _fold(weighted.float().view(pairs, kv_heads, group, -1), part.widths, torch.add)
        return (summed / total.unsqueeze(-1)).flatten(1, 2).to(query.dtype)

    def _read(self, layer: int, part: RowTiles, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [pairs, kv_heads, dim, block_size] and values [pairs, kv_heads, block_size, dim] of the pairs.

        They have the dtype in which products with queries of `dtype` are computed.
        """
        if part.pair_offset is None:
            keys, values = self._cache.read_blocks(layer, part.pair_block)
        else:
            keys, values = self._cache.read_places(layer, part.pair_block, part.pair_offset)
        dtype = torch.promote_types(dtype, keys.dtype)
        return keys.to(dtype), values.to(dtype)


def _batched_product(left: Tensor, right: Tensor) -> Tensor:
    """torch.bmm for any batch size. For a batch of one, torch rounds differently, so it is doubled."""
    if left.shape[0] == 1:
        return torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1]
    return torch.bmm(left, right)


def _fold(pairs: Tensor, widths: list[int], combine: Callable[..., Tensor]) -> Tensor:
    """Combine the pairs [pairs, ...] of each row, in the order of their ordinals, into [rows, ...]."""
    result, start = pairs[: widths[0]].clone(), widths[0]
    for width in widths[1:]:
        combine(result[:width], pairs[start : start + width], out=result[:width])
        start += width
    return result


def _make_tiles(batch: Batch, block_size: int, options: AttentionOptions, device: torch.device) -> list[RowTiles]:
    """Pair all rows of the batch with the blocks they see, in parts of bounded size."""
    lowest, highest = _lowest_seen(batch.positions, options), batch.positions
    if batch.span_last is not None and options.sees_spans:
        highest = batch.span_last
    last, first = highest // block_size, lowest // block_size
    counts = last - first + 1
    order = np.argsort(-counts, kind="stable")
    table = batch.block_table()
    parts, start = [], 0
    while start < len(order):
        fitting = max(1, _PAIRS_AT_ONCE // int(counts[order[start]]))
        rows = order[start : start + fitting]
        seen = lowest[rows], highest[rows]
        parts.append(_make_part(batch, table, rows, seen, counts[rows], block_size).to(device))
        start += fitting
    return parts


def _lowest_seen(positions: IntArray, options: AttentionOptions) -> IntArray:
    """The first position that a query at each of these positions sees."""
    lowest = np.zeros_like(positions)
    if options.window is not None:
        lowest = np.maximum(lowest, positions - options.window + 1)
    if options.chunk is not None:
        lowest = np.maximum(lowest, positions - positions % options.chunk)
    return lowest


def _make_part(
    batch: Batch,
    table: Int32Array,
    rows: IntArray,
    seen_positions: tuple[IntArray, IntArray],
    counts: IntArray,
    block_size: int,
) -> RowTiles:
    """The tiles of `rows`, which are sorted by descending number of blocks.

    `table` is the batch's block table; `seen_positions` are the first and the last position that each row sees.
    """
    lowest, highest = seen_positions
    widths = (counts[None, :] > np.arange(counts[0])[:, None]).sum(axis=1)
    ordinal = np.repeat(np.arange(counts[0]), widths)
    pair_row = np.concatenate([np.arange(width) for width in widths])
    index = lowest[pair_row] // block_size + ordinal  # logical block of each pair
    token = rows[pair_row]
    position = highest[pair_row, None]
    key_position = index[:, None] * block_size + np.arange(block_size)
    owner = batch.choice_of[token]
    if batch.paths is None:
        block, offset = table[owner, index], None
    else:
        place = _places(batch.paths, token, position, key_position)
        block, offset = table[owner[:, None], place // block_size], place % block_size
    seen = (key_position <= position) & (key_position >= lowest[pair_row, None])
    bias = torch.zeros(len(index), 1, 1, block_size)
    bias.masked_fill_(torch.from_numpy(~seen).view_as(bias), -torch.inf)
    return RowTiles(
        rows=torch.from_numpy(rows),
        pair_row=torch.from_numpy(pair_row),
        pair_block=torch.from_numpy(block),
        pair_offset=None if offset is None else torch.from_numpy(offset),
        bias=bias,
        widths=widths.tolist(),
    )


def _places(paths: TreePaths, token: IntArray, position: IntArray, key_position: IntArray) -> IntArray:
    """Places of the key positions [pairs, block_size] that tokens [pairs] at positions [pairs, 1] see."""
    start = paths.start[token, None]
    on_path = (key_position >= start) & (key_position <= position)
    entry = paths.first[token, None] + key_position - start
    places = key_position.copy()
    places[on_path] = paths.places[entry[on_path]]
    return places
