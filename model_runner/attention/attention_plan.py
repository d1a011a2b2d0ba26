"""Plans the work of CUDA attention for a step. The host builds the plan; kernels read it from device memory.

A tile is a run of consecutive tokens of one choice, or a single draft-tree node with an ancestor that is not stored at
its position's place. Such a node's keys are gathered along its path, in the order of positions. So it is computed like
the same token in a plain chain, and no tree mask is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from model_runner.batch import Batch, Int32Array, IntArray, TreePaths
from model_runner.kernels.triton.attention import HEADER, ITEM, MERGED_ROWS, SPLIT

_NO_PATH = np.iinfo(np.int32).max
"""Path start of an ordinary tile, which has no keys on a path."""

_ITEMS_PER_PROGRAM = 4
"""A tile is split if it is longer than a program's share divided by this, to balance the work between programs."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Parameters that determine tiles and items. Only `group` and `block_m` affect rounding."""

    block_size: int
    """Tokens per block of the cache."""
    group: int
    """Maximum number of query heads per key-value head."""
    block_m: int
    """Rows of a tile."""
    programs: int
    """Programs that share the items, per key-value head."""
    part_rows: int
    """Capacity for partial sums. Tiles beyond it are not split."""

    @property
    def tokens(self) -> int:
        """Maximum number of tokens in a tile."""
        return self.block_m // self.group


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The work of a step with T tokens, on the host."""

    block_m: int
    """Rows of a tile."""
    slots: IntArray  # [T] slot of each token's key and value: block * block_size + offset
    items: Int32Array  # [I, ITEM], longest first
    merges: Int32Array  # [M, MERGE]
    paths: Int32Array  # [P] slots of the keys on the draft trees' paths
    tables: Int32Array  # [B] block tables of all choices, concatenated
    lasts: Int32Array  # [T] last position that each token sees in layers that see spans; [0] if there are none
    groups: Sequence["AttentionPlan"] = ()
    """The same work with the blocks of further cache groups."""

    @property
    def num_numbers(self) -> int:
        """Size on the device in int32 values, without the slots."""
        return HEADER + self.items.size + self.merges.size + self.paths.size + self.tables.size + self.lasts.size


@dataclass(frozen=True, slots=True)
class _Tiles:
    """N tiles; each array is [N]."""

    token: IntArray
    count: IntArray
    position: IntArray
    table: IntArray
    start: IntArray
    entry: IntArray
    last: IntArray
    """The last position that the last token sees in any layer."""

    @property
    def num_splits(self) -> IntArray:
        """[N] number of splits that the last token of each tile sees."""
        return self.last // SPLIT + 1


def make_plan(batch: Batch, tiling: Tiling, num_groups: int = 1) -> AttentionPlan:
    """The plan of a batch, for a cache with so many groups of blocks.

    Uses only numpy operations over tokens, tiles and items, because it runs in every step.
    """
    plan = _make_plan(batch, tiling)
    if num_groups == 1:
        return plan
    return replace(plan, groups=[_make_plan(batch.in_group(number), tiling) for number in range(1, num_groups)])


def _make_plan(batch: Batch, tiling: Tiling) -> AttentionPlan:
    block_size = tiling.block_size
    lengths = np.fromiter(map(len, batch.block_tables), dtype=np.int64, count=len(batch.block_tables))
    tables = np.concatenate([np.empty(0, dtype=np.int32), *batch.block_tables], dtype=np.int32, casting="unsafe")
    table_of = (lengths.cumsum() - lengths)[batch.choice_of]  # [T] start of its choice's table
    tiles = _cut_tokens(batch, tiling.tokens, table_of)
    items, merges = _make_items(tiles, tiling)
    paths = np.empty(0, dtype=np.int32)
    if batch.paths is not None:
        places = batch.paths.places
        blocks = tables[np.repeat(table_of, np.diff(batch.paths.first)) + places // block_size]
        paths = blocks * np.int32(block_size) + (places % block_size).astype(np.int32)
    return AttentionPlan(
        block_m=tiling.block_m,
        slots=batch.block_of * block_size + batch.offset_of,
        items=items,
        merges=merges,
        paths=paths,
        tables=tables,
        lasts=np.array([] if batch.span_last is None else batch.span_last, dtype=np.int32),
    )


def longest_run(batch: Batch) -> int:
    """The largest number of tokens that one choice has in the batch."""
    return int(np.bincount(batch.choice_of).max(initial=0))


def empty_items(first: int, last: int, tokens: int) -> Int32Array:
    """Items [n, ITEM] that write zeros for tokens `first` to `last` (exclusive), `tokens` at a time."""
    token = np.arange(first, last, tokens)
    items = np.zeros((len(token), ITEM), dtype=np.int32)
    items[:, 0], items[:, 1], items[:, 8] = token, np.minimum(tokens, last - token), -1
    return items


def _cut_tokens(batch: Batch, tokens: int, table_of: IntArray) -> _Tiles:
    """Cut the batch into tiles of at most `tokens` tokens."""
    positions, choice = batch.positions, batch.choice_of
    off_place = np.zeros(len(positions), dtype=np.bool_) if batch.paths is None else _off_place(batch.paths)
    begins = np.ones(len(positions), dtype=np.bool_)
    begins[1:] = (choice[1:] != choice[:-1]) | (positions[1:] != positions[:-1] + 1) | off_place[1:] | off_place[:-1]
    runs = np.flatnonzero(begins)
    lengths = np.diff(runs, append=len(positions))
    counts = -(-lengths // tokens)
    ordinal = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    token = np.repeat(runs, counts) + ordinal * tokens
    start, entry = np.full(len(token), _NO_PATH, dtype=np.int64), np.zeros(len(token), dtype=np.int64)
    if batch.paths is not None:
        node = off_place[token]
        start[node], entry[node] = batch.paths.start[token[node]], batch.paths.first[token[node]]
    count = np.minimum(tokens, np.repeat(lengths, counts) - ordinal * tokens)
    seen = positions if batch.span_last is None else batch.span_last
    return _Tiles(token, count, positions[token], table_of[token], start, entry, seen[token + count - 1])


def _off_place(paths: TreePaths) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[T] whether some key on the token's path, including its own, is not stored at its position's place."""
    counts = np.diff(paths.first)
    position = np.arange(len(paths.places)) + np.repeat(paths.start - paths.first[:-1], counts)
    is_moved = paths.places != position
    moved_before = np.concatenate([[0], is_moved.cumsum()])
    return np.asarray(np.diff(moved_before[paths.first]) > 0)


def _make_items(tiles: _Tiles, tiling: Tiling) -> tuple[Int32Array, Int32Array]:
    """Make items, longest first, and merges. Tiles much longer than a program's share become one item per split."""
    num_splits = tiles.num_splits
    share = -(-int(num_splits.sum()) // (tiling.programs * _ITEMS_PER_PROGRAM))
    cut = np.flatnonzero(num_splits > max(1, share))
    cut = cut[np.argsort(-num_splits[cut], kind="stable")]
    part_rows = num_splits[cut] * tiles.count[cut] * tiling.group
    has_room = part_rows.cumsum() <= tiling.part_rows
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

    units = -(-tiles.count[cut] * tiling.group // MERGED_ROWS)
    tile = np.repeat(cut, units)
    row = (np.arange(len(tile)) - np.repeat(units.cumsum() - units, units)) * MERGED_ROWS
    merged = (tiles.token, tiles.count, tiles.position, num_splits, part)
    return items, np.stack([*(column[tile] for column in merged), row], axis=1, dtype=np.int32)
