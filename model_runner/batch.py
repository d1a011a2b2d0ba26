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
    """Rows of logits that are compared with the prompt tokens that follow them."""

    choice: int
    """Index of the choice in the batch."""
    rows: slice
    """Rows of the step's logits."""
    targets: Tensor  # [n] int64
    """The prompt token after each row."""


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The part of a step that belongs to a choice that asks for numbers in place of tokens."""

    choice: int
    """Index of the choice in the batch."""
    pooling: Pooling
    tokens: slice
    """Of the step's tokens."""
    num_tokens: int
    """All of the choice."""
    is_last: bool
    """Whether these end with the choice's last one."""
    row: int | None = None
    """That of its last token in the step's logits, if it is wanted there."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of logits from which a choice's next tokens are drawn: the last known token's, then its drafts'."""

    choice: int
    """Index of the choice in the batch."""
    first: int
    """Row of the last known token in the step's logits; those of the tree's nodes come after it."""
    tree: DraftTree
    verify: Verification = "match"

    def row_of(self, node: int) -> int:
        """The row of a node, or of the ROOT."""
        return self.first + 1 + node

    @property
    def rows(self) -> range:
        """All of them."""
        return range(self.first, self.first + 1 + len(self.tree))


@dataclass(frozen=True, slots=True)
class TreePaths:
    """Where branches of draft trees have their keys and values.

    Siblings share a position, so only one of them can have the place of its position. A token t sees the positions
    below `start[t]` at their own places, and those from there to its own at `places[first[t] : first[t + 1]]`. A place
    counts tokens from the start of the choice's block table. A token outside any tree has `start[t]` one after its
    position, and no places.
    """

    start: IntArray  # [T]
    first: IntArray  # [T + 1]
    places: IntArray  # [first[T]] each ancestor's within the tree, at last the token's own

    def only(self, tokens: IntArray) -> "TreePaths":
        """Those of these tokens, in ascending order."""
        counts = np.diff(self.first)
        is_kept = np.zeros(len(counts), dtype=np.bool_)
        is_kept[tokens] = True
        first = np.concatenate([[0], counts[tokens].cumsum()])
        return TreePaths(self.start[tokens], first, self.places[is_kept.repeat(counts)])


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of all scheduled choices, one after the other, on the host. T tokens, C choices, R rows of logits."""

    tokens: IntArray  # [T]
    positions: IntArray  # [T]
    choice_of: IntArray  # [T] index of the choice that a token belongs to
    block_tables: Sequence[Sequence[int]]  # [C] physical blocks of each choice
    block_of: IntArray  # [T] block that takes the token's key and value
    offset_of: IntArray  # [T] place in that block
    logits_index: IntArray  # [R] tokens whose logits are wanted
    samples: list[SampleRows]
    prompt_rows: list[PromptRows]
    paths: TreePaths | None = None
    """None when the batch has no draft tree."""
    guides: Mapping[int, SampleRows] = field(default_factory=dict)
    """By the index of a choice that has a guide: the guide's rows, as many as its own, in the same order."""
    pooled: Sequence[PooledRows] = ()

    def only(self, choices: Sequence[int]) -> "Batch":
        """The tokens of these choices, in ascending order, with logits only where their next tokens are drawn."""
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
        )

    def block_table(self) -> Int32Array:
        """[C, width] the blocks of each choice, filled up with zeros."""
        table = np.zeros((len(self.block_tables), max(map(len, self.block_tables), default=0)), dtype=np.int32)
        for row, blocks in zip(table, self.block_tables, strict=True):
            row[: len(blocks)] = blocks
        return table


def prompt_batch(prompts: Sequence[Sequence[int]], block_size: int) -> Batch:
    """Whole prompts, one after the other in the first blocks of a cache, with the logits of all their tokens."""
    counts = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    positions = np.concatenate([np.arange(count) for count in counts])
    num_blocks = -(-counts // block_size)
    first_block = num_blocks.cumsum() - num_blocks
    choice_of = np.arange(len(prompts)).repeat(counts)
    return Batch(
        tokens=np.concatenate([np.asarray(prompt, dtype=np.int64) for prompt in prompts]),
        positions=positions,
        choice_of=choice_of,
        block_tables=[list(range(first, first + num)) for first, num in zip(first_block, num_blocks, strict=True)],
        block_of=first_block[choice_of] + positions // block_size,
        offset_of=positions % block_size,
        logits_index=np.arange(len(positions)),
        samples=[],
        prompt_rows=[],
    )


_NONE = np.empty(0, dtype=np.int64)
NO_TOKENS = Batch(_NONE, _NONE, _NONE, [], _NONE, _NONE, _NONE, [], [])


def to_device(array: NDArray[np.int64] | NDArray[np.float64], device: torch.device) -> Tensor:
    """The array on the device. On CUDA nobody waits: it leaves from memory that torch keeps until it has left."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
