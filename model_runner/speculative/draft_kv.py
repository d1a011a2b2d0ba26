"""Keys and values of drafters with caches of their own: a draft model, and heads with a layer of attention."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from model_runner.batch import Batch, BatchChoice, BatchMaker, IntArray, LogitRows, StepTokens, TreePaths, last_rows
from model_runner.contract import CacheGroup
from model_runner.speculative.growing import FrontierNode
from model_runner.speculative.proposer import ChoiceStep, NewChoice


def _scratch_of_slot(block_size: int, nodes: int) -> int:
    return -(-(nodes + 1) // block_size)  # the last known token may not have a block yet and then uses a scratch block


@dataclass(slots=True)
class _Slot(BatchChoice):
    """A choice. Its blocks are the target's, then its scratch blocks. Drafters see no images."""

    length: int
    """Leading tokens whose keys and values are in the cache."""
    num_blocks: int
    """How many of the choice's blocks were checked."""
    paths: dict[int, list[int]] = field(default_factory=dict)
    """For each node of the growing tree, the places of its ancestors and its own."""


class BlockGenerations:
    """How often each of the target's blocks was handed out to be written.

    A new owner of a block may use another drafter, or none, and later choices find its new content in the prefix cache.
    So a drafter's content of a block is valid only until the block is handed out again.
    """

    def __init__(self, num_blocks: int) -> None:
        self._counts = np.zeros(num_blocks, dtype=np.int64)

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._counts)

    def note(self, blocks: Sequence[int]) -> None:
        """Note that these blocks, all different, are handed out."""
        self._counts[np.array(blocks, dtype=np.int64)] += 1

    def of(self, blocks: Sequence[int]) -> IntArray:
        """How often each of these blocks was handed out."""
        return self._counts[np.array(blocks, dtype=np.int64)]


@dataclass(frozen=True, slots=True)
class TargetBlocks:
    """Sizes of the target's cache, and generations of its blocks."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    generations: BlockGenerations
    groups: Sequence[CacheGroup] = ()
    """Blocks of the target's cache groups."""

    def scratch_tokens(self, nodes: int) -> int:
        """Number of tokens that fit into a choice's scratch blocks, for trees of `nodes` computed nodes."""
        return _scratch_of_slot(self.block_size, nodes) * self.block_size

    def num_with_scratch(self, nodes: int) -> int:
        """Blocks of a drafter's cache: the target's, and scratch blocks for `nodes` tree nodes of each choice."""
        return self.num_blocks + self.max_num_seqs * _scratch_of_slot(self.block_size, nodes)


class DraftKV:
    """Tracks which keys and values a drafter has, and builds batches for the missing ones.

    A known token has its keys and values at the same block and offset as in the target's cache. So the drafter also
    benefits from the prefix cache and forks. Nodes of a tree use scratch blocks of the slot while the tree grows.

        table   | the choice's blocks ......................... | scratch blocks         |
                | known tokens, at their own places             | last token?  | nodes   |
    """

    def __init__(self, generations: BlockGenerations, block_size: int, nodes: int, *, lag: int = 0) -> None:
        """Starts with an empty cache.

        Args:
            generations: of the target's blocks.
            block_size: of both caches.
            nodes: maximum number of computed nodes per tree.
            lag: how many of the last known tokens have no keys and values; the tree grows from the token before them.
        """
        self._lag = lag
        self._generations = generations
        self._block_size = block_size
        self._maker = BatchMaker(block_size)
        self._scratch = _scratch_of_slot(block_size, nodes)
        self._filled_in = np.full(len(generations), -1, dtype=np.int64)
        """The generation of each block when all its tokens had their keys and values here."""
        self._slots: dict[int, _Slot] = {}

    def begin(self, choice: NewChoice) -> None:
        """A choice begins. Shared blocks whose content is already here are not computed again."""
        shared = choice.blocks[: choice.num_computed // self._block_size]
        is_filled = self._filled_in[list(shared)] == self._generations.of(shared)
        num_filled = int(np.logical_and.accumulate(is_filled).sum())
        self._slots[choice.slot] = _Slot(
            num_filled * self._block_size, len(choice.blocks), blocks=array("i"), rotary=choice.rotary
        )

    def end(self, slot: int) -> None:
        """A choice has ended."""
        del self._slots[slot]

    def missing(self, step: ChoiceStep, end: int) -> range:
        """Positions below `end` that need to be computed. Begins a new step of the choice."""
        slot = self._take_up(step)
        return range(min(slot.length, end - 1), end)

    def computed(self, step: ChoiceStep) -> range:
        """Positions that the target computed in the step. Begins a new step of the choice."""
        self._take_up(step)
        return range(step.num_computed - len(step.rows), step.num_computed)

    def _take_up(self, step: ChoiceStep) -> _Slot:
        slot = self._slots[step.slot]
        slot.num_blocks = len(step.blocks)
        first = len(self._generations) + step.slot * self._scratch
        slot.blocks = array("i", step.blocks) + array("i", range(first, first + self._scratch))
        slot.paths = {}
        return slot

    def known_batch(self, steps: Sequence[ChoiceStep], spans: Sequence[range]) -> Batch:
        """A batch of known tokens of these choices at these positions, with logits for the last of each."""
        tokens = StepTokens()
        for step, span in zip(steps, spans, strict=True):
            tokens.add(step.tokens[span.start : span.stop], span.start)
        return self._maker.make([self._slots[step.slot] for step in steps], tokens, last_rows(tokens))

    def keep(self, step: ChoiceStep, span: range) -> None:
        """Note that known tokens at these positions were computed. Tokens without a block will be computed again."""
        slot = self._slots[step.slot]
        slot.length = min(span.stop, len(step.blocks) * self._block_size)
        filled = step.blocks[span.start // self._block_size : slot.length // self._block_size]
        self._filled_in[list(filled)] = self._generations.of(filled)

    def node_batch(self, frontier: Sequence[FrontierNode]) -> Batch:
        """A batch of tree nodes with logits for all; their ancestors, except the root, were in earlier batches."""
        ordered = sorted(range(len(frontier)), key=lambda index: frontier[index].choice)
        nodes = [frontier[index] for index in ordered]
        paths = [self._path(leaf) for leaf in nodes]
        counts = Counter(leaf.step.slot for leaf in nodes)
        starts: dict[int, int] = {}
        for leaf, path in zip(nodes, paths, strict=True):
            starts.setdefault(leaf.step.slot, path[-1])
        return self._maker.make(
            [self._slots[slot] for slot in counts],
            StepTokens([leaf.token for leaf in nodes], list(starts.values()), list(counts.values())),
            LogitRows(np.argsort(ordered)),  # the row of each leaf
            paths=TreePaths(
                start=np.array([len(leaf.step.tokens) - self._lag for leaf in nodes], dtype=np.int64),
                first=np.cumsum([0, *map(len, paths)]),
                places=np.array(list(chain.from_iterable(paths)), dtype=np.int64),
            ),
        )

    def _path(self, leaf: FrontierNode) -> list[int]:
        """Places of the node's ancestors and of the node itself, which gets its place now."""
        slot = self._slots[leaf.step.slot]
        first = max(len(leaf.step.tokens) - self._lag, slot.num_blocks * self._block_size)
        path = [*slot.paths.get(leaf.parent, ()), first + len(slot.paths)]
        slot.paths[leaf.node] = path
        return path
