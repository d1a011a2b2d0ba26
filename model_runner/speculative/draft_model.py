"""Drafts by a smaller model with the same tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from model_runner.batch import Batch, IntArray, TreePaths
from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.images.positions import RotaryPositions
from model_runner.models.features import Feature
from model_runner.models.target import TargetModel
from model_runner.speculative.growing import FrontierNode, GrowthLimits, grow
from model_runner.speculative.proposer import ChoiceStep, NewChoice, TargetStep, share_out


def num_draft_blocks(num_blocks: int, max_num_seqs: int, block_size: int, nodes: int) -> int:
    """Blocks of a draft cache: the target's, and scratch blocks for `nodes` tree nodes of each choice."""
    return num_blocks + max_num_seqs * _scratch_of_slot(block_size, nodes)


def _scratch_of_slot(block_size: int, nodes: int) -> int:
    return -(-(nodes + 1) // block_size)  # the last known token may not have a block yet and then uses a scratch block


@dataclass(slots=True)
class _Slot:
    length: int
    """Leading tokens whose keys and values are in the cache."""
    num_blocks: int
    """How many of the choice's blocks were checked."""
    rotary: RotaryPositions | None = None
    """Rotary positions, if they are not the places."""
    table: list[int] = field(default_factory=list)
    """The choice's blocks, then its scratch blocks."""
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
        self._scratch = _scratch_of_slot(block_size, nodes)
        self._filled_in = np.full(len(generations), -1, dtype=np.int64)
        """The generation of each block when all its tokens had their keys and values here."""
        self._slots: dict[int, _Slot] = {}

    def begin(self, choice: NewChoice) -> None:
        """A choice begins. Shared blocks whose content is already here are not computed again."""
        shared = choice.blocks[: choice.num_computed // self._block_size]
        is_filled = self._filled_in[list(shared)] == self._generations.of(shared)
        num_filled = int(np.logical_and.accumulate(is_filled).sum())
        self._slots[choice.slot] = _Slot(num_filled * self._block_size, len(choice.blocks), choice.rotary)

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
        slot.table = [*step.blocks, *range(first, first + self._scratch)]
        slot.paths = {}
        return slot

    def known_batch(self, steps: Sequence[ChoiceStep], spans: Sequence[range]) -> Batch:
        """A batch of known tokens of these choices at these positions, with logits for the last of each."""
        places = [position for span in spans for position in span]
        positions = np.array(places, dtype=np.int64)
        choice_of = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
        tokens = [
            token for step, span in zip(steps, spans, strict=True) for token in step.tokens[span.start : span.stop]
        ]
        slots = [self._slots[step.slot] for step in steps]
        last = np.cumsum([len(span) for span in spans]) - 1
        return self._batch(np.array(tokens), positions, positions, choice_of, slots, last)

    def keep(self, step: ChoiceStep, span: range) -> None:
        """Note that known tokens at these positions were computed. Tokens without a block will be computed again."""
        slot = self._slots[step.slot]
        slot.length = min(span.stop, len(step.blocks) * self._block_size)
        filled = step.blocks[span.start // self._block_size : slot.length // self._block_size]
        self._filled_in[list(filled)] = self._generations.of(filled)

    def node_batch(self, frontier: Sequence[FrontierNode]) -> Batch:
        """A batch of tree nodes with logits for all; their ancestors, except the root, were in earlier batches."""
        choices = sorted({leaf.choice for leaf in frontier})
        ordered = sorted(range(len(frontier)), key=lambda index: frontier[index].choice)
        paths = [self._path(frontier[index]) for index in ordered]
        nodes = [frontier[index] for index in ordered]
        start = np.array([len(leaf.step.tokens) - self._lag for leaf in nodes], dtype=np.int64)
        positions = start - 1 + np.array([leaf.depth for leaf in nodes], dtype=np.int64)
        row_of = np.argsort(ordered)  # of each leaf
        first = np.cumsum([0, *(len(path) for path in paths)])
        slots = {leaf.choice: self._slots[leaf.step.slot] for leaf in nodes}
        return self._batch(
            np.array([leaf.token for leaf in nodes]),
            positions,
            np.array([path[-1] for path in paths], dtype=np.int64),
            np.searchsorted(choices, [leaf.choice for leaf in nodes]),
            [slots[choice] for choice in choices],
            row_of,
            TreePaths(start, first, np.array([place for path in paths for place in path], dtype=np.int64)),
        )

    def _path(self, leaf: FrontierNode) -> list[int]:
        """Places of the node's ancestors and of the node itself, which gets its place now."""
        slot = self._slots[leaf.step.slot]
        first = max(len(leaf.step.tokens) - self._lag, slot.num_blocks * self._block_size)
        path = [*slot.paths.get(leaf.parent, ()), first + len(slot.paths)]
        slot.paths[leaf.node] = path
        return path

    def _batch(
        self,
        tokens: IntArray,
        positions: IntArray,
        places: IntArray,
        choice_of: IntArray,
        slots: list[_Slot],
        logits_index: IntArray,
        paths: TreePaths | None = None,
    ) -> Batch:
        """A batch for the choices in these slots. Tokens of images have one rotary position: drafters see no images."""
        tables = [slot.table for slot in slots]
        block_of = np.array(
            [tables[choice][place // self._block_size] for choice, place in zip(choice_of, places, strict=True)]
        )
        rotary = None
        if any(slot.rotary is not None for slot in slots):
            rotary = positions.copy()
            for choice, slot in enumerate(slots):
                if slot.rotary is not None:
                    own = choice_of == choice
                    rotary[own] = slot.rotary.of(positions[own])[0]
        return Batch(
            tokens=tokens,
            positions=positions,
            choice_of=choice_of,
            block_tables=tables,
            block_of=block_of,
            offset_of=places % self._block_size,
            logits_index=logits_index,
            samples=[],
            prompt_rows=[],
            paths=paths,
            rotary=rotary,
        )


class DraftModelProposer:
    """Runs a model on the known tokens and then on its own best guesses, depth by depth.

    Leviathan et al., arXiv:2211.17192, with trees of the most probable candidates instead of one chain.
    """

    needs: frozenset[Feature] = frozenset()
    reads_step = False
    sees_all_steps = False

    def __init__(self, model: TargetModel, kv: DraftKV, limits: GrowthLimits, max_known: int) -> None:
        """The model reads and writes the cache that `kv` manages.

        Args:
            model: the smaller model.
            kv: the bookkeeping of its cache.
            limits: of the trees.
            max_known: the most known tokens that a step computes. Choices that lack more catch up over several steps.
        """
        self._model = model
        self._kv = kv
        self._limits = limits
        self._max_known = max_known

    def begin(self, choice: NewChoice) -> None:
        self._kv.begin(choice)

    @torch.inference_mode()
    def propose(self, step: TargetStep) -> list[DraftTree]:
        wanted = [choice for choice in step.choices if choice.max_nodes]
        missing = [self._kv.missing(choice, len(choice.tokens)) for choice in wanted]
        shares = share_out([len(span) for span in missing], self._max_known)
        spans = {
            choice.slot: span[:share] for choice, span, share in zip(wanted, missing, shares, strict=True) if share
        }
        if not spans:
            return [NO_DRAFT] * len(step.choices)
        computed = [choice for choice in wanted if choice.slot in spans]
        logits = self._model.forward(self._kv.known_batch(computed, list(spans.values())))
        for choice in computed:
            self._kv.keep(choice, spans[choice.slot])
        is_ready = [spans[choice.slot].stop == len(choice.tokens) for choice in computed]
        ready = list(compress(computed, is_ready))
        grown = grow(ready, logits[is_ready], self._extend, None, self._limits) if ready else []
        trees = {choice.slot: tree for choice, tree in zip(ready, grown, strict=True)}
        return [trees.get(choice.slot, NO_DRAFT) for choice in step.choices]

    def end(self, slot: int) -> None:
        self._kv.end(slot)

    def _extend(self, frontier: Sequence[FrontierNode]) -> Tensor:
        return self._model.forward(self._kv.node_batch(frontier))
