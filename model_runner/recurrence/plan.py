"""Divides a step's tokens into segments: rows of one block that read the same state, then a fold at its end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from model_runner.batch import Batch, Int32Array, IntArray, StateTables
from model_runner.contract import state_blocks_after
from model_runner.recurrence.states import BLOCK


class Segment(NamedTuple):
    """At most BLOCK tokens of one choice whose positions are in the same block and that read the same state.

    Known tokens read the choice's state, which folds after them. Drafts beyond the end of the last known token's block
    read a copy of that state with their path's blocks folded in. All segments of a choice are done in order.
    """

    first: int
    """The first token is `Plan.order[first]`."""
    num_tokens: int
    paths: int = -1
    """For drafts, the first one's row in `Plan.paths`; -1 for known tokens, whose rows are a block's in order."""
    block: int = -1
    """For known tokens, their rows block."""
    offset: int = 0
    """For known tokens, how many rows of the block come before them."""
    is_folded: bool = False
    """For known tokens, whether the choice's state folds after them."""
    page: int = -1
    """The page that this fold is written to; -1 for none."""
    first_fold: int = 0
    """For drafts, the first of the rows in `Plan.paths` that are folded, one after another, into the copy."""
    num_folds: int = 0


@dataclass(slots=True)
class Plan:
    """The segments of a step with T tokens and C choices. A row's slot is its rows block * BLOCK + its offset."""

    slots: Int32Array
    """[T] slot of each token's row."""
    num_rows: Int32Array
    """[T] rows of the token's block on its path, its own included."""
    order: Int32Array
    """[T] the tokens in the order of the segments."""
    segments: list[Segment]
    first_segment: list[int]
    """[C + 1] the first segment of each choice."""
    anchors: list[int]
    """[C] the page of each choice's first state; -1 for zero."""
    paths: Int32Array
    """[., BLOCK] slots of a draft's rows from the start of its block to itself, then anything; or of a whole block."""
    sources: "_Sources"
    written: list[tuple[int, int]]
    """Pages to write, and for each the rows block that it follows."""
    inputs: dict[int, Int32Array] = field(default_factory=dict)

    def inputs_of(self, kernel: int) -> Int32Array:
        """[T, kernel - 1] where each token's earlier inputs are, the oldest first.

        2 t + 1 for token t of the step; 2 s for slot s, written before; -1 for zero before the start; -2 - i for number
        i of the last inputs of all pages in order.
        """
        found = self.inputs.get(kernel)
        if found is None:
            found = self.inputs[kernel] = self.sources.find(kernel, self.slots)
        return found


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where the inputs of a convolution are."""

    positions: IntArray  # [T]
    starts: IntArray  # [T] positions below are at their own places
    choices: IntArray  # [T]
    tables: Int32Array  # [C, width] rows blocks
    anchors: IntArray  # [C, 2] positions in the state, and its page
    draft_paths: dict[int, IntArray]  # by token: slots of the positions from its start on

    def find(self, kernel: int, slots: Int32Array) -> Int32Array:
        """As `Plan.inputs_of`."""
        reach = kernel - 1
        places = self.positions[:, None] + np.arange(-reach, 0)  # [T, reach]
        covered, page = (column[self.choices, None] for column in self.anchors.T)
        blocks = self.tables[self.choices[:, None], np.clip(places // BLOCK, 0, None)]
        found = blocks.astype(np.int64) * BLOCK + places % BLOCK
        for token, path in self.draft_paths.items():
            on_path = places[token] - self.starts[token]
            found[token, on_path >= 0] = path[on_path[on_path >= 0]]
        token_at = np.full(max(found.max(initial=0), slots.max(initial=0)) + 1, -1)
        token_at[slots] = np.arange(len(slots))
        tokens = token_at[np.clip(found, 0, None)]
        found = np.where(tokens >= 0, 2 * tokens + 1, 2 * found)
        in_page = places < covered
        found[in_page] = (-2 - (page * reach + places - covered + reach))[in_page]
        found[places < 0] = -1
        result: Int32Array = found.astype(np.int32)
        return result


def make_plan(batch: Batch) -> Plan:
    """The segments of a batch.

    Raises:
        ValueError: if it has no states, or they do not fit its tokens.
    """
    if batch.states is None:
        raise ValueError("the batch has no tables of recurrent states, which a model with recurrent layers needs")
    states = batch.states
    starts, places = batch.positions + 1, batch.positions.copy()
    if (paths := batch.paths) is not None:
        starts = paths.start
        is_draft = np.diff(paths.first) > 0
        places[is_draft] = paths.places[paths.first[1:][is_draft] - 1]
    tables = _rows_table(states, places, batch.choice_of)
    layout = _Layout(batch, tables)
    bounds = np.searchsorted(batch.choice_of, np.arange(len(states.anchors) + 1))
    for choice in range(len(states.anchors)):
        layout.add(choice, range(bounds[choice], bounds[choice + 1]))
    slots = tables[batch.choice_of, places // BLOCK] * BLOCK + places % BLOCK
    anchors = np.array([(covered * BLOCK, page) for covered, page in states.anchors], dtype=np.int64).reshape(-1, 2)
    return Plan(
        slots=slots.astype(np.int32),
        num_rows=(batch.positions % BLOCK + 1).astype(np.int32),
        order=np.array(layout.order, dtype=np.int32),
        segments=layout.segments,
        first_segment=layout.first_segment,
        anchors=[page for _, page in states.anchors],
        paths=np.array(layout.paths, dtype=np.int32).reshape(-1, BLOCK),
        sources=_Sources(batch.positions, starts, batch.choice_of, tables, anchors, layout.draft_paths),
        written=layout.written,
    )


def _rows_table(states: StateTables, places: IntArray, choice_of: IntArray) -> Int32Array:
    """[C, width] rows blocks, -1 where there is none. Raises ValueError if a token has none."""
    width = max(map(len, states.rows), default=0)
    tables = np.full((len(states.rows), max(width, 1)), -1, dtype=np.int32)
    for row, blocks in zip(tables, states.rows, strict=True):
        row[: len(blocks)] = blocks
    block_of = places // BLOCK
    if len(places) and (block_of.max() >= tables.shape[1] or tables[choice_of, block_of].min() < 0):
        raise ValueError("a token of a recurrent layer has no rows block at its place")
    return tables


class _Layout:
    """Builds the segments, choice after choice."""

    def __init__(self, batch: Batch, tables: Int32Array) -> None:
        assert batch.states is not None
        self._batch = batch
        self._states = batch.states
        self._tables = tables
        self.order: list[int] = []
        self.segments: list[Segment] = []
        self.first_segment = [0]
        self.paths: list[IntArray] = []
        self.draft_paths: dict[int, IntArray] = {}
        self.written: list[tuple[int, int]] = []

    def add(self, choice: int, tokens: range) -> None:
        """Add the segments of a choice's tokens."""
        paths = self._batch.paths
        num_drafts = 0 if paths is None else int(np.count_nonzero(np.diff(paths.first[tokens.start : tokens.stop + 1])))
        known, drafts = tokens[: len(tokens) - num_drafts], tokens[len(tokens) - num_drafts :]
        covered, page = self._states.anchors[choice]
        if covered and page < 0:
            raise ValueError(f"choice {choice} has no page with the state after its first {covered} blocks")
        end = covered * BLOCK
        if known:
            end = int(self._batch.positions[known[-1]]) + 1
        elif drafts and paths is not None:
            end = int(paths.start[drafts[0]])
        if (known and self._batch.positions[known[0]] < covered * BLOCK) or end < covered * BLOCK:
            raise ValueError(f"the state of choice {choice} covers {covered * BLOCK} positions, more than its tokens")
        rows_blocks = self._tables[choice, covered : -(-end // BLOCK)]
        if len(rows_blocks) * BLOCK < end - covered * BLOCK or -1 in rows_blocks:
            raise ValueError(f"choice {choice} has no rows block for a position between its state and its tokens")
        covered = self._add_known(choice, known, end, bool(drafts))
        if drafts:
            self._add_drafts(choice, drafts, covered)
        self.first_segment.append(len(self.segments))

    def _add_known(self, choice: int, known: range, end: int, has_drafts: bool) -> int:
        """Add known tokens, the last at position end - 1. Returns how many blocks the state then covers."""
        covered, pages = self._states.anchors[choice][0], dict(self._states.pages[choice])
        if any(not covered <= block < end // BLOCK for block in pages):
            raise ValueError(
                f"pages of choice {choice} cannot be written after blocks {sorted(pages)}: its state covers {covered}, "
                f"and its known tokens fill {end // BLOCK}"
            )
        is_read = has_drafts or end // BLOCK - 1 in pages  # the state after the last full block
        folded = state_blocks_after(covered, end, BLOCK, keeps_last=not is_read)
        position = end - len(known)
        for block in range(covered, -(-end // BLOCK)):
            count = min(end, (block + 1) * BLOCK) - max(position, block * BLOCK)
            is_folded = block < folded
            rows_block, first = int(self._tables[choice, block]), len(self.order)
            if block in pages:
                self.written.append((pages[block], rows_block))
            if count > 0 or is_folded:
                count = max(count, 0)
                self.order.extend(known[:count])
                known = known[count:]
                offset = max(position - block * BLOCK, 0)
                page = pages.get(block, -1)
                self.segments.append(
                    Segment(first, count, block=rows_block, offset=offset, is_folded=is_folded, page=page)
                )
        return folded

    def _add_drafts(self, choice: int, drafts: range, covered: int) -> None:
        """Add drafts, in groups with the same state before their block."""
        groups: dict[tuple[int, bytes], list[int]] = {}
        for token in drafts:
            block = int(self._batch.positions[token]) // BLOCK
            path = self._path(choice, token, covered)
            groups.setdefault((block, path[: (block - covered) * BLOCK].tobytes()), []).append(token)
        for (block, before), tokens in sorted(groups.items(), key=lambda group: group[0][0]):
            folds = np.frombuffer(before, dtype=np.int64).reshape(-1, BLOCK)
            first_fold = len(self.paths)
            self.paths.extend(folds)
            for part in _parts(tokens):
                first_path = len(self.paths)
                for token in part:
                    rows = self._path(choice, token, covered)[(block - covered) * BLOCK :]
                    self.paths.append(np.pad(rows, (0, BLOCK - len(rows)), mode="edge"))
                self.segments.append(
                    Segment(len(self.order), len(part), paths=first_path, first_fold=first_fold, num_folds=len(folds))
                )
                self.order.extend(part)

    def _path(self, choice: int, token: int, covered: int) -> IntArray:
        """Slots of a draft's path from position covered * BLOCK to itself."""
        paths = self._batch.paths
        assert paths is not None
        start = int(paths.start[token])
        of_tree = paths.places[paths.first[token] : paths.first[token + 1]]
        places = np.concatenate([np.arange(covered * BLOCK, start), of_tree])
        slots: IntArray = self._tables[choice, places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK
        self.draft_paths[token] = slots[start - covered * BLOCK :]
        return slots


def _parts(tokens: Sequence[int]) -> Iterator[Sequence[int]]:
    """Parts of at most BLOCK tokens."""
    return (tokens[first : first + BLOCK] for first in range(0, len(tokens), BLOCK))
