"""The loop's body: schedule, execute, update."""

from dataclasses import replace

from model_runner.contract import StepPlan
from model_runner.runner_interface import LaunchedStep, Runner
from scheduler.history import ChoiceHistory
from scheduler.interface import EngineRequest, EngineStats, RequestOutput
from scheduler.preparing import Preparing, failed
from scheduler.scheduler import Scheduler


class Engine:
    """Takes requests, runs them step by step and hands out what each step brought. Used from one thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        """Steps are timed by the scheduler's clock."""
        if scheduler.num_blocks != runner.num_blocks:
            raise ValueError(f"the scheduler has {scheduler.num_blocks} KV blocks, the runner {runner.num_blocks}")
        self.scheduler = scheduler
        self.runner = runner
        self._ahead: tuple[StepPlan, LaunchedStep] | None = None
        self._preparing = Preparing()
        self._clock = scheduler.clock

    @property
    def has_work(self) -> bool:
        """Whether there is a request."""
        return self.scheduler.has_work or len(self._preparing) > 0

    def add(self, request: EngineRequest) -> None:
        """Line up all choices of a request, when what they need is prepared; until then others are computed.

        Raises ValueError, with the numbers, if it can never run.
        """
        if request.request_id in self._preparing:
            raise ValueError(f"request {request.request_id!r} is already here")
        self.scheduler.check(request)
        work = self.runner.prepare(request.sampling, request.num_drawn)
        if work is None:
            self.scheduler.add(request)
        else:
            self._preparing.add(request, work, self._clock())

    def abort(self, request_id: str, choice: int | None = None) -> list[ChoiceHistory]:
        """End one choice, or all; nothing more comes of them. What is unknown or has ended is left alone.

        Returns what became of those that ended with it.
        """
        held = self._preparing.abort(request_id, choice, self._clock())
        return held + self.scheduler.abort(request_id, choice)

    def explain(self, request_id: str) -> list[ChoiceHistory]:
        """What became so far of a request's choices that have not ended; of none, if it is unknown."""
        return self._preparing.explain(request_id, self._clock()) + self.scheduler.explain(request_id)

    def step(self) -> list[RequestOutput]:
        """Compute one batch. At most one output for each choice, in admission order.

        Where this batch cannot matter to the next one, that is launched before this one's result is taken: so the
        device computes while the host does all the rest.
        """
        start = self._clock()
        outputs = self._line_up_prepared() if len(self._preparing) else []
        step, self._ahead = self._ahead or self._launch(), None
        if step is None:
            return outputs
        plan, launched = step
        if launched.can_follow and (ahead := self.scheduler.schedule_ahead(plan)) is not None:
            self._ahead = ahead, self.runner.launch(ahead, is_ahead=True)
        result = launched.result()
        self.scheduler.note_seconds(self._clock() - start)
        return outputs + self.scheduler.update(plan, result)

    def _line_up_prepared(self) -> list[RequestOutput]:
        """Returns the end of those that cannot run."""
        outputs: list[RequestOutput] = []
        for prepared in self._preparing.take(is_idle=not self.scheduler.has_work):
            if prepared.failure is None:
                self.scheduler.add(prepared.request, prepared.arrived_at)
            else:
                outputs += failed(prepared.request, prepared.failure, prepared.arrived_at, self._clock())
        return outputs

    def _launch(self) -> tuple[StepPlan, LaunchedStep] | None:
        plan = self.scheduler.schedule()
        return (plan, self.runner.launch(plan)) if plan.scheduled else None

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        stats = self.scheduler.stats(self.runner.speculation_stats(), self.runner.learning_stats())
        if not len(self._preparing):
            return stats
        return replace(
            stats,
            num_waiting=stats.num_waiting + len(self._preparing),
            num_background_waiting=stats.num_background_waiting + self._preparing.num_background,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError if the scheduler's books do not balance. Cheap enough for every idle moment."""
        self.scheduler.check_integrity()
