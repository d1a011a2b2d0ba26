"""The loop's body: schedule, execute, update."""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

from model_runner.contract import Failure, StepPlan
from model_runner.runner_interface import LaunchedStep, Runner
from scheduler.history import ChoiceHistory, Progress
from scheduler.interface import BACKGROUND, ChoiceState, EngineRequest, EngineStats, RequestOutput
from scheduler.request import failure_of
from scheduler.scheduler import Scheduler

_PATIENCE_S = 0.02
"""For so long nobody looks for new messages while there is nothing else to do."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request for which all was done that could be."""

    request: EngineRequest
    arrived_at: float
    failure: Failure | None
    """Why it cannot run, if it cannot."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A request with what is done for it."""

    request: EngineRequest
    work: Future[None]
    arrived_at: float


class Preparing:
    """Holds them back while others are computed. They arrive when they are ready, so one may pass another."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}  # by request id

    def __len__(self) -> int:
        """How many choices they have."""
        return sum(len(held.request.choices) for held in self._held.values())

    @property
    def num_background(self) -> int:
        """Those that only get the room that others leave."""
        return sum(len(held.request.choices) for held in self._held.values() if held.request.tier >= BACKGROUND)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def add(self, request: EngineRequest, work: Future[None], now: float) -> None:
        """Hold a request back until this is done."""
        self._held[request.request_id] = _Held(request, work, now)

    def abort(self, request_id: str, choice: int | None, now: float) -> list[ChoiceHistory]:
        """Want one choice no longer, or all; what is not here is left alone."""
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
        """Of the choices that are wanted."""
        held = self._held.get(request_id)
        if held is None:
            return []
        return [_history(held.request, choice, held.arrived_at, now) for choice in held.request.choices]

    def take(self, *, is_idle: bool) -> Sequence[Prepared]:
        """Those that are ready, or can never be; when there is nothing else to do, waits a moment for one."""
        if is_idle:
            wait([held.work for held in self._held.values()], _PATIENCE_S, FIRST_COMPLETED)
        done = [held for held in self._held.values() if held.work.done()]
        for held in done:
            del self._held[held.request.request_id]
        return [Prepared(held.request, held.arrived_at, _failure_of(held.work)) for held in done]


def failed(request: EngineRequest, failure: Failure, arrived_at: float, now: float) -> list[RequestOutput]:
    """The end of all its choices."""
    histories = [_history(request, choice, arrived_at, now, has_ended=True) for choice in request.choices]
    return [failure_of(history, request.request_id, failure) for history in histories]


def _history(
    request: EngineRequest, choice: ChoiceState, arrived_at: float, now: float, *, has_ended: bool = False
) -> ChoiceHistory:
    """Of a choice that never got into the queue."""
    progress = Progress(arrived_at, len(request.prompt), len(choice.output))
    return progress.history(choice.index, len(choice.output), now, has_ended=has_ended)


def _failure_of(work: Future[None]) -> Failure | None:
    """Why the request cannot run, if its preparation, which is done, has found that. Other errors are raised."""
    error = work.exception()
    if isinstance(error, ValueError):
        return Failure(str(error), by_request=True)
    if error is not None:
        raise error
    return None


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
