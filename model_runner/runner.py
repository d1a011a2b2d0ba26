"""The model runner: executes the scheduler's plans on one device."""

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from model_runner.assemble import RunnerParts, assemble
from model_runner.batch import Batch, IntArray
from model_runner.config import RunnerConfig
from model_runner.contract import (
    ChoiceResult,
    SamplingParams,
    ScheduledRequest,
    StepPlan,
    StepResult,
    smallest_group,
)
from model_runner.draft_tree import NO_DRAFT, DraftTree, chain
from model_runner.features import Feature
from model_runner.kv_cache import Move
from model_runner.learning.link import ProcessLink
from model_runner.learning.wiring import MakeLink
from model_runner.platforms.memory import oom_reason
from model_runner.platforms.platform import Platform
from model_runner.refusal import refused
from model_runner.runner_interface import LaunchedStep, LearningStats, Runner, RunnerInfo, SpeculationStats
from model_runner.sampling.logprobs import logprobs_of_prompts
from model_runner.sampling.rows import EarlySamplingPlan, EarlyTokens
from model_runner.scoring.transforms import RawStep
from model_runner.speculative.proposer import ChoiceStep, TargetStep
from model_runner.speculative.step_times import StepLoad, StepTimes
from model_runner.speculative.verify import Verdict
from model_runner.state import RunningChoice


@dataclass(frozen=True, slots=True)
class StepContext:
    """The scheduled choices of a step and what is computed for them. Lists have one entry per scheduled choice."""

    keys: Sequence[str]
    batch: Batch
    choices: Sequence[RunningChoice]
    slots: Sequence[int]
    load: StepLoad
    """The step's load without drafts."""
    drafts: Sequence[DraftTree]
    guided: Mapping[int, int]
    """For each guide, by index, the index of the choice that it guides."""
    needs_scoring: bool
    """Whether any choice does (`SamplingParams.needs_scoring`)."""


def choice_steps(
    plan: StepPlan, context: StepContext, verdicts: Sequence[Verdict], indices: Sequence[int]
) -> list[ChoiceStep]:
    """The results of a committed step for the choices at these indices, as learning and speculation observe them."""
    if not indices:
        return []
    first_row = np.searchsorted(context.batch.choice_of, np.arange(len(context.choices))).tolist()
    samples = {sample.choice: sample for sample in context.batch.samples}
    steps = []
    for index in indices:
        choice, verdict, row = context.choices[index], verdicts[index], first_row[index]
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


def guided_by(choices: Sequence[RunningChoice], scheduled: Sequence[ScheduledRequest]) -> dict[int, int]:
    """For each guide, the choice that it guides. Guides use its drafts and take its tokens."""
    index_of = {entry.key: index for index, entry in enumerate(scheduled)}
    return {index: index_of[choice.guides] for index, choice in enumerate(choices) if choice.guides in index_of}


def load_of(choices: Sequence[RunningChoice], scheduled: Sequence[ScheduledRequest]) -> StepLoad:
    """The load of a step for these choices, without drafts and beams."""
    rows = context = ready = 0
    for choice, entry in zip(choices, scheduled, strict=True):
        end = choice.num_computed + entry.num_tokens
        rows += entry.num_tokens
        context += entry.num_tokens * (choice.num_computed + end + 1) // 2
        ready += end == len(choice.tokens) and choice.guides is None
    return StepLoad(rows, context, ready)


