"""Engines that share one loaded model."""

import gc
from concurrent.futures import Future
from dataclasses import replace

from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams, StepPlan, StepResult
from model_runner.learning.link import ProcessLink
from model_runner.learning.wiring import MakeLink
from model_runner.runner import ModelRunner
from model_runner.runner_interface import Runner, SpeculationStats
from scheduler.engine import Engine
from scheduler.interface import SchedulerConfig
from scheduler.scheduler import Scheduler


class SharedRunner(Runner):
    """A runner that several engines use one after the other, each with its own number of blocks."""

    def __init__(self, runner: ModelRunner, num_blocks: int, known: set[str]) -> None:
        self.num_blocks = num_blocks
        self.groups = runner.groups
        self.images = runner.images
        self._runner = runner
        self._known = known
        self._is_fresh = True

    def prepare(self, sampling: SamplingParams, num_choices: int) -> Future[None] | None:
        return self._runner.prepare(sampling, num_choices)

    def execute(self, plan: StepPlan) -> StepResult:
        released = tuple(self._known) if self._is_fresh else plan.released
        self._is_fresh = False
        self._known.difference_update(released)
        self._known.update(admitted.key for admitted in plan.admitted)
        return self._runner.execute(replace(plan, released=released))

    def speculation_stats(self) -> tuple[SpeculationStats, ...]:
        return self._runner.speculation_stats()


class Engines:
    """Creates engines for a model that is loaded once."""

    def __init__(self, config: RunnerConfig, make_link: MakeLink = ProcessLink) -> None:
        self.runner = ModelRunner.load(config, make_link=make_link)
        gc.collect()  # as the engine process does; otherwise a later collection would take 0.25 s of some run
        gc.freeze()
        self._config = SchedulerConfig(
            block_size=self.runner.info.block_size,
            max_num_seqs=self.runner.info.max_num_seqs,
            max_num_batched_tokens=self.runner.info.max_num_batched_tokens,
            max_model_len=self.runner.info.max_model_len,
            sees_images=self.runner.info.sees_images,
        )
        self._known: set[str] = set()

    def make(self, *, prefix_caching: bool = False, chunk: int | None = None, num_blocks: int | None = None) -> Engine:
        """Create an engine with an empty prefix cache or none, and at most `chunk` tokens per step.

        Only one of the engines may have work at a time.
        """
        config = replace(
            self._config,
            prefix_caching=prefix_caching,
            max_num_batched_tokens=chunk or self._config.max_num_batched_tokens,
        )
        runner = SharedRunner(self.runner, num_blocks or self.runner.num_blocks, self._known)
        return Engine(Scheduler(config, runner.num_blocks, groups=runner.groups, images=runner.images), runner)
