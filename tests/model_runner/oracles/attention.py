"""Paged attention in plain torch for any device, which the native backends are tested against.

Every query row is paired with each KV block it sees. A pair is one matrix product of fixed shape, [heads per kv head,
dim] x [dim, block_size], whatever the batch. A row's partial sums are added in the order of positions. Blocks start at
multiples of the block size, so prefill, chunks and decoding split the keys at the same places and round alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model_runner.attention.backend import AttentionBackend, AttentionOptions, IndexOptions
from model_runner.attention.cpu import places_of, recall
from model_runner.batch import Batch, Int32Array, IntArray
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
    pair_index: Tensor  # [pairs] which of its choice's blocks it is
    pair_block: Tensor  # [pairs] physical block; with trees [pairs, block_size], one per position
    pair_offset: Tensor | None  # [pairs, block_size] offset of each position in its block; None when in order
    bias: Tensor  # [pairs, 1, 1, block_size] 0 where the row sees the key, -inf elsewhere
    widths: list[int]

    def to(self, device: torch.device) -> "RowTiles":
        """A copy on a device."""
        offset = None if self.pair_offset is None else self.pair_offset.to(device)
        rows, pair_row, index, block = (
            part.to(device) for part in (self.rows, self.pair_row, self.pair_index, self.pair_block)
        )
        return RowTiles(rows, pair_row, index, block, offset, self.bias.to(device), self.widths)


@dataclass(frozen=True, slots=True)
class ReferenceMetadata:
    """The batch and its tiles for each window and chunk size."""

    batch: Batch
    block_of: Tensor  # [tokens] as in Batch
    offset_of: Tensor  # [tokens]
    tiles: dict[tuple[int | None, int | None, bool], list[RowTiles]] = field(default_factory=dict)


class ReferenceAttention(AttentionBackend[Sequence[ReferenceMetadata]]):
    """Attention over gathered blocks."""

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
        tiles = self._tiles(own, options, query.device)
        output = query.new_empty(*query.shape[:2], self._cache.shapes[layer].value_dim)  # [tokens, heads, value_dim]
        for part in tiles:
            output[part.rows], *sums = self._attend(layer, query, part, options)
            if options.sums is not None:
                options.sums[part.rows] = torch.stack(sums, -1)
        return output

    def select(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        weights: Tensor | None,
        options: IndexOptions,
        metadata: Sequence[ReferenceMetadata],
    ) -> Tensor:
        """Returns [tokens, selections, positions] bool: whether a query sees a position."""
        own = metadata[self._cache.group_of[layer]]
        self._cache.write(layer, key, key[..., :0], own.block_of, own.offset_of)
        heads = query.shape[1]
        count = int(own.batch.positions.max()) // self._cache.block_size + 1
        scores = query.new_full(
            (len(query), heads if weights is None else 1, count * self._cache.block_size), -torch.inf
        )
        for part in self._tiles(own, AttentionOptions(1.0), query.device):
            keys, _ = self._read(layer, part, query.dtype)  # [pairs, 1, dim, block_size]
            rows = part.rows.index_select(0, part.pair_row)
            products = _batched_product(query.to(keys.dtype).index_select(0, rows), keys[:, 0])
            if weights is not None:
                weighing = weights.to(products.dtype).index_select(0, rows).unsqueeze(1)
                products = _batched_product(weighing, products.clamp_(min=0))
            places = part.pair_index.unsqueeze(1) * self._cache.block_size + torch.arange(
                self._cache.block_size, device=query.device
            )
            products = products.masked_fill(part.bias[:, 0] < 0, -torch.inf)
            scores[rows[:, None], :, places] = products.transpose(1, 2).to(scores.dtype)
        positions = torch.from_numpy(own.batch.positions).to(query.device)
        return _select(scores, positions, options)

    def see_entries(self, block: int, metadata: Sequence[ReferenceMetadata]) -> Tensor:
        batch, size = metadata[0].batch, self._cache.block_size
        length = (int(batch.positions.max()) // size + 1) * size
        is_last = torch.arange(1, length + 1, device=self._cache.device) % block == 0
        return is_last.expand(len(batch.positions), 1, -1)

    def recall(
        self, layer: int, rows: Tensor, block: int, count: int, metadata: Sequence[ReferenceMetadata]
    ) -> tuple[Tensor, Tensor]:
        return recall(self._cache, layer, rows, (block, count), metadata[0].batch)

    def _tiles(self, own: ReferenceMetadata, options: AttentionOptions, device: torch.device) -> list[RowTiles]:
        """The tiles for a layer's window and chunk size, made when they are first needed."""
        limits = options.window, options.chunk, options.sees_spans
        if limits not in own.tiles:
            own.tiles[limits] = _make_tiles(own.batch, self._cache.block_size, options, device)
        return own.tiles[limits]

    def _attend(
        self, layer: int, query: Tensor, part: RowTiles, options: AttentionOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For the rows of `part`: outputs [rows, heads, value_dim], and the two numbers of `AttentionOptions.sums`."""
        keys, values = self._read(layer, part, query.dtype)
        pairs, kv_heads, dim, block_size = keys.shape
        group = query.shape[1] // kv_heads
        rows = query.index_select(0, part.rows).to(keys.dtype)
        queries = rows.index_select(0, part.pair_row).view(pairs * kv_heads, group, dim)

        scores = _batched_product(queries, keys.view(-1, dim, block_size)).float().mul_(options.scale)
        if options.softcap is not None:
            scores.div_(options.softcap).tanh_().mul_(options.softcap)
        scores = scores.view(pairs, kv_heads, group, block_size)
        scores.masked_fill_(part.bias < 0, -torch.inf)  # also NaN that an earlier choice left in the block
        if options.selection is not None:
            tiles = options.selection.view(*options.selection.shape[:2], -1, block_size)
            seen = tiles[
                part.rows.index_select(0, part.pair_row), :, part.pair_index
            ]  # [pairs, selections, block_size]
            seen = seen.repeat_interleave(kv_heads // seen.shape[1], 1)
            scores.masked_fill_(~seen.unsqueeze(2), -torch.inf)

        highest = _fold(scores.amax(-1), part.widths, torch.maximum)  # [rows, kv_heads, group]
        highest.clamp_(min=torch.finfo(highest.dtype).min)  # of a row that sees nothing
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
        output = (summed / total.unsqueeze(-1)).flatten(1, 2).to(query.dtype)
        return output, highest.flatten(1), total.flatten(1)

    def _read(self, layer: int, part: RowTiles, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [pairs, kv_heads, dim, block_size] and values [pairs, kv_heads, block_size, dim] of the pairs.

        They have the dtype in which products with queries of `dtype` are computed.
        """
        if part.pair_offset is None:
            keys, values = read_blocks(self._cache, layer, part.pair_block)
        else:
            keys, values = self._cache.read_places(layer, part.pair_block, part.pair_offset)
        dtype = torch.promote_types(dtype, keys.dtype)
        unseen = part.bias.mT < 0
        return keys.to(dtype), values.to(dtype).masked_fill(unseen, 0)  # also NaN that an earlier choice left there


def read_blocks(cache: KVCache, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [n, kv_heads, key_dim, block_size] and values [n, kv_heads, block_size, value_dim] of n blocks."""
    offsets = torch.arange(cache.block_size, device=blocks.device).expand(len(blocks), -1)
    return cache.read_places(layer, blocks[:, None].expand_as(offsets), offsets)


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


def _select(scores: Tensor, positions: Tensor, options: IndexOptions) -> Tensor:
    """Which positions are seen, [tokens, selections, positions] as their scores.

    Scores are -inf at positions after the query's own, given by `positions` [tokens].
    """
    size = options.block
    length = scores.shape[-1]
    blocks = F.pad(scores, (0, -length % size), value=-torch.inf).view(*scores.shape[:2], -1, size)
    ends = positions[:, None, None]
    number = torch.arange(blocks.shape[2], device=scores.device)
    if options.pools == "last":
        of_blocks, count = blocks[..., -1], (ends + 1) // size
    else:
        of_blocks, count = blocks.amax(-1), ends // size + 1
        of_blocks = of_blocks.masked_fill((number < count) & (number >= count - options.local), torch.inf)
    order = of_blocks.masked_fill(number >= count, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    seen = torch.zeros_like(of_blocks, dtype=torch.bool).scatter_(-1, order[..., : options.top], value=True)
    if options.entries:
        is_last = torch.arange(1, length + 1, device=scores.device) % size == 0
        return (seen & (number < count)).repeat_interleave(size, -1)[..., :length] & is_last
    if options.pools == "last":
        seen |= number == count
    return seen.repeat_interleave(size, -1)[..., :length]


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
        place = places_of(batch.paths, token, position, key_position)
        block, offset = table[owner[:, None], place // block_size], place % block_size
    seen = (key_position <= position) & (key_position >= lowest[pair_row, None])
    bias = torch.zeros(len(index), 1, 1, block_size)
    bias.masked_fill_(torch.from_numpy(~seen).view_as(bias), -torch.inf)
    return RowTiles(
        rows=torch.from_numpy(rows),
        pair_row=torch.from_numpy(pair_row),
        pair_index=torch.from_numpy(index),
        pair_block=torch.from_numpy(block),
        pair_offset=None if offset is None else torch.from_numpy(offset),
        bias=bias,
        widths=widths.tolist(),
    )
