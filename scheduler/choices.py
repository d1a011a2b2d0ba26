"""Live choices and beam searches: what a step's results bring them, and when they end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from model_runner.contract import (
    BeamCandidate,
    ChoiceResult,
    Failure,
    SamplingParams,
    ScheduledRequest,
    TokenLogprobs,
    excluding_fields,
)
from scheduler.beam_search import BeamSearcher, Continuation, Finished, Rules
from scheduler.block_pool import IntegrityError
from scheduler.interface import (
    BeamScore,
    BeamSearch,
    ChoiceHistory,
    ChoiceState,
    EngineRequest,
    FinishReason,
    RequestOutput,
    WatchText,
)
from scheduler.request import Request, chain_of, check_stop, failure_of, output_of
from scheduler.run_state import RunState
from scheduler.sharing import KVSharing

_TOO_FEW: Final = "beam search found only {found} of {wanted} sequences with these settings"


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


class Guided:
    """A choice and its guide, which has a different prompt and the same output."""

    width = 2

    def __init__(self, choice: Request, prompt: Sequence[int], block_size: int) -> None:
        """`prompt` is the guide's prompt."""
        sampling = SamplingParams()
        guide = Request(
            key=f"{choice.key}/guide",
            request_id=choice.request_id,
            arrival=choice.arrival,
            sampling=sampling,
            max_tokens=choice.max_tokens,
            priority=choice.priority,
            tier=choice.tier,
            client=choice.client,
            weight=choice.weight,
            cache_salt=choice.cache_salt,
            tokens=[*prompt, *choice.tokens[choice.num_prompt :]],
            num_prompt=len(prompt),
            chain=chain_of(choice.cache_salt, sampling, block_size),
            progress=choice.progress,
            group=self,
            guides=choice.key,
        )
        self.members = [choice, guide]


@dataclass(frozen=True, slots=True)
class Advance:
    """The result of one step of a beam search."""

    outputs: list[RequestOutput]
    dropped: list[Request]
    """Members that no beam extends. All members if the search has ended."""


def search_from_start(request: EngineRequest) -> EngineRequest:
    """The same request as a fresh search. An interrupted search restarts and finds the same sequences.

    Prompt logprobs are requested only if choice 0 has no output yet, because they come with its first output.
    """
    is_new = request.choices[0].index == 0 and not any(choice.output for choice in request.choices)
    prompt_logprobs = request.sampling.prompt_logprobs if is_new else None
    sampling = replace(request.sampling, prompt_logprobs=prompt_logprobs)
    return replace(request, sampling=sampling, choices=(ChoiceState(0),))


class BeamMembers:
    """The beams of one request: first a single member for the prompt, then one member for each beam.

    After each step, a member continues with the first beam that extends it; further beams are forks of it. Tokens are
    streamed as soon as all sequences that may still be the answer agree on them.
    """

    def __init__(self, request: EngineRequest, search: BeamSearch, watch: WatchText | None, prompt: Request) -> None:
        """`prompt` is the request that computes the prompt; it becomes the first member."""
        rules = Rules(search, request.sampling.stop_token_ids, request.max_tokens)
        prompt.sampling = replace(prompt.sampling, beam_candidates=rules.num_candidates)
        prompt.group = self
        self.width = search.width
        self.members = [prompt]
        self._progress = prompt.progress
        self.open = [choice.index for choice in request.choices]
        """Choices that still need output. Choice i is the sequence with rank i, counted from the best."""
        self.request_id = request.request_id
        names = excluding_fields(request.sampling)
        self._blamed = f": {names}" if names else ""
        """Suffix of the error for missing sequences; names the other settings that can cause it."""
        self._searcher = BeamSearcher(rules, watch(request) if search.stop and watch is not None else None)
        self._num_shown = 0
        self._num_sent = max(len(choice.output) for choice in request.choices)
        """Number of tokens sent before the request was resumed."""
        self._num_made = 0
        self._num_drawn = 0
        """Tokens drawn, one per member and step, for the fair queue."""
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def advance(self, offers: Sequence[Sequence[BeamCandidate]], now: float) -> Advance:
        """Advance the search by one token with each member's candidates."""
        first = self.members[0]
        self._num_drawn += len(offers)
        if self._progress.is_prefilling:
            self._progress.note_token(now)
        self._prompt_logprobs += first.take_prompt_logprobs()
        num_cached, num_written = first.num_cached or 0, first.num_written
        continuations = self._searcher.advance(offers)
        dropped = self._go_on(continuations)
        outputs = self._shared_outputs() if continuations else self._last_outputs(now)
        return Advance(
            [replace(output, num_cached_tokens=num_cached, num_written_tokens=num_written) for output in outputs],
            dropped,
        )

    def fail(self, error: Failure, now: float) -> list[RequestOutput]:
        """The final output of all choices after a failure."""
        return [self._failure(choice, error, now) for choice in self.open]

    def history(self, choice: int, now: float, *, has_ended: bool = False) -> ChoiceHistory:
        """History of the search, reported for one of its choices."""
        return self._progress.history(choice, self._num_shown, now, has_ended=has_ended)

    def _go_on(self, continuations: Sequence[Continuation]) -> list[Request]:
        """Make the continuations the new members. Returns old members that none of them extends."""
        old, self.members = self.members, []
        extended: set[int] = set()
        for continuation in continuations:
            parent = old[continuation.row]
            if continuation.row not in extended:
                extended.add(continuation.row)
                parent.tokens.append(continuation.token_id)
                parent.chosen = continuation.token_id
                self.members.append(parent)
            else:
                self._num_made += 1
                self.members.append(parent.fork(f"{self.request_id}/beam-{self._num_made}", continuation.token_id))
        return [member for row, member in enumerate(old) if row not in extended]

    def _shared_outputs(self) -> list[RequestOutput]:
        common = self._searcher.common(self._num_shown)
        return self._outputs_of_all(tuple(common.tokens), tuple(common.reports))

    def _outputs_of_all(self, tokens: tuple[int, ...], reports: tuple[TokenLogprobs, ...]) -> list[RequestOutput]:
        """Output the next tokens that all sequences share, except tokens already sent before a restart.

        If there are none, one empty output still reports the drawn tokens, so that usage is charged before an early
        abort.
        """
        again = max(0, min(len(tokens), self._num_sent - self._num_shown))
        self._num_shown += len(tokens)
        if again == len(tokens):
            return [self._output(self.open[0])]
        return [self._output(choice, tokens=tokens[again:], logprobs=reports[again:]) for choice in self.open]

    def _last_outputs(self, now: float) -> list[RequestOutput]:
        found = self._searcher.finished()
        return [
            self._end(choice, found[choice], now) if choice < len(found) else self._missing(choice, len(found), now)
            for choice in self.open
        ]

    def _end(self, choice: int, ended: Finished, now: float) -> RequestOutput:
        shown = max(self._num_shown, self._num_sent)
        return self._output(
            choice,
            tokens=tuple(ended.beam.tokens[shown:]),
            logprobs=tuple(ended.beam.reports[shown:]),
            finish_reason=ended.reason,
            stop_token_id=ended.stop_token_id,
            beam=BeamScore(ended.score, ended.beam.logprob),
            history=self._progress.history(choice, len(ended.beam.tokens), now, has_ended=True),
        )

    def _missing(self, choice: int, found: int, now: float) -> RequestOutput:
        message = _TOO_FEW.format(found=found, wanted=max(self.open) + 1) + self._blamed
        return self._failure(choice, Failure(message, by_request=True), now)

    def _failure(self, choice: int, error: Failure, now: float) -> RequestOutput:
        history = self.history(choice, now, has_ended=True)
        return self._output(choice, finish_reason=FinishReason.ERROR, error=error, history=history)

    def _output(self, choice: int, tokens: tuple[int, ...] = (), **more: Any) -> RequestOutput:
        """Build an output for `choice`. The first output of choice 0 carries the prompt logprobs."""
        reports: tuple[TokenLogprobs, ...] = ()
        if choice == 0:
            reports, self._prompt_logprobs = self._prompt_logprobs, ()
        return RequestOutput(
            self.request_id, choice, tokens, prompt_logprobs=reports, beam_tokens=self._num_drawn, **more
        )


