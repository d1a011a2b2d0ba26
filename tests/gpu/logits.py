"""Every row of logits that a runner computes for some prompts, step by step, without a scheduler."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model_runner.batch import Batch
from model_runner.contract import (
    AdmittedRequest,
    PlacedBlock,
    SamplingParams,
    ScheduledRequest,
    StepPlan,
    StepResult,
    smallest_group,
)
from model_runner.runner import ModelRunner


@dataclass
class Trace:
    """Results of one prompt."""

    rows: list[Tensor] = field(default_factory=list)  # each [vocab]
    """One for each token whose logits were wanted."""
    tokens: list[int] = field(default_factory=list)

    @property
    def logits(self) -> Tensor:
        return torch.stack(self.rows)  # [rows, vocab]


class Tracer:
    """Computes prompts together, in chunks, and then so many tokens after each."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self._runner = runner
        self._size = runner.info.block_size
        self._batch: Batch | None = None
        self._logits = torch.empty(0)
        monkeypatch.setattr(runner._target, "forward", self._recording(runner._target.forward))

    def trace(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        chunk: int = 512,
        computed: int = 0,
        decoded: int = 0,
        sampling: SamplingParams | None = None,
    ) -> list[Trace]:
        """Logits of every position of the prompts from `computed` on, below which their blocks hold what the call
        before has left there; where `decoded` is above 0, of the positions after each prompt alone.
        """
        sampling = sampling or SamplingParams(temperature=0.0, prompt_logprobs=None if decoded else 0)
        traces = [Trace() for _ in prompts]
        admitted = self._admitted(prompts, computed, decoded, sampling)
        left = [len(prompt) - computed for prompt in prompts]
        while any(left):
            counts = {index: min(chunk, count) for index, count in enumerate(left) if count}
            self._step(traces, counts, admitted)
            admitted = ()
            left = [count - counts.get(index, 0) for index, count in enumerate(left)]
        for _ in range(decoded):
            self._step(traces, dict.fromkeys(range(len(prompts)), 1))
        self._runner._state.apply(StepPlan(tuple(map(str, range(len(prompts)))), (), (), ()))
        return traces

    def _admitted(
        self, prompts: Sequence[Sequence[int]], computed: int, decoded: int, sampling: SamplingParams
    ) -> tuple[AdmittedRequest, ...]:
        first, entries = 0, []
        for index, prompt in enumerate(prompts):
            end = first + -(-(len(prompt) + decoded + 1) // self._size)
            blocks = tuple(range(first, end))
            request = AdmittedRequest(str(index), tuple(prompt), len(prompt), computed, blocks, sampling)
            entries.append(replace(request, placed=self._placed(blocks)))
            first = end
        assert first <= smallest_group(self._runner.num_blocks, self._runner.groups)
        return tuple(entries)

    def _placed(self, blocks: Sequence[int]) -> tuple[PlacedBlock, ...]:
        """Blocks of the cache groups for a choice with these blocks, with other numbers."""
        return tuple(
            PlacedBlock(group, at, of_group.num_blocks - 1 - block)
            for group, of_group in enumerate(self._runner.groups, 1)
            for at, block in enumerate(blocks)
        )

    def _step(
        self, traces: list[Trace], counts: dict[int, int], admitted: tuple[AdmittedRequest, ...] = ()
    ) -> StepResult:
        scheduled = tuple(ScheduledRequest(str(index), count, ()) for index, count in counts.items())
        result = self._runner.execute(StepPlan((), (), admitted, scheduled))
        assert self._batch is not None
        of_row = self._batch.choice_of[self._batch.logits_index]
        indices = list(counts)
        for row, choice in zip(self._logits, of_row, strict=True):
            traces[indices[choice]].rows.append(row)
        for index, choice in zip(indices, result.choices, strict=True):
            assert choice.error is None
            traces[index].tokens += choice.tokens
        return result

    def _recording(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def recording(batch: Batch, *arguments: Any, **options: Any) -> Tensor:
            logits = forward(batch, *arguments, **options)
            self._batch, self._logits = batch, logits.clone()  # a graph's output is overwritten by its next replay
            return logits

        return recording
