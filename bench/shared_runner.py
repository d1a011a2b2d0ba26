"""One loaded model for several engines."""

from dataclasses import replace

from model_runner.contract import SpeculationStats, StepPlan, StepResult
from model_runner.runner import ModelRunner


class SharedRunner:
    """A runner that several engines use one after the other, with as many blocks as each is given."""

    def __init__(self, runner: ModelRunner, num_blocks: int, known: set[str]) -> None:
        self.num_blocks = num_blocks
        self._runner = runner
        self._known = known
        self._is_fresh = True

    def execute(self, plan: StepPlan) -> StepResult:
        released = tuple(self._known) if self._is_fresh else plan.released
        self._is_fresh = False
        self._known.difference_update(released)
        self._known.update(admitted.key for admitted in plan.admitted)
        return self._runner.execute(replace(plan, released=released))

    def speculation_stats(self) -> tuple[SpeculationStats, ...]:
        return self._runner.speculation_stats()
