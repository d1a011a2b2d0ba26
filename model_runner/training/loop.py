"""Training loop: AdamW with warm-up and cosine decay, saved every few minutes, resumed exactly."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from model_runner.training.examples import Example, batches
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
        self._optimizer = torch.optim.AdamW(
            _groups(objective.module, options.weight_decay), lr=options.learning_rate, betas=(0.9, 0.95), fused=True
        )
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
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.learning_rate * _schedule(self._step / steps, self._options.warm_up)
        self._optimizer.zero_grad()
        loss = self._objective.loss(examples)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._objective.module.parameters(), 1.0)
        self._optimizer.step()
        value = float(loss.detach())
        self._loss = value if math.isnan(self._loss) else 0.98 * self._loss + 0.02 * value
        self._step += 1

    def _affordable_steps(self) -> int:
        """Number of steps that fit into the minutes, by the fastest of a few trial steps."""
        quickest = float("inf")
        for examples in islice(batches(self._examples, self._options.batch_rows, self._options.seed), _PROBED_STEPS):
            start = time.monotonic()
            self._objective.loss(examples).backward()  # type: ignore[no-untyped-call]
            quickest = min(quickest, time.monotonic() - start)
        self._optimizer.zero_grad()
        return max(1, round(self._options.minutes * 60 / quickest))

    def _save(self) -> None:
        partial = self._state.with_suffix(".partial")
        torch.save(
            {
                "module": self._objective.module.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "step": self._step,
                "steps": self._steps,
                "loss": self._loss,
            },
            partial,
        )
        partial.replace(self._state)

    def _restore(self) -> None:
        content = torch.load(self._state, weights_only=True)
        self._objective.module.load_state_dict(content["module"])
        self._optimizer.load_state_dict(content["optimizer"])
        self._step, self._steps, self._loss = content["step"], content["steps"], content["loss"]


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Parameter groups: matrices get weight decay, biases and factors do not."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": weight_decay},
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
    ]


def _schedule(done: float, warm_up: float) -> float:
    """Fraction of the learning rate: linear warm-up, then a cosine down to 2 %."""
    if done < warm_up:
        return (done + 1e-3) / (warm_up + 1e-3)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (done - warm_up) / (1 - warm_up)))
