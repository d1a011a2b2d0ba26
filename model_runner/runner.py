"""The model runner: executes the scheduler's plans on one device."""

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from model_runner.assemble import RunnerInfo, RunnerParts, assemble
from model_runner.batch import Batch
from model_runner.config import RunnerConfig
from model_runner.contract import (
    ChoiceResult,
    SamplingParams,
    ScheduledRequest,
    SpeculationStats,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from model_runner.draft_tree import chain
from model_runner.kv_cache import Move
from model_runner.models.inspection import UnsupportedModelError
from model_runner.platforms.platform import Platform
from model_runner.sampling.logprobs import prompt_logprobs
from model_runner.scoring.transform import RawStep
from model_runner.speculative.budget import StepLoad
from model_runner.speculative.proposer import ChoiceStep, Proposer, TargetStep
from model_runner.speculative.step_times import StepTimes
from model_runner.speculative.verify import Verdict
from model_runner.state import Choice

logger = logging.getLogger("samewise.runner")

_WARM_UP_ROWS = (1, 2, 4, 8, 16)
_WARM_UP_CONTEXT = 512
_WARM_UP_TIMES = 2


class ModelRunner:
    """Implements contract.Runner: one forward pass over a plan's tokens, then a token for each choice that is ready."""

    def __init__(self, parts: RunnerParts, info: RunnerInfo) -> None:
        self.info = info
        self._target = parts.target
        self._needs_clean_blocks = parts.needs_clean_blocks
        self._kv_cache = parts.kv_cache
        self._state = parts.state
        self._speculator = parts.speculator
        self._budget = parts.budget
        self._verify = parts.verifier
        self._search = parts.search
        self._scoring = parts.scoring
        self._picks_ahead = parts.picks_ahead
        self._drafter = parts.drafter

    @classmethod
    def load(cls, config: RunnerConfig, platform: Platform | None = None) -> "ModelRunner":
        """Load the model and run first steps. Takes the arguments of `assemble`, and raises what it does."""
        parts, info = assemble(config, platform)
        runner = cls(parts, info)
        start = time.perf_counter()
        runner.warm_up()
        runner.info = replace(info, first_step_s=time.perf_counter() - start)
        return runner

    @property
    def num_blocks(self) -> int:
        """How many KV blocks there are."""
        return self.info.num_blocks

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one forward pass over all scheduled tokens and drafts, and commit what the target says to them."""
        if self._needs_clean_blocks:
            self._kv_cache.clear(_new_blocks(plan, self.info.block_size))
        self._kv_cache.copy_blocks(plan.copies)
        choices = self._state.apply(plan)
        slots = [choice.slot for choice in choices]
        guided = _guided(choices, plan.scheduled)
        candidates = self._search.candidates(slots, plan.scheduled)
        load = _load(choices, plan.scheduled).plus(sum(map(len, candidates)))
        drafts = self._speculator.drafts(load, slots, plan.scheduled)
        drafts = [drafts[guided.get(index, index)] for index in range(len(drafts))]
        trees = [some or others for some, others in zip(candidates, drafts, strict=True)]  # no choice has both
        computed = self._compute(self._state.gather(choices, plan.scheduled, trees), choices, load)
        if isinstance(computed, str):
            self._state.rewind(choices)
            self._free_memory()
            return StepResult((), out_of_memory=computed)
        step, verdicts, prompts = computed.step, computed.verdicts, computed.prompts
        decided = [verdicts.get(guided.get(index, index), Verdict()) for index in range(len(choices))]
        next_step = TargetStep(self._commit(plan, choices, decided, step.batch), step.features, step.logits)
        offers = self._propose(_next_load(choices, len(verdicts)), next_step)
        offers |= self._search.offers()
        parts = zip(plan.scheduled, slots, decided, drafts, strict=True)
        return StepResult(
            tuple(
                _result(entry.key, verdict, len(draft), offers.get(slot, 0), prompts.get(index, ()))
                for index, (entry, slot, verdict, draft) in enumerate(parts)
            )
        )

    def _compute(self, batch: Batch, choices: Sequence[Choice], load: StepLoad) -> "_Computed | str":
        """All of a step that takes much memory; if that runs out, what the device said of it.

        The error itself does not leave this method: its trace would keep the step's tensors.
        """
        start = time.perf_counter()
        try:
            step = self._forward(batch, choices)
            forward_s = time.perf_counter() - start
            prompts = self._prompt_logprobs(step)
            verdicts = self._decide(step, [choice.slot for choice in choices], load, forward_s)
        except torch.OutOfMemoryError as error:
            return str(error)
        return _Computed(step, verdicts, prompts)

    def _free_memory(self) -> None:
        """Give back what a step left behind for which memory ran out."""
        self._target.features()
        torch.cuda.empty_cache()  # does nothing where CUDA is not used

    def _propose(self, load: StepLoad, step: TargetStep) -> dict[int, int]:
        """See Speculator.propose. If memory runs out, the step's choices go on without speculation: the step stands."""
        try:
            return self._speculator.propose(load, step)
        except torch.OutOfMemoryError as error:
            reason = str(error)
        logger.warning("Out of memory while drafting: %d choices stop speculating. %s", len(step.choices), reason)
        for choice in step.choices:
            self._speculator.end(choice.slot)
        self._free_memory()
        return {}

    def _forward(self, batch: Batch, choices: Sequence[Choice]) -> RawStep:
        """What the model says, and what of its hidden states these choices need."""
        sampling = [choice.sampling for choice in choices]
        needs = self._scoring.needs(sampling) | self._search.needs([choice.slot for choice in choices])
        plan = self._state.plan_picks(batch, choices) if self._picks_ahead else None
        logits = self._target.forward(batch, needs, plan)
        return RawStep(batch, sampling, logits, self._target.features(), self._target.picks())

    def _decide(self, step: RawStep, slots: Sequence[int], load: StepLoad, forward_s: float) -> dict[int, Verdict]:
        """A verdict for each choice that is ready, by its index in the batch.

        Args:
            step: what the model said.
            slots: of the step's choices.
            load: the step without drafts.
            forward_s: seconds of the forward pass.
        """
        verdicts = self._search.decide(step.batch, slots, step.features, step.logits)
        walks = [sample for sample in step.batch.samples if sample.choice not in verdicts]
        walking = [slots[sample.choice] for sample in walks]
        scores = self._scoring(step)
        start = time.perf_counter()
        walked = self._verify(scores, walks, walking, step.logits, step.picks)
        seconds = forward_s + time.perf_counter() - start
        of_guides = sum(len(rows.tree) for rows in step.batch.guides.values())
        self._speculator.observe(load.plus(of_guides), walks, walking, walked, seconds)
        return verdicts | dict(zip((sample.choice for sample in walks), walked, strict=True))

    def _commit(
        self, plan: StepPlan, choices: Sequence[Choice], verdicts: Sequence[Verdict], batch: Batch
    ) -> list[ChoiceStep]:
        """Book the step: tokens to the choices, keys and values of accepted drafts to their places.

        Returns what it brought the choices that speculate.
        """
        first_row = np.searchsorted(batch.choice_of, np.arange(len(choices)))
        samples = {sample.choice: sample for sample in batch.samples}
        moves: list[Move] = []
        steps = []
        parts = zip(choices, plan.scheduled, verdicts, first_row.tolist(), strict=True)
        for index, (choice, entry, verdict, row) in enumerate(parts):
            moves += self._state.commit(choice, entry.num_tokens, verdict.tokens, verdict.nodes)
            if not self._speculator.has(choice.slot):
                continue
            drafts = row + entry.num_tokens
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
        self._kv_cache.move(moves)
        return steps

    def _prompt_logprobs(self, step: RawStep) -> dict[int, tuple[TokenLogprobs, ...]]:
        """For each choice that asked, by its index in the batch."""
        return {
            part.choice: tuple(
                prompt_logprobs(step.logits[part.rows], part.targets, step.sampling[part.choice].prompt_logprobs or 0)
            )
            for part in step.batch.prompt_rows
        }

    def add_proposer(self, method: str, proposer: Proposer) -> None:
        """Let requests name another method of speculation."""
        self._speculator.add(method, proposer)

    def speculation_stats(self) -> tuple[SpeculationStats, ...]:
        """What speculation did since the start, by method."""
        return self._speculator.stats()

    def warm_up(self) -> None:
        """Run first steps, so that no request pays for them, and learn how long steps take.

        Raises:
            UnsupportedModelError: if the model uses its weights in a way that cannot be served.
        """
        try:
            self._step_seconds(1)
            self._scoring.warm_up(self._first_batch(1))
            if self._drafter is not None:
                self._drafter.forward(self._first_batch(1))
                self._drafter.settle()
        except NotImplementedError as error:
            raise UnsupportedModelError(str(error)) from error
        self._target.settle()
        room = min(self.info.max_model_len, self.info.num_blocks * self.info.block_size)
        rows = [count for count in _WARM_UP_ROWS if count <= room]
        seconds = np.array([min(self._step_seconds(count) for _ in range(_WARM_UP_TIMES)) for count in rows])
        context = min(_WARM_UP_CONTEXT, room - rows[-1])
        per_context = (self._step_seconds(rows[-1], context) - seconds[-1]) / max(rows[-1] * context, 1)
        self._budget.times = StepTimes(np.array(rows, dtype=np.float64), seconds, max(float(per_context), 0.0))

    def _step_seconds(self, rows: int, context: int = 0) -> float:
        """What a forward pass takes over so many rows after so many positions. Writes to blocks, so only at first."""
        batch = self._first_batch(rows, context)
        start = time.perf_counter()
        self._target.forward(batch)[0, 0].item()  # which waits for the device
        return time.perf_counter() - start

    def _first_batch(self, rows: int, context: int = 0) -> Batch:
        blocks = array("i", range(-(-(context + rows) // self.info.block_size)))
        choice = Choice(0, [0] * (context + 1), 1, context, blocks, SamplingParams())
        tree = chain([0] * (rows - 1), [1.0] * (rows - 1))
        return self._state.gather([choice], [ScheduledRequest("", 1, ())], [tree])


@dataclass(frozen=True, slots=True)
class _Computed:
    """What a step's device work brought."""

    step: RawStep
    verdicts: dict[int, Verdict]
    """Of the choices that are ready, by their index in the batch."""
    prompts: dict[int, tuple[TokenLogprobs, ...]]
    """Of those that asked for them, likewise."""


def _new_blocks(plan: StepPlan, block_size: int) -> list[int]:
    """Blocks whose content is nobody's: all that the plan hands out but shared ones and the targets of copies."""
    fresh = [block for entry in plan.scheduled for block in entry.new_blocks]
    for admitted in plan.admitted:
        fresh += admitted.blocks[-(-admitted.num_computed // block_size) :]
    return fresh


def _guided(choices: Sequence[Choice], scheduled: Sequence[ScheduledRequest]) -> dict[int, int]:
    """For each guide, which choice it guides; guides have its drafts and take its tokens."""
    index_of = {entry.key: index for index, entry in enumerate(scheduled)}
    return {index: index_of[choice.guides] for index, choice in enumerate(choices) if choice.guides in index_of}


def _load(choices: Sequence[Choice], scheduled: Sequence[ScheduledRequest]) -> StepLoad:
    rows = context = ready = 0
    for choice, entry in zip(choices, scheduled, strict=True):
        end = choice.num_computed + entry.num_tokens
        rows += entry.num_tokens
        context += entry.num_tokens * (choice.num_computed + end + 1) // 2
        ready += end == len(choice.tokens)
    return StepLoad(rows, context, ready)


def _next_load(choices: Sequence[Choice], ready: int) -> StepLoad:
    """What the next step computes if only those go on that have just got tokens."""
    return StepLoad(ready, sum(len(choice.tokens) for choice in choices) * ready // max(len(choices), 1), ready)


def _result(
    key: str, verdict: Verdict, num_verified: int, num_draft: int, prompt: tuple[TokenLogprobs, ...]
) -> ChoiceResult:
    return ChoiceResult(
        key=key,
        tokens=tuple(verdict.tokens),
        logprobs=tuple(verdict.logprobs),
        prompt_logprobs=prompt,
        num_draft=num_draft,
        num_accepted=len(verdict.nodes),
        num_rejected=num_verified - len(verdict.nodes),
        error=verdict.error,
        candidates=verdict.candidates,
        sampler_state=verdict.sampler_state,
    )
