"""Who computes what in the next step.

One rule, catch up: a running choice has len(tokens) known tokens of which num_computed are computed, and a step gives
it some of the difference. Prefill, chunked prefill, decoding and resumption after preemption are all that rule.

Going through the running choices in admission order serves decoding before prompts: a choice is admitted only with
budget that the others left, which means that they have caught up, so only the newest can be within its prompt.

Drafts of a speculating choice come after that: they take what is left of the budget and of the blocks, and never make
another choice wait for longer than a step. Rejected ones leave nothing behind but blocks that the choice grows into.

Admission reserves blocks for all known tokens, so only growth by decoding can run out of them; the policy's victim
then gives its blocks back and waits with prompt and output. The choice admitted first is never preempted for another
of its priority, so work always completes.
"""

from dataclasses import asdict, dataclass, field, replace

from model_runner.contract import AdmittedRequest, ChoiceResult, Failure, ScheduledRequest, StepPlan, StepResult
from scheduler.block_pool import BlockPool, IntegrityError, blocks_for
from scheduler.config import SchedulerConfig
from scheduler.interface import EngineRequest, EngineStats, FinishReason, RequestOutput
from scheduler.prefix_cache import PrefixCache
from scheduler.queue import WaitingQueue, make_queue
from scheduler.request import Request, check_request, make_choices
from scheduler.sharing import KVSharing, Start
from scheduler.stopping import judge


@dataclass(slots=True)
class _Step:
    """A plan in the making."""

    budget: int
    """Tokens that can still be scheduled."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[AdmittedRequest] = field(default_factory=list)
    shares: dict[str, ScheduledRequest] = field(default_factory=dict)

    def give(self, request: Request, num_tokens: int, new_blocks: tuple[int, ...] = ()) -> None:
        self.shares[request.key] = ScheduledRequest(request.key, num_tokens, new_blocks)
        self.budget -= num_tokens

    def give_drafts(self, request: Request, num_draft: int, new_blocks: tuple[int, ...]) -> None:
        share = self.shares[request.key]
        new_blocks = share.new_blocks + new_blocks
        self.shares[request.key] = replace(share, num_draft=num_draft, new_blocks=new_blocks)
        self.budget -= num_draft

    def take_back(self, request: Request) -> None:
        share = self.shares.pop(request.key, None)
        if share is not None:
            self.budget += share.num_tokens


@dataclass(slots=True)
class _Counters:
    """Totals since the start, by their names in EngineStats."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    scheduled_tokens: int = 0


