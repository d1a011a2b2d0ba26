"""The runner's state of each running choice between steps."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from model_runner.batch import Batch, GroupTables, IntArray, PooledRows, PromptRows, SampleRows, TreePaths
from model_runner.contract import (
    AdmittedRequest,
    CacheGroup,
    PlacedBlock,
    Pooling,
    SamplingParams,
    ScheduledRequest,
    SharedList,
    StepPlan,
    Verification,
)
from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.kv_cache import Move
from model_runner.learning.learning import NO_LEARNING, Learning
from model_runner.sampling.fused_sampling import FusedSamplingPlan
from model_runner.sampling.rows import SamplingState
from model_runner.scoring.contrastive_search import ContrastiveSearch
from model_runner.speculative.draft_model import BlockGenerations
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
    """For each cache group its blocks by index, 0 where it has none."""
    verify: Verification = "match"
    guides: str | None = None
    """Key of the choice that this one guides (`AdmittedRequest.guides`)."""
    sampler_state: float | None = None
    """State of the sampler after the last step, as far as it does not follow from the tokens."""
    hidden_sum: IntArray | None = None
    """[hidden] the sum of the computed tokens' hidden states in fixed point, if their mean is requested; None once one
    is not finite."""


class RunnerState:
    """Slots, tokens and block tables of the running choices, kept in step with the scheduler's plans."""

    def __init__(
        self,
        max_num_seqs: int,
        block_size: int,
        sampling: SamplingState,
        speculator: Speculator,
        search: ContrastiveSearch,
        generations: BlockGenerations,
        learning: Learning = NO_LEARNING,
        groups: Sequence[CacheGroup] = (),
    ) -> None:
        self._groups = groups
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._choices: dict[str, RunningChoice] = {}
        self._block_size = block_size
        self._sampling = sampling
        self._speculator = speculator
        self._search = search
        self._generations = generations
        self._learning = learning

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
                _place(choice, entry.placed)
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
            sampling=admitted.sampling,
            verify=admitted.speculation.verify if admitted.speculation else "match",
            guides=admitted.guides,
            sampler_state=admitted.sampler_state,
        )
        _place(choice, admitted.placed)
        self._choices[admitted.key] = choice
        self._begin_sampling(choice, admitted.forked_from)
        self._speculator.begin(choice.slot, choice.tokens, choice.blocks, admitted)
        self._search.begin(choice.slot, choice.sampling)
        self._learning.begin(choice.slot, admitted)

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
        )

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
            groups=self._group_tables(choices, range(len(choices)), positions),
        )

    def _group_tables(
        self, choices: Sequence[RunningChoice], choice_of: Sequence[int], places: Sequence[int] | IntArray
    ) -> list[GroupTables]:
        """The blocks of cache groups for tokens of these choices at these places."""
        tables = []
        for number, group in enumerate(self._groups if all(choice.groups for choice in choices) else ()):
            if group.kind == "window":
                of_choice = [choice.groups[number] for choice in choices]
                block_of = [
                    of_choice[choice][place // self._block_size]
                    for choice, place in zip(choice_of, places, strict=True)
                ]
                tables.append(GroupTables(of_choice, np.array(block_of, dtype=np.int64)))
        return tables

    def begin_masks(self, batch: Batch, choices: Sequence[RunningChoice]) -> None:
        """Compute, while the step runs, which tokens the grammars of the ready choices allow next."""
        self._sampling.fill_masks([choices[sample.choice].slot for sample in batch.samples], in_background=True)

    def plan_picks(self, batch: Batch, choices: Sequence[RunningChoice], num_pending: int = 0) -> FusedSamplingPlan:
        """How a kernel can sample these choices' tokens, if each has `num_pending` uncommitted tokens."""
        slots = [choices[sample.choice].slot for sample in batch.samples]
        return self._sampling.plan_picks(batch.samples, slots, batch.positions[batch.logits_index], num_pending)

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


def _place(choice: RunningChoice, placed: Sequence[PlacedBlock]) -> None:
    """Enter new blocks of cache groups into the choice's tables."""
    for group, at, block in placed:
        table = choice.groups[group - 1]
        if at >= len(table):
            table.extend([0] * (at + 1 - len(table)))
        table[at] = block


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

    def add(self, index: int, choice: RunningChoice, num_tokens: int, tree: DraftTree) -> None:
        """Add choice number `index`: its next `num_tokens` known tokens, then its drafts."""
        start, end = choice.num_computed, choice.num_computed + num_tokens
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