class Searches:
    """Advances beam searches whose members have all caught up, and removes searches that end."""

    def __init__(self, run_state: RunState, sharing: KVSharing) -> None:
        self._run_state = run_state
        self._sharing = sharing
        self._searches: dict[str, BeamMembers] = {}  # by request id

    def __len__(self) -> int:
        return len(self._searches)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._searches

    @property
    def members(self) -> list[Sequence[Request]]:
        """The members of each search."""
        return [search.members for search in self._searches.values()]

    def add(self, search: BeamMembers) -> None:
        """Track a search. Its first member must already be in the waiting queue."""
        self._searches[search.request_id] = search

    def abort(self, request_id: str, choice: int | None, now: float) -> list[ChoiceHistory]:
        """Drop one choice, or all if `choice` is None. Unknown and ended choices are ignored."""
        search = self._searches.get(request_id)
        if search is None:
            return []
        aborted = [index for index in search.open if choice in (None, index)]
        search.open = [index for index in search.open if index not in aborted]
        if not search.open:
            self._end(search)
        return [search.history(index, now, has_ended=True) for index in aborted]

    def explain(self, request_id: str, now: float) -> list[ChoiceHistory]:
        """Histories of the choices that still need output."""
        search = self._searches.get(request_id)
        return [] if search is None else [search.history(index, now) for index in search.open]

    def advance(self, results: Mapping[str, ChoiceResult], now: float) -> list[RequestOutput]:
        """Apply a step's results (by key) to the searches. `num_computed` must already include the step."""
        return [output for search in list(self._searches.values()) for output in self._advance(search, results, now)]

    def fail(self, member: Request, error: Failure, now: float) -> list[RequestOutput]:
        """End a search whose computation failed, and remove its blocks from the prefix cache: they may be the cause."""
        search = self._searches[member.request_id]
        self._sharing.unpublish(search.members)
        self._end(search)
        return search.fail(error, now)

    def _advance(self, search: BeamMembers, results: Mapping[str, ChoiceResult], now: float) -> list[RequestOutput]:
        of_search = [results[member.key] for member in search.members if member.key in results]
        error = next((result.error for result in of_search if result.error is not None), None)
        if error is not None:
            return self.fail(search.members[0], error, now)
        self._sharing.publish(search.members)
        if any(member.remaining for member in search.members):
            return []
        advance = search.advance([result.beam_candidates for result in of_search], now)
        for member in advance.dropped:
            self._run_state.stop(member)
        if not search.members:
            del self._searches[search.request_id]
        return advance.outputs

    def _end(self, search: BeamMembers) -> None:
        self._run_state.end(search.members)
        del self._searches[search.request_id]