class Scheduler:
    """Plans steps in counts and block ids. `schedule`, execution and `update` alternate strictly; `add` and `abort`
    may come at any moment between any two calls.
    """

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        limits = (config.block_size, config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len)
        if min(*limits, num_blocks) < 1:
            raise ValueError(f"all limits must be at least 1: {config}, num_blocks={num_blocks}")
        self._config = config
        cache = PrefixCache()
        self._pool = BlockPool(num_blocks, cache)
        self._sharing = KVSharing(cache, config.block_size, config.prefix_caching)
        self._waiting: WaitingQueue = make_queue(config.policy)
        self._running: dict[str, Request] = {}  # by key, in admission order
        self._live: dict[str, dict[int, Request]] = {}  # by request id and choice: the waiting and the running
        self._released: list[str] = []  # keys that the runner still knows, for the next plan that reaches it
        self._num_arrived = 0
        self._counters = _Counters()

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def has_work(self) -> bool:
        """Whether any choice lives."""
        return bool(self._live)

    def add(self, request: EngineRequest) -> None:
        """Line up all choices of a request. Raises ValueError if its id is in use or it can never run."""
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id!r} is already here")
        check_request(request, self._config, self.num_blocks)
        choices = make_choices(request, self._num_arrived, self._config.block_size)
        self._num_arrived += len(choices)
        self._live[request.request_id] = {choice.sampling.choice: choice for choice in choices}
        for choice in choices:
            self._waiting.push(choice)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End one choice, or all. Their blocks are free at once; what is unknown or has ended is left alone."""
        siblings = self._live.get(request_id, {})
        for request in [request for index, request in siblings.items() if choice in (None, index)]:
            if request.key in self._running:
                self._stop_running(request)
            else:
                self._waiting.remove(request)
            self._forget(request)

    def schedule(self) -> StepPlan:
        """Plan the next step. A plan that schedules nothing is empty and need not be executed."""
        step = _Step(self._config.max_num_batched_tokens)
        for request in list(self._running.values()):
            if request.key in self._running:  # not preempted for one before it
                self._continue(request, step)
        for request in self._running.values():
            self._grant_drafts(request, step)
        self._admit_waiting(step)
        if not step.shares:
            return StepPlan((), (), (), ())
        released, self._released = tuple(self._released), []
        scheduled = tuple(step.shares[key] for key in self._running if key in step.shares)
        self._counters.steps += 1
        self._counters.scheduled_tokens += sum(share.num_tokens for share in scheduled)
        return StepPlan(released, tuple(step.copies), tuple(step.admitted), scheduled)

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take in what the plan brought; results of choices that were aborted meanwhile are dropped."""
        outputs = []
        for share, choice in zip(plan.scheduled, result.choices, strict=True):
            if share.key != choice.key:
                raise IntegrityError(f"the runner answered for {choice.key!r} in place of {share.key!r}")
            request = self._running.get(share.key)
            if request is not None:
                outputs += self._advance(request, share.num_tokens, choice)
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_usage=self._pool.num_used / self.num_blocks,
            **asdict(self._counters),
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block and every choice is accounted for."""
        self._pool.check_integrity([request.blocks for request in self._running.values()])
        num_live = sum(map(len, self._live.values()))
        if num_live != len(self._running) + len(self._waiting):
            raise IntegrityError(f"{num_live} live != {len(self._running)} running + {len(self._waiting)} waiting")
        for request in self._running.values():
            covered = len(request.blocks) * self._config.block_size
            if not request.num_computed <= covered or request.remaining < 1:
                raise IntegrityError(
                    f"{request.key!r} has {request.num_computed} of {len(request.tokens)} tokens computed, "
                    f"its blocks cover {covered}"
                )

    # -- one step ------------------------------------------------------------------------------------------------------

    def _continue(self, request: Request, step: _Step) -> None:
        """Schedule a running choice, or preempt it where blocks run out and it is the policy's choice to go."""
        num_tokens = min(request.remaining, step.budget)
        if num_tokens == 0:
            return
        num_new = self._blocks_for(request.num_computed + num_tokens) - len(request.blocks)
        while not self._pool.can_allocate(num_new):
            victim = self._waiting.victim(self._running)
            self._preempt(victim, step)
            if victim is request:
                return
        new_blocks = self._pool.allocate(num_new)
        request.blocks += new_blocks
        step.give(request, num_tokens, tuple(new_blocks))

    def _grant_drafts(self, request: Request, step: _Step) -> None:
        """Give a decoding choice room for its drafts, as far as budget and free blocks go.

        The output that is left to it bounds them, so they stay within the blocks and positions that it may ever use.
        """
        share = step.shares.get(request.key)
        if share is None or request.num_computed + share.num_tokens < len(request.tokens):
            return
        wanted = min(request.num_draft, step.budget, request.max_tokens - request.num_output - 1)
        free = self.num_blocks - self._pool.num_used
        covered = (len(request.blocks) + free) * self._config.block_size
        num_draft = min(wanted, covered - len(request.tokens))
        if num_draft <= 0:
            return
        new_blocks = self._pool.allocate(
            max(self._blocks_for(len(request.tokens) + num_draft) - len(request.blocks), 0)
        )
        request.blocks += new_blocks
        step.give_drafts(request, num_draft, tuple(new_blocks))

    def _admit_waiting(self, step: _Step) -> None:
        """Admit from the head of the queue for as long as it fits."""
        while self._waiting and step.budget and len(self._running) < self._config.max_num_seqs:
            request = self._waiting.peek()
            siblings = [other for other in self._live[request.request_id].values() if other.key in self._running]
            start = self._sharing.find_start(request, siblings)
            if start is None:
                return
            num_new = self._blocks_for(len(request.tokens)) - len(start.shared)
            if not self._pool.can_allocate(num_new, sharing=start.shared):
                return
            self._waiting.pop()
            self._pool.share(start.shared)
            self._admit(request, start, self._pool.allocate(num_new), step)

    def _admit(self, request: Request, start: Start, new_blocks: list[int], step: _Step) -> None:
        if start.copied is not None:
            step.copies.append((start.copied, new_blocks[0]))
        request.blocks = [*start.shared, *new_blocks]
        request.num_computed = start.num_computed
        if request.num_cached is None:
            request.num_cached = start.num_cached
            self._counters.prefix_queries += start.num_looked_up
            self._counters.prefix_hits += min(start.num_cached, start.num_looked_up)  # a fork looks nothing up
        self._running[request.key] = request
        step.admitted.append(
            AdmittedRequest(
                key=request.key,
                tokens=tuple(request.tokens),
                num_prompt=request.num_prompt,
                num_computed=request.num_computed,
                blocks=tuple(request.blocks),
                sampling=request.sampling,
                speculation=request.speculation,
                cache_salt=request.cache_salt,
                sampler_state=request.sampler_state,
            )
        )
        step.give(request, min(request.remaining, step.budget))

    def _preempt(self, request: Request, step: _Step) -> None:
        self._stop_running(request)
        request.start_over()
        step.take_back(request)
        self._waiting.requeue(request)
        self._counters.preemptions += 1

    # -- after a step --------------------------------------------------------------------------------------------------

    def _advance(self, request: Request, num_tokens: int, choice: ChoiceResult) -> list[RequestOutput]:
        """Book one choice's share of a step; no output while its prompt is being computed."""
        if choice.error is not None:
            return [self._fail(request, choice.error)]
        request.num_computed += num_tokens
        request.num_draft = choice.num_draft
        request.prompt_logprobs += choice.prompt_logprobs
        if bool(choice.tokens) == (request.remaining > 0):
            raise IntegrityError(f"{request.key!r} got {len(choice.tokens)} tokens with {request.remaining} to compute")
        if not choice.tokens:
            self._sharing.publish(request)
            return []
        verdict = judge(request, choice.tokens)
        request.tokens += choice.tokens[: verdict.num_kept]
        request.sampler_state = choice.sampler_state
        request.num_computed = min(request.num_computed + len(choice.tokens) - 1, len(request.tokens))
        self._sharing.publish(request)
        if verdict.reason is not None:
            self._stop_running(request)
            self._forget(request)
        num_accepted = min(choice.num_accepted, verdict.num_kept)  # drafts come first among the tokens
        return [
            RequestOutput(
                request_id=request.request_id,
                choice=request.sampling.choice,
                tokens=choice.tokens[: verdict.num_kept],
                logprobs=choice.logprobs[: verdict.num_kept],
                prompt_logprobs=request.take_prompt_logprobs(),
                num_cached_tokens=request.num_cached or 0,
                finish_reason=verdict.reason,
                stop_token_id=verdict.stop_token_id,
                num_accepted=num_accepted,
                num_rejected=choice.num_accepted + choice.num_rejected - num_accepted,
                sampler_state=choice.sampler_state,
            )
        ]

    def _fail(self, request: Request, error: Failure) -> RequestOutput:
        """End a choice whose computation went wrong, and let nobody find its blocks: they may be the cause."""
        self._sharing.withdraw(request)
        self._stop_running(request)
        self._forget(request)
        return RequestOutput(
            request.request_id, request.sampling.choice, (), finish_reason=FinishReason.ERROR, error=error
        )

    def _stop_running(self, request: Request) -> None:
        del self._running[request.key]
        self._pool.release(request.blocks)
        self._released.append(request.key)

    def _forget(self, request: Request) -> None:
        siblings = self._live[request.request_id]
        del siblings[request.sampling.choice]
        if not siblings:
            del self._live[request.request_id]

    def _blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self._config.block_size)
