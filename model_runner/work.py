"""What a step of the runner computes, and what it brought each choice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from model_runner.batch import Batch
from model_runner.contract import ScheduledRequest, StepPlan
from model_runner.draft_tree import DraftTree
from model_runner.speculative.proposer import ChoiceStep
from model_runner.speculative.step_times import StepLoad
from model_runner.speculative.verify import Verdict
from model_runner.state import Choice


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes. The lists have an entry for each scheduled choice."""

    keys: Sequence[str]
    batch: Batch
    choices: Sequence[Choice]
    slots: Sequence[int]
    load: StepLoad
    """Without drafts."""
    drafts: Sequence[DraftTree]
    guided: Mapping[int, int]
    """For each guide, by its index, the choice that it guides."""


def choice_steps(plan: StepPlan, work: Work, verdicts: Sequence[Verdict], indices: Sequence[int]) -> list[ChoiceStep]:
    """What a step that is committed brought some of its choices, named by their indices."""
    if not indices:
        return []
    first_row = np.searchsorted(work.batch.choice_of, np.arange(len(work.choices))).tolist()
    samples = {sample.choice: sample for sample in work.batch.samples}
    steps = []
    for index in indices:
        choice, verdict, row = work.choices[index], verdicts[index], first_row[index]
        drafts = row + plan.scheduled[index].num_tokens
        steps.append(
            ChoiceStep(
                slot=choice.slot,
                tokens=choice.tokens,
                num_prompt=choice.num_prompt,
                num_new=len(verdict.tokens),
                num_computed=choice.num_computed,
                rows=[*range(row, drafts), *(drafts + node for node in verdict.nodes)],
                blocks=choice.blocks,
                max_nodes=0,
                sampling=choice.sampling,
                sample=samples.get(index),
            )
        )
    return steps


def guided_by(choices: Sequence[Choice], scheduled: Sequence[ScheduledRequest]) -> dict[int, int]:
    """For each guide, which choice it guides; guides have its drafts and take its tokens."""
    index_of = {entry.key: index for index, entry in enumerate(scheduled)}
    return {index: index_of[choice.guides] for index, choice in enumerate(choices) if choice.guides in index_of}


def load_of(choices: Sequence[Choice], scheduled: Sequence[ScheduledRequest]) -> StepLoad:
    """What a step computes for these choices, drafts and beams apart."""
    rows = context = ready = 0
    for choice, entry in zip(choices, scheduled, strict=True):
        end = choice.num_computed + entry.num_tokens
        rows += entry.num_tokens
        context += entry.num_tokens * (choice.num_computed + end + 1) // 2
        ready += end == len(choice.tokens) and choice.guides is None
    return StepLoad(rows, context, ready)


def next_load(choices: Sequence[Choice], ready: int) -> StepLoad:
    """What the next step computes if only those go on that have just got tokens, and guides."""
    rows = ready + sum(choice.guides is not None for choice in choices)
    return StepLoad(rows, sum(len(choice.tokens) for choice in choices) * rows // max(len(choices), 1), ready)
