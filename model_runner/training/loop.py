"""Training steps, and a loop of them with warm-up and cosine decay, saved every few minutes and resumed exactly."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_runner.heads.base import Example
from model_runner.training.examples import batches
from model_runner.training.objective import Objective

_ROWS, _SIZE, _REPEATS = 256, 1024, 8


def product_type(device: torch.device) -> torch.dtype:
    """bfloat16 if its products are at least 1.5 times as fast as float32; on CPUs this is measured."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if _seconds(torch.bfloat16) * 1.5 < _seconds(torch.float32) else torch.float32


def _seconds(dtype: torch.dtype) -> float:
    """The fastest of several runs, because other programs only slow them down."""
    rows, weight = torch.zeros(_ROWS, _SIZE, dtype=dtype), torch.zeros(_SIZE, _SIZE, dtype=dtype)
    quickest = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        F.linear(rows, weight)
        quickest = min(quickest, time.perf_counter() - start)
    return quickest


class Optimizer:
    """Steps of AdamW on an objective, with clipped gradients."""

    def __init__(self, objective: Objective, weight_decay: float = 0.0) -> None:
        """Matrices get weight decay, biases and factors do not."""
        self._objective = objective
        self.parameters: list[Tensor] = [one for one in objective.heads.parameters() if one.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [one for one in self.parameters if one.dim() >= 2], "weight_decay": weight_decay},
            {"params": [one for one in self.parameters if one.dim() < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    def step(self, examples: Sequence[Example], learning_rate: float) -> float | None:
        """Train on a batch; returns the loss. None, and no change, if numbers are no longer finite."""
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        self._objective.heads.train()
        self.adam.zero_grad()
        loss = self._objective.loss(examples)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        value = float(loss.detach())
        if not math.isfinite(value + float(norm)):
            return None
        self.adam.step()
        return value


_PROBED_STEPS = 4


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Duration and speed of training."""

    minutes: float = 30.0
    """Target duration, from which the number of steps is computed once."""
    steps: int | None = None
    """Number of steps; overrides `minutes`."""
    batch_rows: int = 1024
    """Answer tokens per step."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warm_up: float = 0.03
    """Fraction of the steps."""
    save_every_s: float = 180.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """Progress of training."""

    step: int
    steps: int
    loss: float
    """Running mean of the loss."""


class TrainingLoop:
    """Trains an objective. Its state is a file: a loop with the same file resumes where the last one stopped."""

    def __init__(self, objective: Objective, examples: Sequence[Example], options: LoopOptions, state: Path) -> None:
        self._objective = objective
        self._examples = examples
        self._options = options
        self._state = state
        self._optimizer = Optimizer(objective, options.weight_decay)
        self._step = 0
        self._loss = float("nan")
        self._steps = options.steps
        if state.is_file():
            self._restore()

    def run(self, progress: Callable[[Moment], None], saved: Callable[[Moment], None]) -> float:
        """Train to the end; returns the final running mean of the loss.

        `progress` is called after every step, `saved` after the state was saved.
        """
        options = self._options
        if self._steps is None:
            self._steps = self._affordable_steps()
        source = islice(batches(self._examples, options.batch_rows, options.seed), self._step, None)
        last_save = time.monotonic()
        while self._step < self._steps:
            self._train(next(source), self._steps)
            moment = Moment(self._step, self._steps, self._loss)
            progress(moment)
            if time.monotonic() - last_save >= options.save_every_s or self._step == self._steps:
                self._save()
                saved(moment)
                last_save = time.monotonic()
        return self._loss

    def _train(self, examples: Sequence[Example], steps: int) -> None:
        rate = self._options.learning_rate * _schedule(self._step / steps, self._options.warm_up)
        value = self._optimizer.step(examples, rate)
        if value is not None:
            self._loss = value if math.isnan(self._loss) else 0.98 * self._loss + 0.02 * value
        self._step += 1

    def _affordable_steps(self) -> int:
        """Number of steps that fit into the minutes, by the fastest of a few trial steps."""
        quickest = float("inf")
        for examples in islice(batches(self._examples, self._options.batch_rows, self._options.seed), _PROBED_STEPS):
            start = time.monotonic()
            self._objective.loss(examples).backward()  # type: ignore[no-untyped-call]
            quickest = min(quickest, time.monotonic() - start)
        self._optimizer.adam.zero_grad()
        return max(1, round(self._options.minutes * 60 / quickest))

    def _save(self) -> None:
        partial = self._state.with_suffix(".partial")
        torch.save(
            {
                "module": self._objective.heads.state_dict(),
                "optimizer": self._optimizer.adam.state_dict(),
                "step": self._step,
                "steps": self._steps,
                "loss": self._loss,
            },
            partial,
        )
        partial.replace(self._state)

    def _restore(self) -> None:
        content = torch.load(self._state, weights_only=True)
        self._objective.heads.load_state_dict(content["module"])
        self._optimizer.adam.load_state_dict(content["optimizer"])
        self._step, self._steps, self._loss = content["step"], content["steps"], content["loss"]


def _schedule(done: float, warm_up: float) -> float:
    """Fraction of the learning rate: linear warm-up, then a cosine down to 2 %."""
    if done < warm_up:
        return (done + 1e-3) / (warm_up + 1e-3)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (done - warm_up) / (1 - warm_up)))
