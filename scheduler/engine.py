"""The engine: one step schedules, executes and updates."""

from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

from model_runner.contract import Failure, StepPlan
from model_runner.runner_interface import LaunchedStep, Runner
from scheduler.interface import BACKGROUND, ChoiceHistory, ChoiceState, EngineRequest, EngineStats, RequestOutput
from scheduler.request import Progress, failure_of
from scheduler.scheduler import Scheduler

_PATIENCE_S = 0.02
"""Seconds an idle engine waits for a preparation before it checks for new messages."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A request and its preparation."""

    request: EngineRequest
    work: Future[None]
    arrived_at: float

    def failure(self) -> Failure | None:
        """Why preparation failed for a fault of the request, or None. Other errors are raised. `work` must be done."""
        error = self.work.exception()
        if isinstance(error, ValueError):
            return Failure(str(error), by_request=True)
        if error is not None:
            raise error
        return None


class Preparing:
    """Requests that wait for preparation while others run. Each is queued when it is ready."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}  # by request id

    def __len__(self) -> int:
        """The number of choices of all held requests."""
        return sum(len(held.request.choices) for held in self._held.values())

    @property
    def num_background(self) -> int:
        """The number of held choices in background tiers."""
        return sum(len(held.request.choices) for held in self._held.values() if held.request.tier >= BACKGROUND)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def add(self, request: EngineRequest, work: Future[None], now: float) -> None:
        """Hold a request until `work` is done."""
        self._held[request.request_id] = _Held(request, work, now)

    def abort(self, request_id: str, choice: int | None, now: float) -> list[ChoiceHistory]:
        """Drop one choice, or all if `choice` is None. Unknown choices are ignored."""
        held = self._held.get(request_id)
        if held is None:
            return []
        left = tuple(one for one in held.request.choices if choice not in (None, one.index))
        if left:
            self._held[request_id] = replace(held, request=replace(held.request, choices=left))
        else:
            del self._held[request_id]
            held.work.cancel()
        aborted = [one for one in held.request.choices if one not in left]
        return [_history(held.request, one, held.arrived_at, now, has_ended=True) for one in aborted]

    def explain(self, request_id: str, now: float) -> list[ChoiceHistory]:
        """Histories of the choices that are still wanted."""
        held = self._held.get(request_id)
        if held is None:
            return []
        return [_history(held.request, choice, held.arrived_at, now) for choice in held.request.choices]

    def take(self, *, is_idle: bool) -> list[_Held]:
        """Take the requests whose preparation succeeded or failed. If idle, wait briefly for one."""
        if is_idle:
            wait([held.work for held in self._held.values()], _PATIENCE_S, FIRST_COMPLETED)
        done = [held for held in self._held.values() if held.work.done()]
        for held in done:
            del self._held[held.request.request_id]
        return done


def failed(request: EngineRequest, failure: Failure, arrived_at: float, now: float) -> list[RequestOutput]:
    """Final outputs of all choices of a request that failed in preparation."""
    histories = [_history(request, choice, arrived_at, now, has_ended=True) for choice in request.choices]
    return [failure_of(history, request.request_id, failure) for history in histories]


def _history(
    request: EngineRequest, choice: ChoiceState, arrived_at: float, now: float, *, has_ended: bool = False
) -> ChoiceHistory:
    """History of a choice that was never queued."""
    progress = Progress(arrived_at, len(request.prompt), len(choice.output))
    return progress.history(choice.index, len(choice.output), now, has_ended=has_ended)


class Engine:
    """Takes requests, runs them step by step and returns each step's outputs. Use it from one thread only."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        """Times steps with the scheduler's clock."""
        if scheduler.num_blocks != runner.num_blocks:
            raise ValueError(f"the scheduler has {scheduler.num_blocks} KV blocks, the runner {runner.num_blocks}")
        if scheduler.groups != tuple(runner.groups):
            raise ValueError(f"the scheduler has the cache groups {scheduler.groups}, the runner {runner.groups}")
        if scheduler.takes_images != (runner.images is not None):
            raise ValueError("scheduler and runner disagree about images")
        self.scheduler = scheduler
        self.runner = runner
        self._ahead: tuple[StepPlan, LaunchedStep] | None = None
        self._preparing = Preparing()
        self._clock = scheduler.clock

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return self.scheduler.has_work or len(self._preparing) > 0

    def add(self, request: EngineRequest) -> None:
        """Queue all choices of a request once its preparation is done; other requests run meanwhile.

        Raises ValueError, with the values that conflict, if it can never run.
        """
        if request.request_id in self._preparing:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        self.scheduler.check(request)
        work = self.runner.prepare(request.sampling, request.num_drawn)
        if work is None:
            self.scheduler.add(request)
        else:
            self._preparing.add(request, work, self._clock())

    def abort(self, request_id: str, choice: int | None = None) -> list[ChoiceHistory]:
        """End one choice, or all if `choice` is None. Unknown and ended choices are ignored.

        Returns the histories of the choices that ended.
        """
        held = self._preparing.abort(request_id, choice, self._clock())
        return held + self.scheduler.abort(request_id, choice)

    def explain(self, request_id: str) -> list[ChoiceHistory]:
        """Histories of the request's live choices; empty if it is unknown."""
        return self._preparing.explain(request_id, self._clock()) + self.scheduler.explain(request_id)

    def step(self) -> list[RequestOutput]:
        """Compute one batch. Returns at most one output per choice, in admission order.

        If this batch's result cannot affect the next batch, the next one is launched before the result is read. The
        device then computes while the host processes outputs.
        """
        start = self._clock()
        outputs = self._line_up_prepared() if len(self._preparing) else []
        outputs += self.scheduler.line_up_images()
        step, self._ahead = self._ahead or self._launch(), None
        if step is None:
            self.scheduler.wait_for_images(_PATIENCE_S)
            return outputs
        plan, launched = step
        if launched.can_follow and (ahead := self.scheduler.schedule_ahead(plan)) is not None:
            self._ahead = ahead, self.runner.launch(ahead, is_ahead=True)
        result = launched.result()
        self.scheduler.note_seconds(self._clock() - start)
        return outputs + self.scheduler.update(plan, result)

    def _line_up_prepared(self) -> list[RequestOutput]:
        """Queue prepared requests. Returns the final outputs of those that cannot run."""
        outputs: list[RequestOutput] = []
        for held in self._preparing.take(is_idle=not self.scheduler.has_work):
            if (failure := held.failure()) is None:
                self.scheduler.add(held.request, held.arrived_at)
            else:
                outputs += failed(held.request, failure, held.arrived_at, self._clock())
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
        """Raise IntegrityError if the scheduler's accounting is inconsistent. Cheap enough for every idle moment."""
        self.scheduler.check_integrity()
