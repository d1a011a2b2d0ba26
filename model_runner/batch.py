"""One step's tokens, flat and without padding: of prompts, decoding, drafts under verification, and drafters."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from operator import add, sub

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.contract import CacheGroup, Pooling, Verification
from model_runner.draft_tree import ROOT, DraftTree
from model_runner.rotary_positions import RotaryPositions

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of logits that score prompt tokens: each row is compared with the token that follows it."""

    choice: int
    """Index of the choice in the batch."""
    rows: slice
    """Rows of the step's logits."""
    targets: Tensor  # [n] int64
    """The prompt token after each row."""


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The part of a step that belongs to a pooling request, which returns numbers instead of tokens."""

    choice: int
    """Index of the choice in the batch."""
    pooling: Pooling
    tokens: slice
    """The choice's tokens within the step."""
    num_tokens: int
    """How many tokens the choice has altogether."""
    is_last: bool
    """Whether the choice's last token is in this step."""
    row: int | None = None
    """Row of the choice's last token in the step's logits; None if its logits are not needed."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Rows of logits that a choice's next tokens are drawn from: the last known token's, then its drafts'."""

    choice: int
    """Index of the choice in the batch."""
    first: int
    """Row of the last known token in the step's logits; the tree's nodes follow it."""
    tree: DraftTree
    verify: Verification = "match"

    def row_of(self, node: int) -> int:
        """The row of a node, or of ROOT."""
        return self.first + 1 + node

    @property
    def rows(self) -> range:
        """All rows of the choice."""
        return range(self.first, self.first + 1 + len(self.tree))


@dataclass(frozen=True, slots=True)
class TreePaths:
    """Where the nodes of draft trees have their keys and values.

    Siblings share a position, so only one of them can use the place of that position. A token t sees the positions
    below `start[t]` at their own places, and later ones at `places[first[t] : first[t + 1]]`. A place
    counts tokens from the start of the choice's block table. A token outside any tree has `start[t]` one after its
    position, and no places.
    """

    start: IntArray  # [T]
    first: IntArray  # [T + 1]
    places: IntArray  # [first[T]] places of each ancestor within the tree, then of the token itself

    def only(self, tokens: IntArray) -> "TreePaths":
        """The paths of these tokens, in ascending order."""
        counts = np.diff(self.first)
        is_kept = np.zeros(len(counts), dtype=np.bool_)
        is_kept[tokens] = True
        first = np.concatenate([[0], counts[tokens].cumsum()])
        return TreePaths(self.start[tokens], first, self.places[is_kept.repeat(counts)])


@dataclass(frozen=True, slots=True)
class GroupTables:
    """The blocks of a cache group, for T tokens of C choices."""

    block_tables: Sequence[Sequence[int]]
    """[C] block table of each choice. An entry without meaning stands where blocks were given back."""
    block_of: IntArray
    """[T] block that stores the token's key and value."""


