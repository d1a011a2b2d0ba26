"""Makes every batch: of prompts, decoding, drafts under verification, and the tokens that drafters compute."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from operator import add, sub

import numpy as np

from model_runner.batch import (
    Batch,
    GroupTables,
    ImageRows,
    IntArray,
    PooledRows,
    PromptRows,
    SampleRows,
    StateTables,
    TreePaths,
)
from model_runner.contract import CacheGroup
from model_runner.draft_tree import ROOT, DraftTree
from model_runner.rotary_positions import RotaryPositions


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
    guides: Mapping[int, SampleRows] = field(default_factory=dict)
    prompt_rows: list[PromptRows] = field(default_factory=list)
    pooled: Sequence[PooledRows] = ()


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
