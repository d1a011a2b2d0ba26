"""The loop's body: schedule, execute, update."""

from dataclasses import replace

from model_runner.contract import Runner
from scheduler.interface import EngineRequest, EngineStats, RequestOutput
from scheduler.scheduler import Scheduler


class Engine:
    """Takes requests, runs them step by step and hands out what each step brought. Used from one thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        if scheduler.num_blocks != runner.num_blocks:
            raise ValueError(f"the scheduler has {scheduler.num_blocks} KV blocks, the runner {runner.num_blocks}")
        self.scheduler = scheduler
        self.runner = runner

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return self.scheduler.has_work

    def add(self, request: EngineRequest) -> None:
        """Line up all choices of a request. Raises ValueError, with the numbers, if it can never run."""
        self.scheduler.add(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End one choice, or all; nothing more comes of them. What is unknown or has ended is left alone."""
        self.scheduler.abort(request_id, choice)

    def step(self) -> list[RequestOutput]:
        """Compute one batch. At most one output for each choice, in admission order."""
        plan = self.scheduler.schedule()
        if not plan.scheduled:
            return []
        return self.scheduler.update(plan, self.runner.execute(plan))

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        return replace(self.scheduler.stats(), speculation=self.runner.speculation_stats())

    def check_integrity(self) -> None:
        """Raise IntegrityError if the scheduler's books do not balance. Cheap enough for every idle moment."""
        self.scheduler.check_integrity()
