"""What the runner remembers of each running choice between steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from model_runner.batch import Batch, IntArray, PromptRows
from model_runner.contract import AdmittedRequest, SamplingParams, ScheduledRequest, StepPlan
from model_runner.sampling.rows import SamplingState


@dataclass(slots=True)
class Choice:
    """One running choice. `tokens[:num_computed]` have their keys and values in `blocks`."""

    slot: int
    tokens: list[int]
    num_prompt: int
    num_computed: int
    blocks: list[int]
    sampling: SamplingParams


class RunnerState:
    """Slots, tokens and block tables of the running choices, kept in step with the scheduler's plans."""

    def __init__(self, max_num_seqs: int, block_size: int, sampling: SamplingState, device: torch.device) -> None:
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._choices: dict[str, Choice] = {}
        self._block_size = block_size
        self._sampling = sampling
        self._device = device

    def apply(self, plan: StepPlan) -> list[Choice]:
        """Forget what was released, take up what was admitted, extend block tables; returns the scheduled choices."""
        for key in plan.released:
            choice = self._choices.pop(key)
            self._sampling.release(choice.slot)
            self._free_slots.append(choice.slot)
        for admitted in plan.admitted:
            self._admit(admitted)
        scheduled = [self._choices[entry.key] for entry in plan.scheduled]
        for choice, entry in zip(scheduled, plan.scheduled, strict=True):
            choice.blocks.extend(entry.new_blocks)
        return scheduled

    def _admit(self, admitted: AdmittedRequest) -> None:
        choice = Choice(
            slot=self._free_slots.pop(),
            tokens=list(admitted.tokens),
            num_prompt=admitted.num_prompt,
            num_computed=admitted.num_computed,
            blocks=list(admitted.blocks),
            sampling=admitted.sampling,
        )
        self._choices[admitted.key] = choice
        prompt, output = choice.tokens[: choice.num_prompt], choice.tokens[choice.num_prompt :]
        self._sampling.admit(choice.slot, choice.sampling, prompt, output)

    def gather(self, choices: Sequence[Choice], scheduled: Sequence[ScheduledRequest]) -> Batch:
        """Lay the step's tokens out flat, choice after choice."""
        tokens: list[int] = []
        positions: list[int] = []
        choice_of: list[int] = []
        block_of: list[int] = []
        rows = _LogitsRows()
        for index, (choice, entry) in enumerate(zip(choices, scheduled, strict=True)):
            span = range(choice.num_computed, choice.num_computed + entry.num_tokens)
            rows.add(index, choice, len(tokens), len(tokens) + len(span))
            tokens += choice.tokens[span.start : span.stop]
            positions += span
            choice_of += [index] * len(span)
            block_of += [choice.blocks[position // self._block_size] for position in span]
        position_of = np.array(positions, dtype=np.int64)
        return Batch(
            tokens=self._tensor(tokens),
            positions=self._tensor(positions),
            position_of=position_of,
            choice_of=np.array(choice_of, dtype=np.int64),
            block_tables=[choice.blocks for choice in choices],
            block_of=self._tensor(block_of),
            offset_of=self._tensor(position_of % self._block_size),
            logits_index=self._tensor(rows.index),
            sample_rows=self._tensor(rows.sample_rows),
            sampled=rows.sampled,
            prompt_rows=rows.prompt_rows,
        )

    def commit(self, choice: Choice, num_computed: int, tokens: Sequence[int]) -> None:
        """Record that tokens were computed and, after the last known one, sampled."""
        choice.num_computed += num_computed
        if tokens:
            choice.tokens.extend(tokens)
            self._sampling.commit(choice.slot, tokens)

    def _tensor(self, numbers: list[int] | IntArray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(numbers, dtype=np.int64)).to(self._device)


class _LogitsRows:
    """Collects which of the step's tokens need logits, and what for."""

    def __init__(self) -> None:
        self.index: list[int] = []
        self.sample_rows: list[int] = []
        self.sampled: list[int] = []
        self.prompt_rows: list[PromptRows] = []

    def add(self, index: int, choice: Choice, start: int, end: int) -> None:
        """Add choice number `index`, whose tokens stand at start to end of the flat batch."""
        first = choice.num_computed
        if choice.sampling.prompt_logprobs is not None:
            targets = choice.tokens[first + 1 : min(first + 1 + end - start, choice.num_prompt)]
            if targets:
                row = len(self.index)
                self.index.extend(range(start, start + len(targets)))
                self.prompt_rows.append(PromptRows(index, slice(row, row + len(targets)), torch.tensor(targets)))
        if first + end - start == len(choice.tokens):
            self.sample_rows.append(len(self.index))
            self.sampled.append(index)
            self.index.append(end - 1)