@dataclass(frozen=True, slots=True)
class StateTables:
    """Where recurrent layers find and leave their states, for each of C choices. A block is 32 positions.

    A state is anchored at the end of a block, and stored in a page. Later tokens have rows: at their places, as
    `TreePaths` defines them, in the rows block of place // 32. A choice's anchor is at or before its first token of the
    step, and the rows from the anchor to that token are stored. Its known tokens are consecutive from there.
    """

    rows: Sequence[Sequence[int]]
    """[C] the rows block of each of the choice's blocks; -1 where it was given back."""
    anchors: Sequence[tuple[int, int]]
    """[C] how many blocks the anchor's state covers, and its page; (0, -1) for the zero state at the start."""
    pages: Sequence[Sequence[tuple[int, int]]]
    """[C] (block, page), ascending: the step writes the state after that block to the page."""

    def only(self, choices: Sequence[int]) -> "StateTables":
        """The tables of these choices."""
        return StateTables(
            [self.rows[choice] for choice in choices],
            [self.anchors[choice] for choice in choices],
            [self.pages[choice] for choice in choices],
        )


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Feature rows of an image, which replace the embeddings of consecutive tokens of a step."""

    token: int
    """The first token."""
    features: Tensor
    """[1 + levels, n, hidden] the embeddings; then what is added to the hidden states after the first layers."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of all scheduled choices, choice after choice, on the host: T tokens, C choices, R logit rows.

    `BatchMaker.make` makes it, and `only` selects choices of it.
    """

    tokens: IntArray  # [T]
    positions: IntArray  # [T]
    choice_of: IntArray  # [T] index of the choice that the token belongs to
    block_tables: Sequence[Sequence[int]]  # [C] block table of each choice
    block_of: IntArray  # [T] block that stores the token's key and value
    offset_of: IntArray  # [T] offset in that block
    logits_index: IntArray  # [R] tokens whose logits are needed
    samples: list[SampleRows]
    prompt_rows: list[PromptRows]
    paths: TreePaths | None = None
    """None if the batch has no draft tree."""
    guides: Mapping[int, SampleRows] = field(default_factory=dict)
    """For each guided choice, by index: its guide's rows, as many as its own and in the same order."""
    pooled: Sequence[PooledRows] = ()
    states: StateTables | None = None
    """None if the model has no recurrent layer."""
    groups: Sequence[GroupTables] = ()
    """The blocks of layers with windows that have a cache group, from group 1 on. Empty: they have those above."""
    images: Sequence[ImageRows] = ()
    rotary: IntArray | None = None
    """Rotary positions where they are not `positions`: [T], or [3, T] if some tokens have another one in each axis."""

    span_last: IntArray | None = None
    """[T] last position of each token's span, such as the rows of an image, whose tokens see each other
    (`AttentionOptions.sees_spans`); outside of any, the token's own position. None without spans."""

    @property
    def rotary_positions(self) -> IntArray:
        """[T] or [3, T] the rotary position of each token."""
        return self.positions if self.rotary is None else self.rotary

    def in_group(self, number: int) -> "Batch":
        """The batch with the blocks of a cache group; 0 are the choices' own."""
        if number == 0 or not self.groups:
            return self
        tables = self.groups[number - 1]
        return replace(self, block_tables=tables.block_tables, block_of=tables.block_of)

    def only(self, choices: Sequence[int]) -> "Batch":
        """The batch of these choices alone, in ascending order, with logits only where their next tokens are drawn."""
        tokens = np.flatnonzero(np.isin(self.choice_of, choices))
        samples, wanted = [], [np.empty(0, dtype=np.int64)]
        for sample in self.samples:
            if sample.choice in choices:
                first = sum(map(len, wanted))
                samples.append(replace(sample, choice=choices.index(sample.choice), first=first))
                wanted.append(self.logits_index[sample.rows.start : sample.rows.stop])
        return Batch(
            tokens=self.tokens[tokens],
            positions=self.positions[tokens],
            choice_of=np.searchsorted(choices, self.choice_of[tokens]),
            block_tables=[self.block_tables[choice] for choice in choices],
            block_of=self.block_of[tokens],
            offset_of=self.offset_of[tokens],
            logits_index=np.searchsorted(tokens, np.concatenate(wanted)),
            samples=samples,
            prompt_rows=[],
            paths=None if self.paths is None else self.paths.only(tokens),
            states=None if self.states is None else self.states.only(choices),
            groups=[
                GroupTables([group.block_tables[choice] for choice in choices], group.block_of[tokens])
                for group in self.groups
            ],
        )

    def block_table(self) -> Int32Array:
        """[C, width] the blocks of each choice, padded with zeros."""
        table = np.zeros((len(self.block_tables), max(map(len, self.block_tables), default=0)), dtype=np.int32)
        for row, blocks in zip(table, self.block_tables, strict=True):
            row[: len(blocks)] = blocks
        return table


_NONE = np.empty(0, dtype=np.int64)
NO_TOKENS = Batch(_NONE, _NONE, _NONE, [], _NONE, _NONE, _NONE, [], [])


@dataclass(slots=True, kw_only=True)
class BatchChoice:
    """A choice as layers see it, apart from its tokens."""

    blocks: "array[int]"  # numpy reads it without a Python object for each item
    """Block table of the choice's own blocks."""
    groups: Sequence["array[int]"] = ()
    """For each cache group its blocks by index; where it has none, 0 in windows and otherwise -1."""
    rotary: RotaryPositions | None = None
    """Rotary positions where they are not the places: in models with grids, after an image."""


