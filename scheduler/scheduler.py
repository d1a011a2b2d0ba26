"""The scheduler: decides who computes what in the next step.

One rule, catch up: a running choice has len(tokens) known tokens of which num_computed are computed, and a step gives
it some of the difference. Prefill, chunked prefill, decoding and resumption after preemption are all this rule.

Running choices are served in admission order, which puts decoding before prompts: a choice is admitted only with
budget that the others left, so they have caught up, and only the newest can still be in its prompt.

Drafts for speculation come next. They use the remaining budget and blocks, and never delay another choice by more than
one step. Rejected drafts leave only blocks behind, which the choice grows into.

Candidates of contrastive search are not optional like drafts. If the budget cannot hold all of them, the choice waits
for the next step; if the blocks cannot, it preempts like any growing choice. Its last token is computed together with
the candidates that this token proposed, so a step without candidates leaves the last token uncomputed.

Admission reserves blocks for all known tokens, so only decoding can run out of blocks. The policy's victim then
releases its blocks and waits with its prompt and output. The oldest choice of a priority is never preempted for another
of the same priority, so work always completes.

If device or host memory runs out in a step, the whole step is discarded. Its largest choice goes back to the queue,
unless it ranks first. Steps are smaller for a while, down to the least with which the first choice makes progress. If
memory runs out even then, that choice fails (see step_size.py).

The beams of a search are a group, and so are a choice and its guide. Members are admitted when all of them fit, are
preempted together, and run in lockstep: the last known tokens of all members are computed in the same step.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from model_runner.contract import (
    AdmittedRequest,
    BlockCopy,
    CacheGroup,
    ChoiceResult,
    Failure,
    PlacedBlock,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from model_runner.runner_interface import ImageFeatures, LearningStats, SpeculationStats
from model_runner.shared_list import SharedList
from scheduler.block_groups import BlockGroups, Growth, ReusedKV
from scheduler.block_pool import IntegrityError
from scheduler.checks import check_request
from scheduler.choices import BeamMembers, Choices, Guided, Searches, search_from_start
from scheduler.image_queue import ImageQueue
from scheduler.interface import ChoiceHistory, EngineRequest, EngineStats, RequestOutput, SchedulerConfig, WatchText
from scheduler.prefix_cache import CacheLog
from scheduler.request import Request, make_choices
from scheduler.run_state import Counters, RunState, check_accounting
from scheduler.sharing import KVSharing
from scheduler.step_size import (
    OUT_OF_MEMORY,
    BackgroundBudget,
    OthersLoad,
    StepLimit,
    begins_no_span,
    least_share,
    least_to_begin,
    lockstep,
    split_budget,
)
from scheduler.waiting_queue import make_queue


@dataclass(slots=True)
class Step:
    """A step plan under construction."""

    budget: int
    """Tokens that can still be scheduled."""
    copies: list[BlockCopy] = field(default_factory=list)
    admitted: list[AdmittedRequest] = field(default_factory=list)
    shares: dict[str, ScheduledRequest] = field(default_factory=dict)

    def give(
        self,
        request: Request,
        num_tokens: int,
        new_blocks: tuple[int, ...] = (),
        placed: tuple[PlacedBlock, ...] = (),
    ) -> None:
        """Schedule `num_tokens` tokens and the request's candidates. Its blocks must have room for both."""
        self.shares[request.key] = share = ScheduledRequest(
            key=request.key,
            num_tokens=num_tokens,
            new_blocks=new_blocks,
            num_candidates=request.num_candidates,
            chosen=request.take_chosen(),
            placed=placed,
        )
        self.budget -= share.num_rows

    def give_decode(self, request: Request) -> None:
        """Schedule one token of a request that `only_decodes`, within its existing blocks."""
        self.shares[request.key] = request.decode_share
        self.budget -= 1

    def give_drafts(
        self, request: Request, num_draft: int, new_blocks: tuple[int, ...], placed: tuple[PlacedBlock, ...]
    ) -> None:
        """Add drafts to the request's share."""
        share = self.shares[request.key]
        new_blocks, placed = share.new_blocks + new_blocks, share.placed + placed
        self.shares[request.key] = replace(share, num_draft=num_draft, new_blocks=new_blocks, placed=placed)
        self.budget -= num_draft

    def admit(
        self, request: Request, num_tokens: int, placed: tuple[PlacedBlock, ...], forked_from: str | None
    ) -> None:
        """Admit a request that has its blocks. With `num_tokens` 0 it computes nothing in this step."""
        request.chosen = None
        self.admitted.append(
            AdmittedRequest(
                key=request.key,
                tokens=request.tokens.fork() if isinstance(request.tokens, SharedList) else tuple(request.tokens),
                num_prompt=request.num_prompt,
                num_computed=request.num_computed,
                blocks=tuple(request.blocks),
                sampling=request.sampling,
                speculation=request.speculation,
                guides=request.guides,
                cache_salt=request.cache_salt,
                learn=request.learn,
                sampler_state=request.sampler_state,
                forked_from=forked_from,
                placed=placed,
                images=request.images,
            )
        )
        if num_tokens:
            self.give(request, num_tokens)

    def load(self) -> OthersLoad:
        """The work scheduled so far."""
        shares = self.shares.values()
        only_decodes = not self.admitted and all(share.num_tokens == 1 for share in shares)
        return OthersLoad(sum(share.num_rows for share in shares), only_decodes)

    def take_back(self, requests: Sequence[Request]) -> set[str]:
        """Remove preempted requests from the plan, before their blocks are released.

        Returns:
            Keys of requests that only this plan admitted; the runner never learns about them.
        """
        keys = {request.key for request in requests}
        blocks = {(0, block) for request in requests for block in request.blocks}
        for request in requests:
            for group, held in enumerate(request.group_blocks, 1):
                blocks.update((group, block) for block in held.values())
        for key in keys & self.shares.keys():
            self.budget += self.shares.pop(key).num_rows
        not_yet_sent = {admitted.key for admitted in self.admitted if admitted.key in keys}
        self.admitted = [admitted for admitted in self.admitted if admitted.key not in keys]
        self.copies = [copy for copy in self.copies if (copy.group, copy.destination) not in blocks]
        return not_yet_sent


