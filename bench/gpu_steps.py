"""Single steps of the real runner, without a scheduler: decode of a batch, and the prefill of a prompt."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.gpu_timing import Spans, synchronize
from model_runner.contract import AdmittedRequest, SamplingParams, ScheduledRequest, StepPlan
from model_runner.models.target import TargetModel
from model_runner.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
MARGIN = 128
"""Tokens that a choice may get in a measurement."""
STEPS = 4
"""Of decoding, that are timed together."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step as the engine sees it, and the part of it that the device spends on the forward pass."""

    step_ms: float
    forward_ms: float


class RunnerSteps:
    """Drives a runner with plans of its own; one measurement after the other."""

    def __init__(self, runner: ModelRunner, device: torch.device) -> None:
        self._runner = runner
        self._device = device
        self._random = np.random.default_rng(0)
        self._keys: list[str] = []
        self._released: tuple[str, ...] = ()
        """Of the next plan: a step needs something to compute."""

    def admit(self, rows: int, context: int, *, prefilled: int) -> None:
        """Choices that have `context` tokens each: so many of them computed, the others with copies of their blocks."""
        prompts = [self._tokens(context) for _ in range(min(rows, prefilled))]
        size = self._runner.info.block_size
        per_choice = -(-(context + MARGIN) // size)
        blocks = [tuple(range(row * per_choice, (row + 1) * per_choice)) for row in range(rows)]
        self._keys = [f"row-{row}" for row in range(rows)]
        first = [
            AdmittedRequest(key, prompt, context, 0, own, GREEDY)
            for key, prompt, own in zip(self._keys, prompts, blocks, strict=False)
        ]
        copies, others = [], []
        for row in range(len(first), rows):
            source = row % len(first)
            copies += list(zip(blocks[source], blocks[row], strict=True))
            tokens = (*prompts[source], 0)
            others.append(AdmittedRequest(self._keys[row], tokens, len(tokens), context, blocks[row], GREEDY))
        computed = tuple(ScheduledRequest(entry.key, context, ()) for entry in first)
        self._runner.execute(StepPlan(self._take_released(), (), tuple(first), computed))
        self._runner.execute(StepPlan((), tuple(copies), tuple(others), self._one_each()))

    def decode(self) -> StepTime:
        """A token for each of them: the mean of STEPS steps, launched ahead as the engine does it."""
        plan = StepPlan((), (), (), self._one_each())
        synchronize(self._device)
        with timed_forward(self._runner._target, self._device) as spans:
            start = time.perf_counter()
            running = self._runner.launch(plan)
            for _ in range(STEPS - 1):
                following = self._runner.launch(plan, is_ahead=True) if running.can_follow else None
                running.result()
                running = following or self._runner.launch(plan)
            running.result()
            step_ms = 1e3 * (time.perf_counter() - start) / STEPS
            return StepTime(step_ms, spans.take_ms() / STEPS)

    def release(self) -> None:
        """Have the next measurement's first step forget them all."""
        self._released, self._keys = (*self._released, *self._keys), []

    def prefill(self, tokens: int) -> StepTime:
        """A prompt in one step, and the first token after it."""
        blocks = tuple(range(-(-(tokens + 1) // self._runner.info.block_size)))
        admitted = AdmittedRequest("prompt", self._tokens(tokens), tokens, 0, blocks, GREEDY)
        self._keys = ["prompt"]
        released, scheduled = self._take_released(), ScheduledRequest("prompt", tokens, ())
        time_ = self._step(StepPlan(released, (), (admitted,), (scheduled,)))
        self.release()
        return time_

    def _take_released(self) -> tuple[str, ...]:
        released, self._released = self._released, ()
        return released

    def _one_each(self) -> tuple[ScheduledRequest, ...]:
        return tuple(ScheduledRequest(key, 1, ()) for key in self._keys)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.integers(0, self._runner.info.vocab_size, count).tolist())

    def _step(self, plan: StepPlan) -> StepTime:
        synchronize(self._device)
        with timed_forward(self._runner._target, self._device) as spans:
            start = time.perf_counter()
            self._runner.execute(plan)
            step_ms = 1e3 * (time.perf_counter() - start)
            return StepTime(step_ms, spans.take_ms())


@contextlib.contextmanager
def timed_forward(target: TargetModel, device: torch.device) -> Iterator[Spans]:
    """Time what the target's forward gives the device, be it kernels or the replay of a graph."""
    spans, forward = Spans(device), target.forward

    def timed(*args: Any, **options: Any) -> Any:
        with spans.span():
            return forward(*args, **options)

    target.forward = timed  # type: ignore[method-assign]
    try:
        yield spans
    finally:
        del target.forward  # the class has its own again