@dataclass(slots=True)
class StepTokens:
    """Tokens of choices, choice after choice.

    A choice's tokens have consecutive places, counted from the start of its block table: known tokens, whose places are
    their positions, then the nodes of its draft tree.
    """

    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """The place of each choice's first token."""
    counts: list[int] = field(default_factory=list)
    """How many tokens each choice has, at least 1."""

    def add(self, tokens: Sequence[int], start: int) -> None:
        """Add a choice."""
        self.ids += tokens
        self.starts.append(start)
        self.counts.append(len(tokens))

    def layout(self) -> tuple[IntArray, IntArray, IntArray]:
        """[T] each token's place and the index of its choice, and [C] the first token of each choice."""
        starts, choices = np.array(self.starts, dtype=np.int64), np.arange(len(self.starts))
        if len(self.ids) == len(choices):
            return starts, choices, choices
        counts = np.array(self.counts, dtype=np.int64)
        firsts, choice_of = counts.cumsum() - counts, choices.repeat(counts)
        return np.arange(len(choice_of)) + (starts - firsts)[choice_of], choice_of, firsts


@dataclass(slots=True)
class LogitRows:
    """The rows of a step's logits, and what they are for; as in `Batch`."""

    index: Sequence[int] | IntArray
    """[R] tokens whose logits are needed."""
    samples: list[SampleRows] = field(default_factory=list)
    guides: dict[int, SampleRows] = field(default_factory=dict)
    prompt_rows: list[PromptRows] = field(default_factory=list)
    pooled: list[PooledRows] = field(default_factory=list)