def independent_decodes(plan: StepPlan, running: Iterable[Request]) -> list[Request] | None:
    """The requests that decode one token in the next step, whatever this step brings, in admission order.

    Choices that reach their length limit in this step are excluded. Choices that turn out to end with a stop token
    compute one token in vain.

    Args:
        plan: the step that is being computed.
        running: all running choices in admission order.

    Returns:
        None if the next step depends on this step's result. That is so if a choice is in its prompt, has drafts or
        candidates to verify, or is in a group, whose members wait for each other.
    """
    shares = {share.key: share for share in plan.scheduled}
    decoding = []
    for request in running:
        share = shares.get(request.key)
        if share is None or not _decodes_one_token(request, share):
            return None
        if request.num_output + 1 < request.max_tokens:
            decoding.append(request)
    return decoding


def plan_ahead(decoding: Sequence[Request], blocks: BlockGroups) -> StepPlan | None:
    """Plan a step that computes each request's next token, which is still unknown. None if there are too few blocks."""
    growths = [blocks.to_continue(request, len(request.tokens) + 1 - request.num_computed) for request in decoding]
    if not blocks.can_grow(growths):
        return None
    shares = []
    for request, growth in zip(decoding, growths, strict=True):
        new_blocks, placed = blocks.grow(request, growth)
        shares.append(ScheduledRequest(request.key, 1, new_blocks, placed=placed))
    return StepPlan((), (), (), tuple(shares))


def _decodes_one_token(request: Request, share: ScheduledRequest) -> bool:
    if request.group is not None or request.sampling.num_candidates or request.num_draft or share.num_draft:
        return False
    return share.num_tokens == request.remaining


