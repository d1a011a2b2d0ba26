"""The runner's state of each running choice between steps."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch

from model_runner.batch import (
    Batch,
    BatchChoice,
    BatchMaker,
    ImageRows,
    IntArray,
    LogitRows,
    PooledRows,
    PromptRows,
    SampleRows,
    StepTokens,
    tree_paths,
)
from model_runner.contract import (
    AdmittedRequest,
    PlacedBlock,
    Pooling,
    SamplingParams,
    ScheduledRequest,
    StepPlan,
    Verification,
    state_blocks_after,
)
from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.image import Image
from model_runner.image_reader import LoadedReader
from model_runner.kv_cache import Move
from model_runner.learning.learning import NO_LEARNING, Learning
from model_runner.rotary_positions import rotary_positions
from model_runner.sampling.rows import EarlySamplingPlan, SamplingState
from model_runner.scoring.contrastive_search import ContrastiveSearch
from model_runner.shared_list import SharedList
from model_runner.speculative.draft_kv import TargetBlocks
from model_runner.speculative.speculator import Speculator


@dataclass(slots=True)
class RunningChoice(BatchChoice):
    """A running choice between steps. `tokens[:num_computed]` have their keys and values in `blocks`.

    The scheduler keeps a `Request` of it, the sampler a slot (sampling/slot.py).
    """

    slot: int
    tokens: list[int] | SharedList[int]
    num_prompt: int
    num_computed: int
    sampling: SamplingParams
    num_state_blocks: int = 0
    """Blocks whose effect is in the newest page of recurrent states."""
    verify: Verification = "match"
    guides: str | None = None
    """Key of the choice that this one guides (`AdmittedRequest.guides`)."""
    sampler_state: float | None = None
    """State of the sampler after the last step, as far as it does not follow from the tokens."""
    images: Sequence[Image] = ()
    cache_salt: str = ""
    hidden_sum: IntArray | None = None
    """[hidden] the sum of the computed tokens' hidden states in fixed point, if their mean is requested; None once one
    is not finite."""

    def state_blocks_after(self, known: int, block_size: int) -> int:
        """Blocks that are folded once a step has computed its tokens up to `known`."""
        keeps_last = self.sampling.num_candidates > 0
        return state_blocks_after(self.num_state_blocks, known, block_size, keeps_last=keeps_last)


class RunnerState:
    """Slots, tokens and block tables of the running choices, kept in step with the scheduler's plans."""

    def __init__(
        self,
        blocks: TargetBlocks,
        sampling: SamplingState,
        speculator: Speculator,
        search: ContrastiveSearch,
        learning: Learning = NO_LEARNING,
        images: LoadedReader | None = None,
    ) -> None:
        """`images` has features of images; None if prompts have no images."""
        self._groups = tuple(blocks.groups)
        self._is_recurrent = any(group.kind == "page" for group in blocks.groups)
        self._free_slots = list(range(blocks.max_num_seqs - 1, -1, -1))
        self._choices: dict[str, RunningChoice] = {}
        self._block_size = blocks.block_size
        self._maker = BatchMaker(blocks.block_size, blocks.groups)
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
        layout = _Layout(index_of)
        for index, (choice, entry, tree) in enumerate(zip(choices, scheduled, trees, strict=True)):
            layout.add(index, choice, entry.num_tokens, tree)
        images = self._image_rows(choices, scheduled, layout.firsts)
        batch = self._maker.make(
            choices,
            layout.tokens,
            layout.rows,
            paths=tree_paths(layout.tokens, trees) if any(trees) else None,
            images=images,
            num_state_blocks=[choice.num_state_blocks for choice in choices],
        )
        if images and self._sees_images():
            return replace(batch, span_last=_span_last(choices, batch.positions, layout.firsts))
        return batch

    def _sees_images(self) -> bool:
        return self._images is not None and self._images.sees_images

    def _image_rows(
        self, choices: Sequence[RunningChoice], scheduled: Sequence[ScheduledRequest], firsts: Sequence[int]
    ) -> list[ImageRows]:
        """The features of the step's known tokens. Choices begin at the tokens `firsts`."""
        found = []
        for index, (choice, entry) in enumerate(zip(choices, scheduled, strict=True)):
            start, end = choice.num_computed, choice.num_computed + entry.num_tokens
            for image in choice.images:
                for run in image.within(start, end):
                    assert self._images is not None, "requests with images are checked"
                    rows = self._images.features.rows(choice.cache_salt, image)[:, run.row : run.row + run.length]
                    found.append(ImageRows(firsts[index] + run.place - start, rows))
        return found

    def gather_ahead(self, choices: Sequence[RunningChoice]) -> Batch:
        """The step in which each choice computes the one token of the previous step, which is not committed yet."""
        lengths = [len(choice.tokens) for choice in choices]
        recurrent = choices if self._is_recurrent else ()
        folded = [choice.state_blocks_after(len(choice.tokens), self._block_size) for choice in recurrent]
        samples = [SampleRows(row, row, NO_DRAFT, choice.verify) for row, choice in enumerate(choices)]
        return self._maker.make(
            choices,
            StepTokens([0] * len(choices), lengths, [1] * len(choices)),  # the tokens are not known yet
            LogitRows(np.arange(len(choices)), samples),
            num_state_blocks=folded,
        )

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
        if self._is_recurrent:
            choice.num_state_blocks = choice.state_blocks_after(choice.num_computed + num_computed, self._block_size)
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


