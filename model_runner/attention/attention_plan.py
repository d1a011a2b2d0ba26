"""Which work the CUDA attention does in a step: laid out on the host, read by the kernels from device memory.

A tile is some consecutive tokens of one choice, or a single node of a draft tree that has ancestors elsewhere than at
the place of their position. The keys that a node sees are gathered from its path, so that it is computed as the same
token in a plain chain is, in the order of the positions, and no mask of trees is needed.
"""

from dataclasses import dataclass

import numpy as np

from model_runner.batch import Batch, Int32Array, IntArray, TreePaths
from model_runner.kernels.triton.attention import HEADER, ITEM, MERGED_ROWS, SPLIT

_NOWHERE = np.iinfo(np.int32).max
"""From this position on the keys of an ordinary tile stand elsewhere."""

_ITEMS_OF_A_PROGRAM = 4
"""A tile is cut if it is longer than this part of a program's share, so that no program is left with much more work."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """What decides how a batch is cut into tiles and items. Only `group` and `block_m` may differ the rounding."""

    block_size: int
    """Of the cache."""
    group: int
    """Heads of a key-value head, at most."""
    block_m: int
    """Rows of a tile."""
    programs: int
    """That share the items, for each key-value head."""
    part_rows: int
    """Room for partial sums; tiles that find none are not cut."""

    @property
    def tokens(self) -> int:
        """In a tile, at most."""
        return self.block_m // self.group


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The work of a step, on the host. T tokens."""

    block_m: int
    """Rows of a tile."""
    slots: IntArray  # [T] where each token's key and value go: block * block_size + offset
    items: Int32Array  # [I, ITEM] the longest first
    merges: Int32Array  # [M, MERGE]
    paths: Int32Array  # [P] slots of the keys on the paths of draft trees
    tables: Int32Array  # [B] the blocks of all choices, one after the other

    @property
    def num_numbers(self) -> int:
        """Of 32 bits that it takes on the device, beside the slots."""
        return HEADER + self.items.size + self.merges.size + self.paths.size + self.tables.size


@dataclass(frozen=True, slots=True)
class _Tiles:
    """N tiles. Each array is [N]."""

    token: IntArray
    count: IntArray
    position: IntArray
    table: IntArray
    start: IntArray
    entry: IntArray

    @property
    def num_splits(self) -> IntArray:
        """That the last token of each sees."""
        return (self.position + self.count - 1) // SPLIT + 1


def make_plan(batch: Batch, cutting: Cutting) -> AttentionPlan:
    """The plan of a batch; of numpy operations over tokens, tiles and items, for it is made at every step."""
    block_size = cutting.block_size
    lengths = np.fromiter(map(len, batch.block_tables), dtype=np.int64, count=len(batch.block_tables))
    tables = np.concatenate([np.empty(0, dtype=np.int32), *batch.block_tables], dtype=np.int32, casting="unsafe")
    table_of = (lengths.cumsum() - lengths)[batch.choice_of]  # [T] where its choice's table begins
    tiles = _cut_tokens(batch, cutting.tokens, table_of)
    items, merges = _share_out(tiles, cutting)
    paths = np.empty(0, dtype=np.int32)
    if batch.paths is not None:
        places = batch.paths.places
        blocks = tables[np.repeat(table_of, np.diff(batch.paths.first)) + places // block_size]
        paths = blocks * np.int32(block_size) + (places % block_size).astype(np.int32)
    return AttentionPlan(
        block_m=cutting.block_m,
        slots=batch.block_of * block_size + batch.offset_of,
        items=items,
        merges=merges,
        paths=paths,
        tables=tables,
    )


def longest_run(batch: Batch) -> int:
    """Tokens of the choice that has most in the batch."""
    return int(np.bincount(batch.choice_of).max(initial=0))


def empty_items(first: int, last: int, tokens: int) -> Int32Array:
    """Items [n, ITEM] that give zeros to tokens from `first` to `last` (excluded), `tokens` at a time."""
    token = np.arange(first, last, tokens)
    items = np.zeros((len(token), ITEM), dtype=np.int32)
    items[:, 0], items[:, 1], items[:, 8] = token, np.minimum(tokens, last - token), -1
    return items


def _cut_tokens(batch: Batch, tokens: int, table_of: IntArray) -> _Tiles:
    """Tiles of so many tokens at most."""
    positions, choice = batch.positions, batch.choice_of
    elsewhere = np.zeros(len(positions), dtype=np.bool_) if batch.paths is None else _elsewhere(batch.paths)
    begins = np.ones(len(positions), dtype=np.bool_)
    begins[1:] = (choice[1:] != choice[:-1]) | (positions[1:] != positions[:-1] + 1) | elsewhere[1:] | elsewhere[:-1]
    runs = np.flatnonzero(begins)
    lengths = np.diff(runs, append=len(positions))
    counts = -(-lengths // tokens)
    ordinal = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    token = np.repeat(runs, counts) + ordinal * tokens
    start, entry = np.full(len(token), _NOWHERE, dtype=np.int64), np.zeros(len(token), dtype=np.int64)
    if batch.paths is not None:
        node = elsewhere[token]
        start[node], entry[node] = batch.paths.start[token[node]], batch.paths.first[token[node]]
    count = np.minimum(tokens, np.repeat(lengths, counts) - ordinal * tokens)
    return _Tiles(token, count, positions[token], table_of[token], start, entry)


def _elsewhere(paths: TreePaths) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[T] whether some key on a token's path, its own included, stands elsewhere than at the place of its position."""
    counts = np.diff(paths.first)
    position = np.arange(len(paths.places)) + np.repeat(paths.start - paths.first[:-1], counts)
    is_moved = paths.places != position
    moved_before = np.concatenate([[0], is_moved.cumsum()])
    return np.asarray(np.diff(moved_before[paths.first]) > 0)


def _share_out(tiles: _Tiles, cutting: Cutting) -> tuple[Int32Array, Int32Array]:
    """Items, the longest first, and merges: tiles much longer than a program's share are cut into their splits."""
    num_splits = tiles.num_splits
    share = -(-int(num_splits.sum()) // (cutting.programs * _ITEMS_OF_A_PROGRAM))
    cut = np.flatnonzero(num_splits > max(1, share))
    cut = cut[np.argsort(-num_splits[cut], kind="stable")]
    part_rows = num_splits[cut] * tiles.count[cut] * cutting.group
    has_room = part_rows.cumsum() <= cutting.part_rows
    cut, part_rows = cut[has_room], part_rows[has_room]
    part = np.full(len(num_splits), -1, dtype=np.int64)
    part[cut] = part_rows.cumsum() - part_rows

    counts = np.ones_like(num_splits)
    counts[cut] = num_splits[cut]
    tile = np.repeat(np.arange(len(counts)), counts)
    first = np.arange(len(tile)) - np.repeat(counts.cumsum() - counts, counts)
    last = np.where(part[tile] < 0, num_splits[tile], first + 1)
    order = np.argsort(first - last, kind="stable")
    columns = (tiles.token, tiles.count, tiles.position, tiles.table, tiles.start, tiles.entry)
    items = np.stack([*(column[tile] for column in columns), first, last, part[tile]], axis=1, dtype=np.int32)[order]

    units = -(-tiles.count[cut] * cutting.group // MERGED_ROWS)
    tile = np.repeat(cut, units)
    row = (np.arange(len(tile)) - np.repeat(units.cumsum() - units, units)) * MERGED_ROWS
    merged = (tiles.token, tiles.count, tiles.position, num_splits, part)
    return items, np.stack([*(column[tile] for column in merged), row], axis=1, dtype=np.int32)