class Scheduler:
    """Plans steps in counts and block ids.

    `schedule`, execution and `update` alternate strictly; `add` and `abort` may be called between any two calls.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        watch_text: WatchText | None = None,
        cache_log: CacheLog | None = None,
        clock: Callable[[], float] = time.perf_counter,
        groups: Sequence[CacheGroup] = (),
        images: ImageFeatures | None = None,
    ) -> None:
        """Beam search with stop strings needs `watch_text`. `clock` returns seconds and times the histories.

        `groups` are the runner's cache groups, and `images` its features of images.
        """
        limits = (config.block_size, config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len)
        if min(*limits, num_blocks) < 1:
            raise ValueError(f"all limits must be at least 1: {config}, num_blocks={num_blocks}")
        self.clock = clock
        self._config = config
        self._blocks = BlockGroups(num_blocks, config.block_size, groups, config.snapshot_every, cache_log)
        self.groups = tuple(groups)
        self._sharing = KVSharing(self._blocks, config.block_size, config.prefix_caching)
        self._waiting = make_queue(config.policy)
        self._counts_service = config.policy == "fair"  # other policies ignore service
        self.takes_images = images is not None
        self._images = ImageQueue(images)
        self._run_state = RunState(self._waiting, self._blocks, config.max_num_seqs, self._images)
        self._running = self._run_state.running
        self._limit = StepLimit(config.max_num_batched_tokens, self._waiting.rank)
        self._choices = Choices(self._run_state, self._sharing)
        self._searches = Searches(self._run_state, self._sharing)
        self._watch_text = watch_text
        self._num_arrived = 0
        self._counters = Counters()
        self._background_budget = BackgroundBudget(config.max_num_batched_tokens)
        self._others: OthersLoad | None = None
        """Foreground work of the last step, or None if no background work was running or next in the queue."""
        self._num_added = 0
        """Background rows added to the last step."""

    @property
    def num_blocks(self) -> int:
        return self._blocks.own.num_blocks

    @property
    def has_work(self) -> bool:
        """Whether any choice is live."""
        return bool(self._choices or self._searches)

    def check(self, request: EngineRequest) -> None:
        """Raise ValueError if the request id is in use or the request can never run."""
        if request.request_id in self._choices or request.request_id in self._searches:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        check_request(request, self._config, self.num_blocks, self.groups, takes_images=self.takes_images)
        if request.beam_search is not None and request.beam_search.stop and self._watch_text is None:
            raise ValueError(f"request {request.request_id!r} has stop strings, but this scheduler has no text watch")

    def add(self, request: EngineRequest, arrived_at: float | None = None) -> None:
        """Queue all choices of a request that arrived at `arrived_at`, by default now. Raises like `check`."""
        self.check(request)
        arrived_at = self.clock() if arrived_at is None else arrived_at
        if request.beam_search is not None:
            (beam,) = self._line_up(search_from_start(request), arrived_at)
            self._searches.add(BeamMembers(request, request.beam_search, self._watch_text, beam))
        else:
            self._choices.add(self._line_up(request, arrived_at))

    def _line_up(self, request: EngineRequest, arrived_at: float) -> list[Request]:
        config = self._config
        choices = make_choices(
            request, self._num_arrived, arrived_at, config.block_size, sees_images=config.sees_images
        )
        self._num_arrived += len(choices)
        for choice in choices:
            if request.guide:
                choice.group = Guided(choice, request.guide, self._config.block_size)
            self._waiting.push(choice)
        return choices

    def abort(self, request_id: str, choice: int | None = None) -> list[ChoiceHistory]:
        """End one choice, or all if `choice` is None, and free the blocks at once. Ignores unknown and ended choices.

        Returns the histories of the choices that ended.
        """
        now = self.clock()
        return self._choices.abort(request_id, choice, now) + self._searches.abort(request_id, choice, now)

    def explain(self, request_id: str) -> list[ChoiceHistory]:
        """Histories of the request's live choices; empty if it is unknown."""
        now = self.clock()
        return self._choices.explain(request_id, now) + self._searches.explain(request_id, now)

    def line_up_images(self) -> list[RequestOutput]:
        """Queue the choices for which features of images were computed. Returns the outputs of those that failed."""
        if not self.takes_images:
            return []
        ready, failed = self._images.take()
        for head in ready:
            self._waiting.requeue(head)
        outputs: list[RequestOutput] = []
        for head, failure in failed:
            self._waiting.requeue(head)
            outputs += self._fail(head, failure, self.clock())
        return outputs

    def wait_for_images(self, timeout_s: float) -> None:
        """If choices wait for features of images, wait for some to be computed, but no longer than this."""
        if self._images:
            self._images.wait(timeout_s)

    def schedule(self) -> StepPlan:
        """Plan the next step. A plan that schedules nothing is empty and need not be executed."""
        step, others = Step(self._limit.budget(self._running, self._waiting)), list(self._running.values())
        background = [request for request in others if request.is_background]
        if background:
            others = [request for request in others if not request.is_background]
        self._fill(step, others)
        self._others = None
        if background or (self._waiting and self._waiting.peek().is_background):
            self._others = step.load()
            most = self._background_budget.num_tokens(self._others, self._least_background(background))
            step.budget = min(step.budget, most)
            self._fill(step, background, is_background=True)
        if not step.shares:
            return StepPlan((), (), (), ())
        scheduled = tuple(step.shares[key] for key in self._running if key in step.shares)
        self._num_added = 0 if self._others is None else step.load().num_rows - self._others.num_rows
        self._counters.count_step(sum(share.num_tokens for share in scheduled))
        return StepPlan(self._run_state.take_released(), tuple(step.copies), tuple(step.admitted), scheduled)

    def note_seconds(self, seconds: float) -> None:
        """Record the duration of the last step, which determines how much background work later steps include."""
        self._counters.step_s += seconds
        if self._others is not None:
            self._background_budget.observe(self._others, self._num_added, seconds)

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan` before its result is known, if that result cannot affect it.

        Call it between the execution of `plan` and its `update`; execute and update the returned plan after that.
        """
        if self._waiting and self._run_state.num_free_slots > 0:
            return None
        others = self._others
        if others is not None and (others.num_rows or (self._waiting and not self._waiting.peek().is_background)):
            return None  # the amount of background work is decided for each step
        decoding = independent_decodes(plan, self._running.values())
        if not decoding or len(decoding) > self._limit.budget(self._running, self._waiting):
            return None
        ahead = plan_ahead(decoding, self._blocks)
        if ahead is not None:
            self._counters.count_step(len(decoding))
        return ahead

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Apply the result of a plan. Results of choices that were aborted meanwhile are dropped."""
        now = self.clock()
        if result.out_of_memory:
            return self._handle_out_of_memory(plan, result.out_of_memory, now)
        self._limit.note_success()
        number = self._counters.steps_done + 1
        prefills: list[int] = []
        results: dict[str, ChoiceResult] = {}
        for share, choice in zip(plan.scheduled, result.choices, strict=True):
            if share.key != choice.key:
                raise IntegrityError(f"the runner returned {choice.key!r} instead of {share.key!r}")
            if (request := self._running.get(share.key)) is not None:
                results[share.key] = choice
                self._note_computed(request, share.num_tokens)
                request.progress.note_step(number)
                if request.progress.is_prefilling:
                    prefills.append(share.num_tokens)
                request.prompt_logprobs += choice.prompt_logprobs
                if self._counts_service and (num_output := len(choice.tokens) or bool(choice.beam_candidates)):
                    self._waiting.note_service(request, num_output=num_output)
        self._counters.count_result(prefills, len(results) - len(prefills))
        outputs = self._choices.advance(plan.scheduled, results, now) + self._searches.advance(results, now)
        if self.groups:
            for key in results:
                if (request := self._running.get(key)) is not None:
                    self._blocks.give_back(request)
        return outputs

    def _note_computed(self, request: Request, num_tokens: int) -> None:
        request.num_computed += num_tokens
        if request.features_from is not None:
            self._images.note_computed(request)
        if self.groups:
            before, known = request.num_state_blocks, request.num_computed
            request.num_state_blocks = self._blocks.state_blocks_after(request, before, known)

    def _handle_out_of_memory(self, plan: StepPlan, reason: str, now: float) -> list[RequestOutput]:
        """Recover from a step that ran out of memory and returned no results."""
        self._counters.out_of_memory += 1
        decision = self._limit.decide(plan, self._running, reason)
        if decision.preempted is not None:
            self._preempt(decision.preempted)
        return [] if decision.failed is None else self._fail(decision.failed, OUT_OF_MEMORY, now)

    def _fail(self, request: Request, error: Failure, now: float) -> list[RequestOutput]:
        """End a choice, or the search that it belongs to."""
        owner = self._searches if request.request_id in self._searches else self._choices
        return owner.fail(request, error, now)

    def _preempt(self, victim: Request, not_yet_sent: Collection[str] = ()) -> None:
        """Put a choice and its group back in the queue. `not_yet_sent` as in RunState.stop."""
        self._run_state.preempt(victim, not_yet_sent)
        self._counters.preemptions += 1
        victim.progress.note_preemption(self.clock())

    def stats(
        self, speculation: tuple[SpeculationStats, ...] = (), learning: LearningStats | None = None
    ) -> EngineStats:
        """A snapshot of counters and gauges, including the runner's speculation and learning statistics."""
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._images),
            kv_usage=self._blocks.usage,
            num_background_running=sum(request.is_background for request in self._running.values()),
            num_background_waiting=self._waiting.num_background + self._images.num_background,
            kv_held_blocks=self._blocks.own.num_used,
            kv_cached_blocks=self._blocks.own.num_cached,
            speculation=speculation,
            learning=learning,
            images=self._images.stats(),
            **self._counters.totals(),
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block and every choice is accounted for."""
        self._blocks.check_integrity(self._running.values())
        groups = self._choices.members + self._searches.members
        num_waiting = len(self._waiting) + len(self._images)
        check_accounting(groups, self._running, num_waiting, self._config.block_size)

    # -- one step ------------------------------------------------------------------------------------------------------

    def _fill(self, step: Step, running: Sequence[Request], *, is_background: bool = False) -> None:
        """Schedule running choices, then their drafts, then waiting choices.

        Choices before a span come first: it may need more budget than the others would leave in any step.
        """
        for request in sorted(running, key=begins_no_span) if any(request.spans for request in running) else running:
            leads = request.group is None or request is request.members[0]
            if leads and request.key in self._running:  # not preempted for an earlier one
                self._continue(request, step)
        for request in running:
            if request.num_draft and request.key in self._running:
                self._grant_drafts(request, step)
        self._admit_waiting(step, is_background=is_background)

    def _continue(self, request: Request, step: Step) -> None:
        """Schedule a running choice and its group.

        If KV blocks run out, the running choice with the highest `rank` of the waiting queue is preempted, possibly
        this one.
        """
        if request.only_decodes and self._has_room(request):
            if step.budget:
                step.give_decode(request)
            return
        members = request.members
        shares = lockstep(members, step.budget)
        if not any(shares):
            return
        reused = [self._sharing.fork(member) for member in members]
        growths = [self._growth(*one) for one in zip(members, reused, shares, strict=True)]
        while not self._blocks.can_grow(growths):
            victim = max(self._running.values(), key=self._waiting.rank)
            self._preempt(victim, not_yet_sent=step.take_back(victim.members))
            if victim in members:
                return
        for member, reuse, growth, num_tokens in zip(members, reused, growths, shares, strict=True):
            if reuse is not None:
                self._blocks.share([reuse])
                self._begin(member, reuse, growth, num_tokens, step)
            elif num_tokens:
                step.give(member, num_tokens, *self._blocks.grow(member, growth))

    def _has_room(self, request: Request) -> bool:
        """Whether a request has the blocks for its next token, without a look into the cache groups."""
        block_size = self._config.block_size
        if self.groups:
            num_full, rest = divmod(request.num_computed, block_size)
            if rest in (0, block_size - 1) or num_full > request.num_state_blocks:
                return False  # it begins a block, or completes a page, or accepted drafts did
        return request.num_computed < len(request.blocks) * block_size

    def _growth(self, request: Request, reuse: ReusedKV | None, num_tokens: int) -> Growth:
        """The blocks that a running request needs to compute `num_tokens` tokens, or to begin as a fork."""
        if reuse is not None:
            return self._blocks.to_begin(request, reuse, num_tokens)
        return self._blocks.to_continue(request, num_tokens) if num_tokens else Growth()

    def _grant_drafts(self, request: Request, step: Step) -> None:
        """Give a decoding choice and its guide room for drafts, as far as budget and free blocks allow.

        Drafts are limited to the remaining output, so they stay within the blocks and positions the choice may use.
        """
        share = step.shares.get(request.key)
        if share is None or request.num_computed + share.num_tokens < len(request.tokens):
            return
        members = request.members
        num_draft = min(request.num_draft, step.budget // len(members), request.max_tokens - request.num_output - 1)
        while num_draft > 0:
            growths = [
                self._blocks.to_continue(member, step.shares[member.key].num_tokens, num_draft) for member in members
            ]
            if self._blocks.can_grow(growths):
                break
            num_draft -= 1
        else:
            return
        for member, growth in zip(members, growths, strict=True):
            step.give_drafts(member, num_draft, *self._blocks.grow(member, growth))

    def _least_background(self, running: Sequence[Request]) -> int:
        """The fewest tokens with which the first background choice makes progress."""
        first = next((request for request in running if request is request.members[0]), None)
        if first is None:
            return least_to_begin(self._waiting.peek()) if self._waiting else 1
        return least_share(first.members)

    def _admit_waiting(self, step: Step, *, is_background: bool) -> None:
        """Admit choices from the head of the queue while they fit. Background work is preempted for other work."""
        while self._waiting and step.budget >= len(self._waiting.peek().members):
            head = self._waiting.peek()
            if head.is_background != is_background:
                return
            reused: Sequence[ReusedKV] | None = ()
            if has_slots := self._run_state.num_free_slots >= (1 if head.group is None else head.group.width):
                reused = self._reuse_of(head)
            if reused is None:
                return  # siblings are computing what it will share
            if has_slots and not self._images.can_compute(head, reused):
                self._images.add(self._waiting.pop(), reused)
                continue
            if has_slots and self._admit(head, reused, step):
                continue
            if is_background or not self._preempt_background():
                return

    def _reuse_of(self, head: Request) -> Sequence[ReusedKV] | None:
        """The KV that each member of a group reuses, or None while that is still being computed."""
        found = [self._sharing.find_reusable(member, self._choices.running_siblings(member)) for member in head.members]
        reused = [reuse for reuse in found if reuse is not None]
        return reused if len(reused) == len(found) else None

    def _preempt_background(self) -> bool:
        """Preempt the background choice with the highest rank. Returns False if none runs."""
        background = [request for request in self._running.values() if request.is_background]
        if not background:
            return False
        self._preempt(max(background, key=self._waiting.rank))
        return True

    def _admit(self, head: Request, reused: Sequence[ReusedKV], step: Step) -> bool:
        """Admit the head of the queue, if there are blocks for it."""
        members = head.members
        for member, reuse in zip(members, reused, strict=True):
            member.cached_blocks_at_admission = reuse.cached_blocks_at_admission
        shares = split_budget(members, [reuse.num_computed for reuse in reused], step.budget)
        if not any(shares) and not step.shares:
            return False  # a plan that schedules nothing is not executed
        growths = [self._blocks.to_begin(*one) for one in zip(members, reused, shares, strict=True)]
        if not self._blocks.can_grow(growths, reused):
            return False
        self._waiting.pop()
        self._blocks.share(reused)
        for member, reuse, growth, num_tokens in zip(members, reused, growths, shares, strict=True):
            self._begin(member, reuse, growth, num_tokens, step)
        head.progress.note_admission(self.clock(), head.num_cached or 0)
        return True

    def _begin(self, request: Request, reuse: ReusedKV, growth: Growth, num_tokens: int, step: Step) -> None:
        """Start a request with the shared blocks, which it must hold already, and new ones."""
        step.copies += self._blocks.begin(request, reuse, growth)
        request.num_computed, request.num_state_blocks = reuse.num_computed, reuse.num_state_blocks
        request.num_published, request.num_pages_published = len(reuse.shared), reuse.num_state_blocks
        request.forked_from = None
        if request.num_cached is None:
            request.num_cached = reuse.num_cached
            self._counters.prefix_queries += reuse.num_looked_up
            self._counters.prefix_hits += min(reuse.num_cached, reuse.num_looked_up)  # a fork looks up nothing
            self._waiting.note_service(request, num_input=request.remaining)
        self._running[request.key] = request
        step.admit(request, num_tokens, self._blocks.placed(request), reuse.forked_from)
