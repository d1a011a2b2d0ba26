"""Live choices of all requests except beam searches."""

from collections.abc import Mapping, Sequence

from model_runner.contract import ChoiceResult, Failure, ScheduledRequest
from scheduler.block_pool import IntegrityError
from scheduler.history import ChoiceHistory
from scheduler.interface import RequestOutput
from scheduler.request import Request, check_stop, failure_of, output_of
from scheduler.run_state import RunState
from scheduler.sharing import KVSharing


class Choices:
    """Applies step results to live choices and their guides, and removes those that end."""

    def __init__(self, run_state: RunState, sharing: KVSharing) -> None:
        self._run_state = run_state
        self._sharing = sharing
        self._live: dict[str, dict[int, Request]] = {}  # by request id and index

    def __len__(self) -> int:
        """Number of requests with live choices."""
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def members(self) -> list[Sequence[Request]]:
        """The group of each live choice: the choice itself and, with guidance, its guide."""
        return [choice.members for siblings in self._live.values() for choice in siblings.values()]

    def running_siblings(self, request: Request) -> list[Request]:
        """Running choices of the same request, which therefore have the same prompt."""
        siblings = self._live.get(request.request_id, {}).values() if request.guides is None else ()
        return [other for other in siblings if other.key in self._run_state.running]

    def add(self, choices: Sequence[Request]) -> None:
        """Track all choices of a request. They must already be in the waiting queue."""
        self._live[choices[0].request_id] = {choice.sampling.choice: choice for choice in choices}

    def abort(self, request_id: str, choice: int | None, now: float) -> list[ChoiceHistory]:
        """End one choice, or all if `choice` is None. Unknown and ended choices are ignored."""
        siblings = self._live.get(request_id, {})
        aborted = [request for index, request in siblings.items() if choice in (None, index)]
        for request in aborted:
            self._end(request)
        return [request.history(now, has_ended=True) for request in aborted]

    def explain(self, request_id: str, now: float) -> list[ChoiceHistory]:
        """Histories of the request's live choices."""
        return [request.history(now) for request in self._live.get(request_id, {}).values()]

    def advance(
        self, scheduled: Sequence[ScheduledRequest], results: Mapping[str, ChoiceResult], now: float
    ) -> list[RequestOutput]:
        """Apply a step's results (by key) to the running choices. `num_computed` must already include the step."""
        outputs = []
        for share in scheduled:
            request = self._run_state.running.get(share.key)
            if request is not None and request.request_id in self._live and request.guides is None:
                outputs += self._advance(request, share, results[share.key], now)
        return outputs

    def fail(self, request: Request, error: Failure, now: float) -> list[RequestOutput]:
        """End a choice whose computation failed, and remove its blocks from the prefix cache: they may be the cause."""
        self._sharing.unpublish(request.members)
        self._end(request)
        return [failure_of(request.history(now, has_ended=True), request.request_id, error)]

    def _advance(
        self, request: Request, share: ScheduledRequest, choice: ChoiceResult, now: float
    ) -> list[RequestOutput]:
        """Returns no output while the prompt is being computed, or if the step only found candidates."""
        if choice.error is not None:
            return self.fail(request, choice.error, now)
        request.num_draft, request.num_candidates = choice.num_draft, choice.num_candidates
        looks_only = request.sampling.num_candidates > 0 and share.num_candidates == 0
        if bool(choice.tokens or choice.pooled) == (request.remaining > 0 or looks_only):
            raise IntegrityError(f"{request.key!r} got {len(choice.tokens)} tokens with {request.remaining} to compute")
        if request.remaining > 0:
            self._sharing.publish(request.members)
            return []
        stop = check_stop(request, choice.tokens)
        request.sampler_state = choice.sampler_state
        num_beyond = 0 if choice.pooled else len(choice.tokens) - 1
        for member in request.members:
            member.tokens.extend(choice.tokens[: stop.num_kept])
            member.num_computed = min(member.num_computed + num_beyond, len(member.tokens))
        self._sharing.publish(request.members)
        if stop.reason is not None:
            self._end(request)
        elif looks_only:
            return []
        if request.progress.is_prefilling and stop.num_kept:
            request.progress.note_token(now)
        return [output_of(request, choice, stop, now)]

    def _end(self, request: Request) -> None:
        self._run_state.end(request.members)
        siblings = self._live[request.request_id]
        del siblings[request.sampling.choice]
        if not siblings:
            del self._live[request.request_id]
