"""What the engine drives: something that executes plans. Plain data and no torch, as in contract.py."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from model_runner.contract import SamplingParams, StepPlan, StepResult
from model_runner.info import LearningStats, SpeculationStats


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that is being computed."""

    can_follow: bool
    """Whether the step after it can be launched before its result is taken."""
    result: Callable[[], StepResult]
    """Waits for the step. To be called once, in the order in which steps were launched."""


class Runner(Protocol):
    """Executes plans. Deterministic: a choice's tokens do not depend on what else a plan holds."""

    @property
    def num_blocks(self) -> int:
        """How many KV blocks there are; block ids are 0 to num_blocks - 1."""
        ...

    def prepare(self, sampling: SamplingParams, num_choices: int) -> Future[None] | None:
        """Begin what such choices need, so that nobody waits for it when they are admitted; None: they need nothing.

        The result raises ValueError, in words for the client, if they can never run.
        """
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one forward pass over all scheduled tokens and drafts, and commit what is sampled."""
        ...

    def launch(self, plan: StepPlan, *, is_ahead: bool = False) -> LaunchedStep:
        """Begin to execute a plan; a device that works beside the host goes on by itself.

        `is_ahead`: the result of the step before, which `can_follow`, is not taken yet. Every scheduled choice was
        scheduled there as well, and computes the one token that it brings.
        """
        ...

    def speculation_stats(self) -> tuple[SpeculationStats, ...]:
        """What speculation did since the start, by method."""
        ...

    def learning_stats(self) -> LearningStats | None:
        """What came of learning since the start; None where nothing is learnt."""
        ...


class DoneAtLaunch(ABC):
    """What makes a Runner of one that can only execute."""

    def prepare(self, sampling: SamplingParams, num_choices: int) -> Future[None] | None:
        """See Runner.prepare."""
        return None

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """See Runner.execute."""

    def launch(self, plan: StepPlan, *, is_ahead: bool = False) -> LaunchedStep:
        """See Runner.launch."""
        assert not is_ahead, "no step can follow"
        done = self.execute(plan)
        return LaunchedStep(can_follow=False, result=lambda: done)

    def learning_stats(self) -> LearningStats | None:
        """See Runner.learning_stats."""
        return None
