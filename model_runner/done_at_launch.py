"""Runners that compute nothing beside the host."""

from abc import ABC, abstractmethod
from concurrent.futures import Future

from model_runner.contract import SamplingParams, StepPlan, StepResult
from model_runner.info import LearningStats
from model_runner.runner_interface import LaunchedStep


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