class BatchMaker:
    """Lays out tokens of choices in the blocks of a cache."""

    def __init__(self, block_size: int, groups: Sequence[CacheGroup] = ()) -> None:
        """`groups` are the cache's groups, if it has any."""
        kinds = [group.kind for group in groups]
        self._block_size = block_size
        self._windows = [number for number, kind in enumerate(kinds) if kind == "window"]
        self._rows, self._pages = (kinds.index(kind) if kind in kinds else -1 for kind in ("rows", "page"))
        self._scratch = groups[self._rows].num_blocks if "rows" in kinds else 0
        """The first rows block that no choice holds."""

    def make(
        self,
        choices: Sequence[BatchChoice],
        tokens: StepTokens,
        rows: LogitRows,
        *,
        paths: TreePaths | None = None,
        images: Sequence[ImageRows] = (),
        num_state_blocks: Sequence[int] = (),
    ) -> Batch:
        """A batch of these choices.

        Args:
            choices: the choices.
            tokens: their tokens.
            rows: the logits that are needed.
            paths: of draft trees; None without trees.
            images: features of the step's images.
            num_state_blocks: for each choice, the blocks that are folded into its newest page of recurrent states.
        """
        places, choice_of, firsts = tokens.layout()
        positions = places if paths is None else paths.start - 1 + np.diff(paths.first)
        tables = [choice.blocks for choice in choices]
        indices = choice_of.tolist(), (places // self._block_size).tolist()
        return Batch(
            tokens=np.array(tokens.ids, dtype=np.int64),
            positions=positions,
            choice_of=choice_of,
            block_tables=tables,
            block_of=_blocks_at(tables, *indices),
            offset_of=places % self._block_size,
            logits_index=np.array(rows.index, dtype=np.int64),
            samples=rows.samples,
            prompt_rows=rows.prompt_rows,
            paths=paths,
            guides=rows.guides,
            pooled=rows.pooled,
            states=None if self._rows < 0 else self._state_tables(choices, tokens, paths, num_state_blocks),
            groups=[
                GroupTables(tables, _blocks_at(tables, *indices))
                for number in (self._windows if all(choice.groups for choice in choices) else ())
                for tables in [[choice.groups[number] for choice in choices]]
            ],
            images=images,
            rotary=_rotary(choices, positions, firsts, has_axes=bool(images)),
        )

    def _state_tables(
        self, choices: Sequence[BatchChoice], tokens: StepTokens, paths: TreePaths | None, folded: Sequence[int]
    ) -> StateTables:
        """Rows and pages of recurrent layers for a step. `folded` are the `num_state_blocks` of `make`.

        Blocks that the step begins and folds have no rows block of their own, but scratch blocks after all others.
        """
        scratch = count(self._scratch)
        rows: list[Sequence[int]] = []
        anchors: list[tuple[int, int]] = []
        pages: list[Sequence[tuple[int, int]]] = []
        ends = _known_ends(tokens, paths)
        for choice, start, end, covered in zip(choices, tokens.starts, ends, folded, strict=True):
            if not choice.groups:  # at startup: nothing is stored
                rows.append(choice.blocks)
                num_full = start // self._block_size
                anchors.append((num_full, 0) if num_full else (0, -1))
                pages.append([])
                continue
            table = choice.groups[self._rows]
            first, last = -(-start // self._block_size), end // self._block_size
            if first < last:  # a copy: scratch blocks are the choice's in this step only
                table = table + array("i", [-1] * (last - len(table)))
                for at in range(first, last):
                    table[at] = table[at] if table[at] >= 0 else next(scratch)
            page_of = choice.groups[self._pages]
            rows.append(table)
            anchors.append((covered, page_of[covered - 1] if covered else -1))
            pages.append([(at, page_of[at]) for at in range(covered, min(last, len(page_of))) if page_of[at] >= 0])
        return StateTables(rows, anchors, pages)


def _blocks_at(tables: Sequence["array[int]"], choice_of: Sequence[int], indices: Sequence[int]) -> IntArray:
    """[T] the blocks at these indices in the tokens' tables."""
    return np.array([tables[choice][index] for choice, index in zip(choice_of, indices, strict=True)], dtype=np.int64)


def last_rows(tokens: StepTokens) -> LogitRows:
    """Logits for the last token of each choice."""
    return LogitRows(np.cumsum(tokens.counts) - 1)


def tree_paths(tokens: StepTokens, trees: Sequence[DraftTree]) -> TreePaths:
    """The paths of trees whose nodes are the choices' last tokens."""
    start: list[int] = []
    lengths: list[int] = [0]
    places: list[int] = []
    for first, num_tokens, tree in zip(tokens.starts, tokens.counts, trees, strict=True):
        end = first + num_tokens - len(tree)
        start += range(first + 1, end + 1)
        start += [end] * len(tree)
        lengths += [0] * (end - first)
        paths: list[list[int]] = []
        for node, parent in enumerate(tree.parents):
            path = [end + node] if parent == ROOT else [*paths[parent], end + node]
            paths.append(path)
            lengths.append(len(path))
            places += path
    return TreePaths(np.array(start, dtype=np.int64), np.cumsum(lengths), np.array(places, dtype=np.int64))


def prompt_batch(prompts: Sequence[Sequence[int]], block_size: int) -> Batch:
    """Whole prompts in consecutive blocks of a cache, with logits for all tokens."""
    blocks = count()
    choices = [BatchChoice(blocks=array("i", islice(blocks, -(-len(prompt) // block_size)))) for prompt in prompts]
    tokens = StepTokens()
    for prompt in prompts:
        tokens.add(prompt, 0)
    return BatchMaker(block_size).make(choices, tokens, LogitRows(range(len(tokens.ids))))


def _known_ends(tokens: StepTokens, paths: TreePaths | None) -> list[int]:
    """The end of each choice's known tokens; its drafts follow."""
    ends = list(map(add, tokens.starts, tokens.counts))
    if paths is None:
        return ends
    firsts = np.cumsum([0, *tokens.counts[:-1]])
    num_drafts = np.add.reduceat((np.diff(paths.first) > 0).astype(np.int64), firsts)
    return list(map(sub, ends, num_drafts.tolist()))


def _rotary(
    choices: Sequence[BatchChoice], positions: IntArray, firsts: IntArray, *, has_axes: bool
) -> IntArray | None:
    """Rotary positions [T], or [3, T] with axes, of choices whose tokens begin at `firsts`; None if all are places."""
    if all(choice.rotary is None for choice in choices):
        return None
    rotary = np.tile(positions, (3, 1))
    for choice, first, end in zip(choices, firsts, [*firsts[1:], len(positions)], strict=True):
        if choice.rotary is not None:
            rotary[:, first:end] = choice.rotary.of(positions[first:end])
    return rotary if has_axes else rotary[0]


def to_device(numbers: NDArray[np.int64] | NDArray[np.float64], device: torch.device) -> Tensor:
    """Copy numbers to the device. On CUDA this does not block: torch keeps the pinned source alive."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