def next_load(choices: Sequence[RunningChoice], ready: int) -> StepLoad:
    """The load of the next step if it holds only the choices that just got tokens, and their guides."""
    rows = ready + sum(choice.guides is not None for choice in choices)
    return StepLoad(rows, sum(len(choice.tokens) for choice in choices) * rows // max(len(choices), 1), ready)


logger = logging.getLogger("samewise.runner")

_WARM_UP_ROWS = (1, 2, 4, 8, 16)
_WARM_UP_CONTEXT = 512
_WARM_UP_TIMES = 2
_PREPARING_THREADS = 8
"""More threads than there are processes that check grammars first, so that slow grammars do not block others."""


class ModelRunner(Runner):
    """One forward pass over a plan's tokens, then a token for each choice that is ready."""

    def __init__(self, parts: RunnerParts, info: RunnerInfo) -> None:
        self.info = info
        self.num_blocks, self.groups = info.num_blocks, info.groups
        self._target = parts.target
        self._caches = parts.caches
        self._state = parts.state
        self._speculator = parts.speculator
        self._controller = parts.controller
        self._verify = parts.verifier
        self._search = parts.search
        self._scoring = parts.scoring
        self._pool = parts.pooler
        self._is_async = parts.is_async
        self._launched: StepContext | None = None
        """Context of the last launched step."""
        self._last_s = 0.0
        """When the last step was finished."""
        self._drafter = parts.drafter
        self._grammars = parts.grammars
        self._learning = parts.learning
        self._reader = parts.images
        self.images = None if parts.images is None else parts.images.features
        self._preparing = ThreadPoolExecutor(_PREPARING_THREADS, "prepare")

    @classmethod
    def load(
        cls, config: RunnerConfig, platform: Platform | None = None, make_link: MakeLink = ProcessLink
    ) -> "ModelRunner":
        """Load the model and run warm-up steps. Takes the arguments of `assemble` and raises its errors."""
        with refused(f"{config.model} cannot be served", ValueError, OSError):
            parts, info = assemble(config, platform, make_link)
            runner = cls(parts, info)
            start = time.perf_counter()
            runner.warm_up()
        first_step_s = time.perf_counter() - start
        if parts.grammars is not None:
            parts.grammars.load()
        grammars_s = time.perf_counter() - start - first_step_s
        phases = ("first step", first_step_s), ("vocabulary for grammars", grammars_s)
        runner.info = replace(info, started_in=(*info.started_in, *phases))
        parts.learning.start()
        return runner

    def prepare(self, sampling: SamplingParams, num_choices: int) -> Future[None] | None:
        """Compile the grammar, if there is one; a limit on reasoning needs the grammar package's vocabulary."""
        if sampling.grammar is None and sampling.thinking is None:
            return None
        if self._grammars is None:
            raise ValueError("grammars and limits on reasoning need a package: run `pip install llguidance`")
        return self._preparing.submit(self._grammars.prepare, sampling.grammar, num_choices)

    def launch(self, plan: StepPlan, *, is_ahead: bool = False) -> LaunchedStep:
        cores = None if self._reader is None else self._reader.cores
        if cores is None:
            return self._launch(plan, is_ahead=is_ahead)
        with cores.step():
            step = self._launch(plan, is_ahead=is_ahead)
        result = cores.step()(step.result)
        return replace(step, result=result)

    def _launch(self, plan: StepPlan, *, is_ahead: bool) -> LaunchedStep:
        context = self._follow(plan) if is_ahead else self._lay_out(plan)
        start = time.perf_counter()
        try:
            step = self._forward(context, is_ahead=is_ahead)
        except (MemoryError, RuntimeError) as error:
            reason = oom_reason(error)
            return LaunchedStep(can_follow=False, result=lambda: self._give_up(context, reason))
        self._launched = context
        picks = self._target.picks()
        return LaunchedStep(self._can_follow(context, step), lambda: self._finish(plan, context, step, picks, start))

    def _lay_out(self, plan: StepPlan) -> StepContext:
        """Apply the plan to cache and choices, and lay out the step."""
        for cache in self._caches if plan.copies else ():
            cache.copy_blocks(plan.copies)
        choices = self._state.apply(plan)
        slots = [choice.slot for choice in choices]
        guided = guided_by(choices, plan.scheduled)
        num_candidates = sum(entry.num_candidates for entry in plan.scheduled)
        load = load_of(choices, plan.scheduled).plus(num_candidates)
        drafts = self._speculator.drafts(load, slots, plan.scheduled)
        trees = drafts = [drafts[guided.get(index, index)] for index in range(len(drafts))]
        if num_candidates:
            candidates = self._search.candidates(slots, plan.scheduled)
            trees = [some or others for some, others in zip(candidates, drafts, strict=True)]  # no choice has both
        batch = self._state.gather(choices, plan.scheduled, trees)
        needs_scoring = any(choice.sampling.needs_scoring for choice in choices)
        return StepContext(plan.keys, batch, choices, slots, load, drafts, guided, needs_scoring)

    def _follow(self, plan: StepPlan) -> StepContext:
        """Lay out a step whose plan was made before the previous step's result was known."""
        choices = self._state.apply(plan)
        load = StepLoad(len(choices), sum(len(choice.tokens) + 1 for choice in choices), len(choices))
        batch = self._state.gather_ahead(choices)
        slots = [choice.slot for choice in choices]
        needs_scoring = any(choice.sampling.needs_scoring for choice in choices)
        return StepContext(plan.keys, batch, choices, slots, load, [NO_DRAFT] * len(choices), {}, needs_scoring)

    def _forward(self, context: StepContext, *, is_ahead: bool) -> RawStep:
        """Run the model, and collect the hidden states that these choices need."""
        sampling = [choice.sampling for choice in context.choices]
        needs = frozenset[Feature]()
        if context.needs_scoring:
            needs = self._scoring.needs(sampling) | self._search.needs(context.slots) | self._pool.needs(sampling)
        plan = self._state.plan_early_sampling(context.batch, context.choices, int(is_ahead))
        follows = self._rows_before(context) if is_ahead else None
        if self._is_async:
            self._state.begin_masks(context.batch, context.choices)
        logits = self._target.forward(context.batch, needs, plan, follows)
        return RawStep(context.batch, sampling, logits, self._target.features(), plan)

    def _rows_before(self, context: StepContext) -> IntArray:
        """For each choice, the row of the last launched step that its token is sampled from."""
        assert self._launched is not None, "there is a step to follow"
        before = self._launched
        row_of = {before.keys[sample.choice]: sample.first for sample in before.batch.samples}
        return np.array([row_of[key] for key in context.keys], dtype=np.int64)

    def _can_follow(self, context: StepContext, step: RawStep) -> bool:
        """Whether only the sampled tokens, one for each choice, are needed from the step."""
        if not self._is_async:
            return False
        are_found = len(step.plan.choices - step.plan.with_grammar) == len(context.choices)
        is_recorded = not self._learning.recorded.isdisjoint(context.slots)
        is_read = context.batch.prompt_rows or self._speculator.reads_step(context.slots) or is_recorded
        return are_found and not is_read and len(context.batch.logits_index) == len(context.choices)

    def _finish(
        self, plan: StepPlan, context: StepContext, step: RawStep, picks: Callable[[], EarlyTokens], start: float
    ) -> StepResult:
        """Commit the results of the step."""
        reason: str | None = None
        try:
            rows = context.batch.prompt_rows
            prompts = logprobs_of_prompts(step.logits, rows, step.sampling) if rows else {}
            verdicts = self._decide(step, context, picks, start)
            pooled = self._pool(step, context.choices) if context.batch.pooled else {}  # last: it adds to running sums
        except (MemoryError, RuntimeError) as error:
            reason = oom_reason(error)
        if reason is not None:
            return self._give_up(context, reason)
        known = verdicts | pooled
        decided = [known.get(context.guided.get(index, index), Verdict()) for index in range(len(context.choices))]
        made_by = self._speculator.made_by(context.slots)
        self._commit(plan, context.choices, decided)
        offers = self._propose(next_load(context.choices, len(verdicts)), plan, context, decided, step)
        num_candidates = self._search.num_candidates() if context.needs_scoring else {}
        parts = zip(plan.scheduled, context.slots, decided, context.drafts, strict=True)
        return StepResult(
            tuple(
                ChoiceResult(
                    key=entry.key,
                    tokens=tuple(verdict.tokens),
                    logprobs=tuple(verdict.logprobs),
                    prompt_logprobs=prompts.get(index, ()),
                    num_draft=offers.get(slot, 0),
                    num_accepted=len(verdict.nodes),
                    num_rejected=len(draft) - len(verdict.nodes),
                    num_candidates=num_candidates.get(slot, 0),
                    method=made_by[index],
                    error=verdict.error,
                    beam_candidates=verdict.candidates,
                    sampler_state=verdict.sampler_state,
                    pooled=verdict.pooled,
                )
                for index, (entry, slot, verdict, draft) in enumerate(parts)
            )
        )

    def _give_up(self, context: StepContext, reason: str) -> StepResult:
        """Restore the state before a step that ran out of memory.

        Call it after the exception is gone: its traceback would keep the step's tensors alive.
        """
        self._free_memory()
        self._state.rewind(context.choices)
        return StepResult((), out_of_memory=reason)

    def _free_memory(self) -> None:
        """Release cached memory after a step that ran out of memory."""
        self._target.features()
        torch.cuda.empty_cache()  # does nothing where CUDA is not used

    def _propose(
        self, load: StepLoad, plan: StepPlan, context: StepContext, verdicts: Sequence[Verdict], step: RawStep
    ) -> dict[int, int]:
        """Make the next drafts. If memory runs out, these choices stop speculating; the step remains committed."""
        drafting = self._speculator.begin_cycle(load, context.slots)
        observed = drafting | self._learning.recorded
        told = [index for index, slot in enumerate(context.slots) if slot in observed]
        if not told:
            return {}
        brought = TargetStep(choice_steps(plan, context, verdicts, told), step.features, step.logits)
        self._learning.observe(brought)
        if not drafting:
            return {}
        brought = replace(brought, choices=[choice for choice in brought.choices if choice.slot in drafting])
        try:
            return self._speculator.propose(load, brought)
        except (MemoryError, RuntimeError) as error:
            reason = oom_reason(error)
        logger.warning("Out of memory while drafting; %d choices stop speculating: %s", len(drafting), reason)
        self._speculator.give_up(drafting)
        self._free_memory()
        return {}

    def _decide(
        self, step: RawStep, context: StepContext, picks: Callable[[], EarlyTokens], start: float
    ) -> dict[int, Verdict]:
        """A verdict for each choice that is ready, by its index in the batch.

        Args:
            step: the model's output.
            context: the step that was computed.
            picks: waits for the tokens that a kernel sampled.
            start: when the step was launched.
        """
        found = picks()
        forward_s = time.perf_counter() - max(start, self._last_s)
        verdicts: dict[int, Verdict] = {}
        if context.needs_scoring:
            verdicts = self._search.decide(step.batch, context.slots, step.features, step.logits)
        walks = [sample for sample in step.batch.samples if sample.choice not in verdicts]
        walking = [context.slots[sample.choice] for sample in walks]
        scores = self._scoring(step) if context.needs_scoring else step.logits
        begun = time.perf_counter()
        walked = self._verify(scores, walks, walking, step.logits, found)
        self._last_s = time.perf_counter()
        seconds = forward_s + self._last_s - begun
        self._speculator.observe(context.load, walks, walking, walked, seconds, context.slots)
        return verdicts | dict(zip((sample.choice for sample in walks), walked, strict=True))

    def _commit(self, plan: StepPlan, choices: Sequence[RunningChoice], verdicts: Sequence[Verdict]) -> None:
        """Commit the step: append tokens to the choices, and move the KV of accepted drafts into place."""
        moves: list[Move] = []
        for choice, entry, verdict in zip(choices, plan.scheduled, verdicts, strict=True):
            moves += self._state.commit(choice, entry.num_tokens, verdict.tokens, verdict.nodes)
        for cache in self._caches if moves else ():
            cache.move(moves)

    def speculation_stats(self) -> tuple[SpeculationStats, ...]:
        return self._speculator.stats()

    def learning_stats(self) -> LearningStats | None:
        return self._learning.stats()

    def close(self) -> None:
        """Stop training heads, and computing features of images. Steps without new images can still be executed."""
        self._learning.close()
        if self._reader is not None:
            self._reader.features.close()

    def warm_up(self) -> None:
        """Run warm-up steps, so that no request pays for them, and measure how long steps take."""
        self._speculator.warm_up(self._first_step())
        self._scoring.warm_up(self._first_batch(1))
        if self._drafter is not None:
            self._drafter.forward(self._first_batch(1))
            self._drafter.settle()
        self._target.settle()
        room = min(self.info.max_model_len, smallest_group(self.info.num_blocks, self.groups) * self.info.block_size)
        rows = [count for count in _WARM_UP_ROWS if count <= room]
        seconds = np.array([min(self._step_seconds(count) for _ in range(_WARM_UP_TIMES)) for count in rows])
        context = min(_WARM_UP_CONTEXT, room - rows[-1])
        per_context = (self._step_seconds(rows[-1], context) - seconds[-1]) / max(rows[-1] * context, 1)
        self._controller.times = StepTimes(np.array(rows, dtype=np.float64), seconds, max(float(per_context), 0.0))

    def _step_seconds(self, rows: int, context: int = 0) -> float:
        """Seconds of a forward pass of `rows` rows after `context` positions. It overwrites blocks: startup only."""
        batch = self._first_batch(rows, context)
        start = time.perf_counter()
        self._first_forward(batch)[0, 0].item()  # waits for the device
        return time.perf_counter() - start

    def _first_step(self) -> TargetStep:
        """A step as proposers see it, with a prompt of one token."""
        logits = self._first_forward(self._first_batch(1))
        choice = ChoiceStep(
            slot=0,
            tokens=[0, 0],
            num_prompt=1,
            num_new=1,
            num_computed=1,
            rows=[0],
            blocks=[0],
            max_nodes=0,
            sampling=SamplingParams(),
        )
        return TargetStep([choice], self._target.features(), logits)

    def _first_forward(self, batch: Batch) -> Tensor:
        return self._target.forward(batch, (), EarlySamplingPlan.greedy(len(batch.logits_index)))

    def _first_batch(self, rows: int, context: int = 0) -> Batch:
        blocks = array("i", range(-(-(context + rows) // self.info.block_size)))
        choice = RunningChoice(0, [0] * (context + 1), 1, context, SamplingParams(), blocks=blocks)
        tree = chain([0] * (rows - 1), [1.0] * (rows - 1))
        return self._state.gather([choice], [ScheduledRequest("", 1, ())], [tree])
