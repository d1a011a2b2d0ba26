"""The runner's state of each running choice between steps."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import torch

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
from model_runner.contract import (
    AdmittedRequest,
    PlacedBlock,
    Pooling,
    SamplingParams,
    ScheduledRequest,
    SharedList,
    StepPlan,
    Verification,
)
from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.images.image import Image
from model_runner.images.loading import LoadedReader
from model_runner.images.positions import RotaryPositions, rotary_positions
from model_runner.kv_cache import Move
from model_runner.learning.learning import NO_LEARNING, Learning
from model_runner.sampling.early_sampling import EarlySamplingPlan
from model_runner.sampling.rows import SamplingState
from model_runner.scoring.contrastive_search import ContrastiveSearch
from model_runner.speculative.methods import Blocks
from model_runner.speculative.speculator import Speculator


@dataclass(slots=True)
class RunningChoice:
    """A running choice. `tokens[:num_computed]` have their keys and values in `blocks`."""

    slot: int
    tokens: list[int] | SharedList[int]
    num_prompt: int
    num_computed: int
    blocks: "array[int]"  # numpy reads it without a Python object for each item
    sampling: SamplingParams
    groups: Sequence["array[int]"] = ()
    """For each cache group its blocks by index; where it has none, 0 in windows and otherwise -1."""
    num_state_blocks: int = 0
    """Blocks whose effect is in the newest page of recurrent states."""
    verify: Verification = "match"
    guides: str | None = None
    """Key of the choice that this one guides (`AdmittedRequest.guides`)."""
    sampler_state: float | None = None
    """State of the sampler after the last step, as far as it does not follow from the tokens."""
    images: Sequence[Image] = ()
    rotary: RotaryPositions | None = None
    """Rotary positions where they are not the places: in models with grids, after an image."""
    cache_salt: str = ""
    hidden_sum: IntArray | None = None
    """[hidden] the sum of the computed tokens' hidden states in fixed point, if their mean is requested; None once one
    is not finite."""


class RunnerState:
    """Slots, tokens and block tables of the running choices, kept in step with the scheduler's plans."""

    def __init__(
        self,
        blocks: Blocks,
        sampling: SamplingState,
        speculator: Speculator,
        search: ContrastiveSearch,
        learning: Learning = NO_LEARNING,
        images: LoadedReader | None = None,
    ) -> None:
        """`images` has features of images; None if prompts have no images."""
        self._groups = tuple(blocks.groups)
        kinds = [group.kind for group in blocks.groups]
        self._rows, self._pages = (kinds.index(kind) if kind in kinds else None for kind in ("rows", "page"))
        self._free_slots = list(range(blocks.max_num_seqs - 1, -1, -1))
        self._choices: dict[str, RunningChoice] = {}
        self._block_size = blocks.block_size
        self._sampling = sampling
        self._speculator = speculator
        self._search = search
        self._generations = blocks.generations
        self._learning = learning
        self._images = images

    def apply(self, plan: StepPlan) -> list[RunningChoice]:
        """Forget released choices, add admitted ones, extend block tables; returns the scheduled choices."""
        for key in plan.released:
            choice = self._choices.pop(key)
            self._sampling.release(choice.slot)
            self._speculator.end(choice.slot)
            self._search.end(choice.slot)
            self._learning.end(choice.slot)
            self._free_slots.append(choice.slot)
        if written := plan.written_blocks(self._block_size):
            self._generations.note(written)
        for admitted in plan.admitted:
            self._admit(admitted)
        scheduled = [self._choices[entry.key] for entry in plan.scheduled]
        for choice, entry in zip(scheduled, plan.scheduled, strict=True):
            choice.blocks.extend(entry.new_blocks)
            if self._groups:
                self._place(choice, entry.placed)
            if entry.chosen is not None:
                choice.num_computed = len(choice.tokens)
                choice.tokens.append(entry.chosen)
                self._sampling.commit(choice.slot, entry.chosen)
        return scheduled

    def _admit(self, admitted: AdmittedRequest) -> None:
        tokens = admitted.tokens
        choice = RunningChoice(
            slot=self._free_slots.pop(),
            tokens=tokens.fork() if isinstance(tokens, SharedList) else list(tokens),
            num_prompt=admitted.num_prompt,
            num_computed=admitted.num_computed,
            blocks=array("i", admitted.blocks),
            groups=[array("i") for _ in self._groups],
            num_state_blocks=admitted.num_computed // self._block_size,
            sampling=admitted.sampling,
            verify=admitted.speculation.verify if admitted.speculation else "match",
            guides=admitted.guides,
            sampler_state=admitted.sampler_state,
            images=admitted.images,
            rotary=rotary_positions(admitted.images),
            cache_salt=admitted.cache_salt,
        )
        self._place(choice, admitted.placed)
        self._choices[admitted.key] = choice
        self._begin_sampling(choice, admitted.forked_from)
        self._speculator.begin(choice.slot, choice.tokens, choice.blocks, admitted)
        self._search.begin(choice.slot, choice.sampling)
        self._learning.begin(choice.slot, admitted)

    def _place(self, choice: RunningChoice, placed: Sequence[PlacedBlock]) -> None:
        """Enter new blocks of cache groups into the choice's tables."""
        for group, at, block in placed:
            table = choice.groups[group - 1]
            if at >= len(table):
                hole = 0 if self._groups[group - 1].kind == "window" else -1
                table.extend([hole] * (at + 1 - len(table)))
            table[at] = block

    def _begin_sampling(self, choice: RunningChoice, forked_from: str | None = None) -> None:
        prompt, output = islice(choice.tokens, choice.num_prompt), choice.tokens[choice.num_prompt :]
        parent = None if forked_from is None else self._choices[forked_from].slot
        self._sampling.admit(choice.slot, choice.sampling, prompt, output, choice.sampler_state, parent)

    def rewind(self, choices: Sequence[RunningChoice]) -> None:
        """Bring the scheduled choices back to where `apply` left them, after a step that failed before `commit`.

        Their drafts and candidates are dropped. Keys and values that the step wrote will be written again.
        """
        for choice in choices:
            self._sampling.release(choice.slot)
            self._begin_sampling(choice)
            self._speculator.forget_draft(choice.slot)
            self._search.forget_candidates(choice.slot)

    def gather(
        self, choices: Sequence[RunningChoice], scheduled: Sequence[ScheduledRequest], trees: Sequence[DraftTree]
    ) -> Batch:
        """Lay out the step's tokens, choice after choice; each choice's drafts follow its known tokens."""
        index_of = {entry.key: index for index, entry in enumerate(scheduled)}
        layout = _Layout(self._block_size, index_of)
        for index, (choice, entry, tree) in enumerate(zip(choices, scheduled, trees, strict=True)):
            layout.add(index, choice, entry.num_tokens, tree)
        positions = np.array(layout.positions, dtype=np.int64)
        return Batch(
            tokens=np.array(layout.tokens, dtype=np.int64),
            positions=positions,
            choice_of=np.array(layout.choice_of, dtype=np.int64),
            block_tables=[choice.blocks for choice in choices],
            block_of=np.array(layout.block_of, dtype=np.int64),
            offset_of=np.array(layout.places, dtype=np.int64) % self._block_size,
            logits_index=np.array(layout.logits_index, dtype=np.int64),
            samples=layout.samples,
            guides=layout.guides,
            prompt_rows=layout.prompt_rows,
            paths=_tree_paths(layout, positions) if any(trees) else None,
            pooled=layout.pooled,
            groups=self._group_tables(choices, layout.choice_of, layout.places),
            images=(images := self._image_rows(choices, scheduled, layout)),
            rotary=_rotary(choices, positions, layout.firsts, has_axes=bool(images)),
            span_last=_span_last(choices, positions, layout.firsts) if images and self._sees_images() else None,
            states=self._state_tables(
                choices,
                [
                    (choice.num_state_blocks, choice.num_computed, choice.num_computed + entry.num_tokens)
                    for choice, entry in zip(choices, scheduled, strict=True)
                ],
            ),
        )

    def _sees_images(self) -> bool:
        return self._images is not None and self._images.sees_images

    def _image_rows(
        self, choices: Sequence[RunningChoice], scheduled: Sequence[ScheduledRequest], layout: "_Layout"
    ) -> list[ImageRows]:
        """The features of the step's known tokens."""
        found = []
        for index, (choice, entry) in enumerate(zip(choices, scheduled, strict=True)):
            start, end = choice.num_computed, choice.num_computed + entry.num_tokens
            for image in choice.images:
                for run in image.within(start, end):
                    assert self._images is not None, "requests with images are checked"
                    rows = self._images.features.rows(choice.cache_salt, image)[:, run.row : run.row + run.length]
                    found.append(ImageRows(layout.firsts[index] + run.place - start, rows))
        return found

    def gather_ahead(self, choices: Sequence[RunningChoice]) -> Batch:
        """The step in which each choice computes the one token of the previous step, which is not committed yet."""
        rows = np.arange(len(choices))
        positions = np.array([len(choice.tokens) for choice in choices], dtype=np.int64)
        blocks = [choice.blocks[len(choice.tokens) // self._block_size] for choice in choices]
        return Batch(
            tokens=np.zeros(len(choices), dtype=np.int64),  # not known yet
            positions=positions,
            choice_of=rows,
            block_tables=[choice.blocks for choice in choices],
            block_of=np.array(blocks, dtype=np.int64),
            offset_of=positions % self._block_size,
            logits_index=rows,
            samples=[SampleRows(row, row, NO_DRAFT, choice.verify) for row, choice in enumerate(choices)],
            prompt_rows=[],
            rotary=_rotary(choices, positions, range(len(choices)), has_axes=False),
            groups=self._group_tables(choices, range(len(choices)), positions),
            states=self._state_tables(
                choices,
                [
                    (self._folded_at(choice, known), known, known + 1)
                    for choice, known in zip(choices, positions.tolist(), strict=True)
                ],
            ),
        )

    def _group_tables(
        self, choices: Sequence[RunningChoice], choice_of: Sequence[int], places: Sequence[int] | IntArray
    ) -> list[GroupTables]:
        """The blocks of cache groups for tokens of these choices at these places."""
        tables: list[GroupTables] = []
        if not self._groups or not all(choice.groups for choice in choices):
            return tables
        for number, group in enumerate(self._groups):
            if group.kind == "window":
                of_choice = [choice.groups[number] for choice in choices]
                block_of = [
                    of_choice[choice][place // self._block_size]
                    for choice, place in zip(choice_of, places, strict=True)
                ]
                tables.append(GroupTables(of_choice, np.array(block_of, dtype=np.int64)))
        return tables

    def _state_tables(
        self, choices: Sequence[RunningChoice], spans: Sequence[tuple[int, int, int]]
    ) -> StateTables | None:
        """Rows and pages of recurrent layers for a step.

        Blocks that the step begins and folds have no rows block of their own, but scratch blocks after all others.

        Args:
            choices: the step's choices.
            spans: for each, the blocks that are folded before the step, and its first known token and their end.
        """
        if self._rows is None or self._pages is None:
            return None
        scratch = count(self._groups[self._rows].num_blocks)
        rows: list[Sequence[int]] = []
        anchors: list[tuple[int, int]] = []
        pages: list[Sequence[tuple[int, int]]] = []
        for choice, (folded, start, end) in zip(choices, spans, strict=True):
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
            anchors.append((folded, page_of[folded - 1] if folded else -1))
            pages.append([(at, page_of[at]) for at in range(folded, min(last, len(page_of))) if page_of[at] >= 0])
        return StateTables(rows, anchors, pages)

    def _folded_at(self, choice: RunningChoice, known: int) -> int:
        """Blocks that are folded once a step has computed the known tokens up to here: the last with a page."""
        if self._pages is None:
            return 0
        page_of = choice.groups[self._pages]
        ends = range(min(known // self._block_size, len(page_of)), choice.num_state_blocks, -1)
        return next((end for end in ends if page_of[end - 1] >= 0), choice.num_state_blocks)

    def begin_masks(self, batch: Batch, choices: Sequence[RunningChoice]) -> None:
        """Compute, while the step runs, which tokens the grammars of the ready choices allow next."""
        self._sampling.fill_masks([choices[sample.choice].slot for sample in batch.samples], in_background=True)

    def plan_early_sampling(
        self, batch: Batch, choices: Sequence[RunningChoice], num_pending: int = 0
    ) -> EarlySamplingPlan:
        """How a kernel can sample these choices' tokens, if each has `num_pending` uncommitted tokens."""
        slots = [choices[sample.choice].slot for sample in batch.samples]
        return self._sampling.plan_early_sampling(
            batch.samples, slots, batch.positions[batch.logits_index], num_pending
        )

    def commit(
        self, choice: RunningChoice, num_computed: int, tokens: Sequence[int], nodes: Sequence[int]
    ) -> list[Move]:
        """Record that tokens were computed, and append the new tokens after the last known one.

        The last known token never counts as computed: the next step starts with it.

        Args:
            choice: the choice.
            num_computed: how many known tokens were computed.
            tokens: the new tokens; all except the last were computed at `nodes`.
            nodes: the accepted nodes of the draft tree, one for each of `tokens` except the last.

        Returns:
            Moves that bring the keys and values of the computed tokens to their final places.
        """
        end = len(choice.tokens)
        choice.tokens.extend(tokens)
        if choice.groups:
            choice.num_state_blocks = self._folded_at(choice, choice.num_computed + num_computed)
        choice.num_computed = min(choice.num_computed + num_computed + len(nodes), len(choice.tokens) - 1)
        choice.sampler_state = self._sampling.sampler_state(choice.slot)
        places = [(end + node, end + depth) for depth, node in enumerate(nodes) if node != depth]
        return [
            Move(*self._slot_of(table, old), *self._slot_of(table, new), group)
            for group, table in enumerate([choice.blocks, *choice.groups])
            if not group or self._groups[group - 1].kind != "page"
            for old, new in places
        ]

    def _slot_of(self, table: Sequence[int], place: int) -> tuple[int, int]:
        return table[place // self._block_size], place % self._block_size


def _rotary(
    choices: Sequence[RunningChoice], positions: IntArray, firsts: Sequence[int], *, has_axes: bool
) -> IntArray | None:
    """Rotary positions [T], or [3, T] with axes, of choices whose tokens begin at `firsts`; None if all are places."""
    if all(choice.rotary is None for choice in choices):
        return None
    rotary = np.tile(positions, (3, 1))
    for choice, first, end in zip(choices, firsts, [*firsts[1:], len(positions)], strict=True):
        if choice.rotary is not None:
            rotary[:, first:end] = choice.rotary.of(positions[first:end])
    return rotary if has_axes else rotary[0]


def _span_last(choices: Sequence[RunningChoice], positions: IntArray, firsts: Sequence[int]) -> IntArray:
    """[T] the last position of each token's image; its own position outside of images."""
    span_last = positions.copy()
    for choice, first, end in zip(choices, firsts, [*firsts[1:], len(positions)], strict=True):
        for image in choice.images:
            inside = (positions[first:end] >= image.start) & (positions[first:end] < image.end)
            span_last[first:end][inside] = image.end - 1
    return span_last


class _Layout:
    """Builds a step's flat list of tokens, and the rows that need logits."""

    def __init__(self, block_size: int, index_of: Mapping[str, int]) -> None:
        self._block_size = block_size
        self._index_of = index_of
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.places: list[int] = []
        """Places of the tokens' keys and values, counted from the start of the choice's block table."""
        self.block_of: list[int] = []
        self.choice_of: list[int] = []
        self.logits_index: list[int] = []
        self.samples: list[SampleRows] = []
        self.guides: dict[int, SampleRows] = {}
        self.prompt_rows: list[PromptRows] = []
        self.pooled: list[PooledRows] = []
        self.firsts: list[int] = []
        """The first token of each choice."""

    def add(self, index: int, choice: RunningChoice, num_tokens: int, tree: DraftTree) -> None:
        """Add choice number `index`: its next `num_tokens` known tokens, then its drafts."""
        start, end = choice.num_computed, choice.num_computed + num_tokens
        self.firsts.append(len(self.tokens))
        self._add_prompt_rows(index, choice, end)
        if choice.sampling.pooling is not None:
            self._add_pooled(index, choice, choice.sampling.pooling, num_tokens)
        elif end == len(choice.tokens):
            rows = SampleRows(index, len(self.logits_index), tree, choice.verify)
            if choice.guides is None:
                self.samples.append(rows)
            else:
                self.guides[self._index_of[choice.guides]] = rows
            last = len(self.tokens) + num_tokens - 1
            self.logits_index.extend(range(last, last + 1 + len(tree)))
        places = range(start, end + len(tree))
        self.tokens += choice.tokens[start:end]
        self.tokens += tree.tokens
        self.positions += range(start, end)
        self.positions += [end - 1 + depth for depth in tree.depths()]
        self.places += places
        self.block_of += [choice.blocks[place // self._block_size] for place in places]
        self.choice_of += [index] * len(places)

    def _add_pooled(self, index: int, choice: RunningChoice, pooling: Pooling, num_tokens: int) -> None:
        """Note that a pooling request's tokens come next; only some kinds of pooling need logits."""
        start, is_last = len(self.tokens), choice.num_computed + num_tokens == len(choice.tokens)
        row = len(self.logits_index) if is_last and pooling.by == "logits" else None
        if row is not None:
            self.logits_index.append(start + num_tokens - 1)
        tokens = slice(start, start + num_tokens)
        self.pooled.append(PooledRows(index, pooling, tokens, len(choice.tokens), is_last, row))

    def _add_prompt_rows(self, index: int, choice: RunningChoice, end: int) -> None:
        if choice.sampling.prompt_logprobs is None:
            return
        first = choice.num_computed
        targets = choice.tokens[first + 1 : min(end + 1, choice.num_prompt)]
        if targets:
            row, token = len(self.logits_index), len(self.tokens)
            self.logits_index.extend(range(token, token + len(targets)))
            self.prompt_rows.append(PromptRows(index, slice(row, row + len(targets)), torch.tensor(targets)))


def _tree_paths(layout: _Layout, positions: IntArray) -> TreePaths:
    start = positions + 1
    count = np.zeros(len(start) + 1, dtype=np.int64)
    places: list[int] = []
    for sample in sorted((*layout.samples, *layout.guides.values()), key=lambda rows: rows.first):
        root = layout.logits_index[sample.first]
        for node in range(len(sample.tree)):
            token = root + 1 + node
            path = sample.tree.path(node)
            start[token] = layout.places[root] + 1
            count[token + 1] = len(path)
            places += [layout.places[root] + 1 + ancestor for ancestor in path]
    return TreePaths(start, count.cumsum(), np.array(places, dtype=np.int64))