def _span_last(choices: Sequence[RunningChoice], positions: IntArray, firsts: Sequence[int]) -> IntArray:
    """[T] the last position of each token's image; its own position outside of images."""
    span_last = positions.copy()
    for choice, first, end in zip(choices, firsts, [*firsts[1:], len(positions)], strict=True):
        for image in choice.images:
            inside = (positions[first:end] >= image.start) & (positions[first:end] < image.end)
            span_last[first:end][inside] = image.end - 1
    return span_last


class _Layout:
    """Collects a step's tokens, and the rows that need logits, choice after choice."""

    def __init__(self, index_of: Mapping[str, int]) -> None:
        self._index_of = index_of
        self._logits_index: list[int] = []
        self.rows = LogitRows(self._logits_index)
        self.tokens = StepTokens()
        self.firsts: list[int] = []
        """The first token of each choice."""

    def add(self, index: int, choice: RunningChoice, num_tokens: int, tree: DraftTree) -> None:
        """Add choice number `index`: its next `num_tokens` known tokens, then its drafts."""
        start, end = choice.num_computed, choice.num_computed + num_tokens
        first = len(self.tokens.ids)
        self.firsts.append(first)
        self._add_prompt_rows(index, choice, end)
        if choice.sampling.pooling is not None:
            self._add_pooled(index, choice, choice.sampling.pooling, num_tokens)
        elif end == len(choice.tokens):
            rows = SampleRows(index, len(self._logits_index), tree, choice.verify)
            if choice.guides is None:
                self.rows.samples.append(rows)
            else:
                self.rows.guides[self._index_of[choice.guides]] = rows
            last = first + num_tokens - 1
            self._logits_index.extend(range(last, last + 1 + len(tree)))
        self.tokens.add([*choice.tokens[start:end], *tree.tokens], start)

    def _add_pooled(self, index: int, choice: RunningChoice, pooling: Pooling, num_tokens: int) -> None:
        """Note that a pooling request's tokens come next; only some kinds of pooling need logits."""
        start, is_last = len(self.tokens.ids), choice.num_computed + num_tokens == len(choice.tokens)
        row = len(self._logits_index) if is_last and pooling.by == "logits" else None
        if row is not None:
            self._logits_index.append(start + num_tokens - 1)
        tokens = slice(start, start + num_tokens)
        self.rows.pooled.append(PooledRows(index, pooling, tokens, len(choice.tokens), is_last, row))

    def _add_prompt_rows(self, index: int, choice: RunningChoice, end: int) -> None:
        if choice.sampling.prompt_logprobs is None:
            return
        first = choice.num_computed
        targets = choice.tokens[first + 1 : min(end + 1, choice.num_prompt)]
        if targets:
            row, token = len(self._logits_index), len(self.tokens.ids)
            self._logits_index.extend(range(token, token + len(targets)))
            self.rows.prompt_rows.append(PromptRows(index, slice(row, row + len(targets)), torch.tensor(targets)))
