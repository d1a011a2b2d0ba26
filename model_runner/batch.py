"""One step's tokens, flat and without padding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.contract import Pooling, Verification
from model_runner.draft_tree import DraftTree

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


def to_device(array: NDArray[np.int64] | NDArray[np.float64], device: torch.device) -> Tensor:
    """Copy the array to the device. On CUDA this does not block: torch keeps the pinned source alive."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
