"""Measures single steps of the real runner without a scheduler: decoding a batch, and the prefill of a prompt."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.on_gpu.timing import Spans, synchronize
from model_runner.contract import (
    AdmittedRequest,
    BlockCopy,
    ChoiceResult,
    SamplingParams,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from model_runner.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
REPORTING = SamplingParams(temperature=0.0, prompt_logprobs=0)
STEPS = 12
"""Decode steps that are timed together: the first starts on an idle device, the others are launched ahead."""
MARGIN = 128
"""Maximum tokens that a choice may generate in a measurement."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Duration of a step, and the device's time for its forward pass."""

    step_ms: float
    forward_ms: float


class RunnerSteps:
    """Drives a runner with its own plans instead of a scheduler's. Steps that fail raise RuntimeError."""

    def __init__(self, runner: ModelRunner, spans: Spans) -> None:
        """`spans` are the timed forward passes of the runner."""
        self._runner = runner
        self._spans = spans
        self._random = np.random.default_rng(0)
        self._keys: list[str] = []
        """Keys of the choices that the runner holds."""
        self._released: tuple[str, ...] = ()
        """Keys to release with the next plan, because a step needs something to compute."""

    def admit(self, rows: int, context: int, *, prefilled: int) -> None:
        """Admit `rows` choices with `context` tokens each: at most `prefilled` are computed, the others get copies."""
        prompts = [self._tokens(context) for _ in range(min(rows, prefilled))]
        size = self._runner.info.block_size
        per_choice = -(-(context + MARGIN) // size)
        blocks = [tuple(range(row * per_choice, (row + 1) * per_choice)) for row in range(rows)]
        keys = [f"row-{row}" for row in range(rows)]
        first = [
            AdmittedRequest(key, prompt, context, 0, own, GREEDY)
            for key, prompt, own in zip(keys, prompts, blocks, strict=False)
        ]
        copies: list[BlockCopy] = []
        others = []
        for row in range(len(first), rows):
            source = row % len(first)
            copies += map(BlockCopy, blocks[source], blocks[row])
            tokens = (*prompts[source], 0)
            others.append(AdmittedRequest(keys[row], tokens, len(tokens), context, blocks[row], GREEDY))
        self._execute(first, tuple(ScheduledRequest(entry.key, context, ()) for entry in first))
        self._execute(others, tuple(ScheduledRequest(key, 1, ()) for key in keys), copies)

    def decode(self) -> StepTime:
        """Measure a decode step for all choices: the mean of STEPS steps, launched ahead as in the engine."""
        plan = StepPlan((), (), (), tuple(ScheduledRequest(key, 1, ()) for key in self._keys))
        results = []
        synchronize(self._spans.device)
        self._spans.clear()
        start = time.perf_counter()
        running = self._runner.launch(plan)
        for _ in range(STEPS - 1):
            following = self._runner.launch(plan, is_ahead=True) if running.can_follow else None
            results.append(running.result())
            running = following or self._runner.launch(plan)
        results.append(running.result())
        step_ms = 1e3 * (time.perf_counter() - start) / STEPS
        for result in results:
            checked(result)
        return StepTime(step_ms, self._spans.take_ms() / STEPS)

    def release(self) -> None:
        """Release all choices in the next measurement's first step."""
        self._released, self._keys = (*self._released, *self._keys), []

    def prefill(self, tokens: int) -> StepTime:
        """Measure a step that computes a whole prompt and its first token."""
        admitted = self._prompt(self._tokens(tokens), GREEDY)
        try:
            synchronize(self._spans.device)
            self._spans.clear()
            start = time.perf_counter()
            self._execute([admitted], (ScheduledRequest(admitted.key, tokens, ()),))
            step_ms = 1e3 * (time.perf_counter() - start)
            return StepTime(step_ms, self._spans.take_ms())
        finally:
            self.release()

    def logprobs(self, prompt: Sequence[int], *, alone: int) -> NDArray[np.float64]:
        """Log-probability of each token of a prompt except the first; the last `alone` are computed one per step."""
        admitted, found = [self._prompt(tuple(prompt), REPORTING)], []
        try:
            for count in [len(prompt) - alone, *[1] * alone]:
                (choice,) = self._execute(admitted, (ScheduledRequest("prompt", count, ()),), is_whole=False)
                found += [report.logprob for report in choice.prompt_logprobs]
                admitted = []
        finally:
            self.release()
        return np.array(found)

    def _prompt(self, tokens: tuple[int, ...], sampling: SamplingParams) -> AdmittedRequest:
        blocks = tuple(range(-(-(len(tokens) + 1) // self._runner.info.block_size)))
        return AdmittedRequest("prompt", tokens, len(tokens), 0, blocks, sampling)

    def _execute(
        self,
        admitted: Sequence[AdmittedRequest],
        scheduled: tuple[ScheduledRequest, ...],
        copies: Sequence[BlockCopy] = (),
        *,
        is_whole: bool = True,
    ) -> Sequence[ChoiceResult]:
        """Run a step. Even if it fails, the runner then holds the admitted choices and no longer the released ones."""
        plan = StepPlan(self._released, tuple(copies), tuple(admitted), scheduled)
        self._released = ()
        self._keys += [entry.key for entry in admitted]
        return checked(self._runner.execute(plan), is_whole=is_whole)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.integers(0, self._runner.info.vocab_size, count).tolist())


def checked(result: StepResult, *, is_whole: bool = True) -> Sequence[ChoiceResult]:
    """The step's choices. Raises RuntimeError if one failed or, in a step that ends all prompts, has no token."""
    if result.out_of_memory:
        raise RuntimeError(f"out of memory: {result.out_of_memory}")
    for choice in result.choices:
        if choice.error is not None:
            raise RuntimeError(f"{choice.key} failed: {choice.error.message}")
        if is_whole and not choice.tokens:
            raise RuntimeError(f"{choice.key} has no token")
    return result.choices
