"""Who computes what in the next step.

One rule, catch up: a running choice has len(tokens) known tokens of which num_computed are computed, and a step gives
it some of the difference. Prefill, chunked prefill, decoding and resumption after preemption are all that rule.

Going through the running choices in admission order serves decoding before prompts: a choice is admitted only with
budget that the others left, which means that they have caught up, so only the newest can be within its prompt.

Drafts of a speculating choice come after that: they take what is left of the budget and of the blocks, and never make
another choice wait for longer than a step. Rejected ones leave nothing behind but blocks that the choice grows into.

The candidates that contrastive search compares are no drafts: without room for all of them the choice waits for the
next step where the budget ends, and is treated as one that grows where the blocks do. Its last token is computed again
beside the candidates that this token named, so a step without candidates leaves it uncomputed.

Admission reserves blocks for all known tokens, so only growth by decoding can run out of them; the policy's victim
then gives its blocks back and waits with prompt and output. The choice that came first is never preempted for another
of its priority, so work always completes.

Where the device's or the host's memory runs out in a step, nothing of it counts. Its largest choice goes back into the
queue, unless it came first, and for a while steps are smaller, down to the least that brings on the choice that is
served first. If memory runs out even then, that choice fails (see out_of_memory.py).

The beams of a search are a group, and so are a choice and its guide: admitted when there is room for all of them,
preempted together, and in lockstep, which means that the last known tokens of all are computed in the same step.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from model_runner.contract import AdmittedRequest, ChoiceResult, ScheduledRequest, SharedList, StepPlan, StepResult
from model_runner.runner_interface import LearningStats, SpeculationStats
from scheduler.background_budget import BackgroundBudget, OthersLoad
from scheduler.block_pool import BlockPool, IntegrityError, blocks_for
from scheduler.checks import check_request
from scheduler.choices import Choices
from scheduler.groups import BeamMembers, Guided, Searches, least_share, lockstep, search_from_start
from scheduler.history import ChoiceHistory
from scheduler.interface import EngineRequest, EngineStats, RequestOutput, SchedulerConfig, WatchText
from scheduler.out_of_memory import OUT_OF_MEMORY, StepLimit
from scheduler.prefix_cache import CacheLog, PrefixCache
from scheduler.request import Request, make_choices
from scheduler.run_state import Counters, RunState, check_books
from scheduler.sharing import KVSharing, Start
from scheduler.waiting_queue import make_queue


@dataclass(slots=True)
class Step:
    """A plan in the making."""

    budget: int
    """Tokens that can still be scheduled."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[AdmittedRequest] = field(default_factory=list)
    shares: dict[str, ScheduledRequest] = field(default_factory=dict)

    def give(self, request: Request, num_tokens: int, new_blocks: tuple[int, ...] = ()) -> None:
        """Have the request compute so many tokens, and its candidates, for which the blocks have room as well."""
        share = ScheduledRequest(
            key=request.key,
            num_tokens=num_tokens,
            new_blocks=new_blocks,
            num_candidates=request.num_candidates,
            chosen=request.take_chosen(),
        )
        self.shares[request.key] = share
        self.budget -= share.num_rows

    def give_decode(self, request: Request) -> None:
        """Have a request that `only_decodes` do so, within the blocks that it has."""
        self.shares[request.key] = request.decode_share
        self.budget -= 1

    def give_drafts(self, request: Request, num_draft: int, new_blocks: tuple[int, ...]) -> None:
        """Give it room for so many drafts as well."""
        share = self.shares[request.key]
        new_blocks = share.new_blocks + new_blocks
        self.shares[request.key] = replace(share, num_draft=num_draft, new_blocks=new_blocks)
        self.budget -= num_draft

    def admit(self, request: Request, num_tokens: int, forked_from: str | None) -> None:
        """Begin with a request that has its blocks; it may have to wait for its first share."""
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
            )
        )
        if num_tokens:
            self.give(request, num_tokens)

    def load(self) -> OthersLoad:
        """What it computes so far."""
        shares = self.shares.values()
        only_decodes = not self.admitted and all(share.num_tokens == 1 for share in shares)
        return OthersLoad(sum(share.num_rows for share in shares), only_decodes)

    def take_back(self, requests: Sequence[Request]) -> set[str]:
        """Leave preempted requests out, before their blocks are given back.

        Returns:
            The keys of those that only this plan would have admitted: the runner does not hear of them.
        """
        keys = {request.key for request in requests}
        blocks = {block for request in requests for block in request.blocks}
        for key in keys & self.shares.keys():
            self.budget += self.shares.pop(key).num_rows
        not_yet_sent = {admitted.key for admitted in self.admitted if admitted.key in keys}
        self.admitted = [admitted for admitted in self.admitted if admitted.key not in keys]
        self.copies = [copy for copy in self.copies if copy[1] not in blocks]
        return not_yet_sent


def goes_on_alone(plan: StepPlan, running: Iterable[Request]) -> list[Request] | None:
    """Those who compute one token each in the next step, whatever this one brings, in order of admission.

    Choices that end with this step for their length are left out; those that turn out to have ended by a token compute
    one for nothing.

    Args:
        plan: the step that is being computed.
        running: all running choices, in order of admission.

    Returns:
        None if the next step depends on what this one brings: where a choice is within its prompt, has drafts or
        candidates to verify, or is of a group, whose members wait for each other.
    """
    shares = {share.key: share for share in plan.scheduled}
    going = []
    for request in running:
        share = shares.get(request.key)
        if share is None or not _is_plain(request, share):
            return None
        if request.num_output + 1 < request.max_tokens:
            going.append(request)
    return going


def plan_ahead(going: Sequence[Request], pool: BlockPool, block_size: int) -> StepPlan | None:
    """A step in which these compute the token that is not known yet; None where there are no blocks for that."""
    num_new = [max(0, blocks_for(len(request.tokens) + 1, block_size) - len(request.blocks)) for request in going]
    if not pool.can_allocate(sum(num_new)):
        return None
    shares = []
    for request, count in zip(going, num_new, strict=True):
        new_blocks = pool.allocate(count)
        request.blocks += new_blocks
        shares.append(ScheduledRequest(request.key, 1, tuple(new_blocks)))
    return StepPlan((), (), (), tuple(shares))


def _is_plain(request: Request, share: ScheduledRequest) -> bool:
    if request.group is not None or request.sampling.num_candidates or request.num_draft or share.num_draft:
        return False
    return share.num_tokens == request.remaining


class Scheduler:
    """Plans steps in counts and block ids. `schedule`, execution and `update` alternate strictly; `add` and `abort`
    may come at any moment between any two calls.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        watch_text: WatchText | None = None,
        cache_log: CacheLog | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Without `watch_text`, beam search with stop strings is refused. `clock` is that of histories, in seconds."""
        limits = (config.block_size, config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len)
        if min(*limits, num_blocks) < 1:
            raise ValueError(f"all limits must be at least 1: {config}, num_blocks={num_blocks}")
        self.clock = clock
        self._config = config
        cache = PrefixCache(cache_log)
        self._pool = BlockPool(num_blocks, cache)
        self._sharing = KVSharing(cache, config.block_size, config.prefix_caching)
        self._waiting = make_queue(config.policy)
        self._counts_service = config.policy == "fair"  # others are not told for each token
        self._run_state = RunState(self._waiting, self._pool, config.max_num_seqs)
        self._running = self._run_state.running
        self._limit = StepLimit(config.max_num_batched_tokens, self._waiting.rank)
        self._choices = Choices(self._run_state, self._sharing)
        self._searches = Searches(self._run_state, self._sharing)
        self._watch_text = watch_text
        self._num_arrived = 0
        self._counters = Counters()
        self._room = BackgroundBudget(config.max_num_batched_tokens)
        self._others: OthersLoad | None = None
        """Of the last step, if there was background work that might have been added to it, ..."""
        self._num_added = 0
        """... and how much was."""

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def has_work(self) -> bool:
        """Whether any choice lives."""
        return bool(self._choices or self._searches)

    def check(self, request: EngineRequest) -> None:
        """Raise ValueError if the request's id is in use or it can never run."""
        if request.request_id in self._choices or request.request_id in self._searches:
            raise ValueError(f"request {request.request_id!r} is already here")
        check_request(request, self._config, self.num_blocks)
        if request.beam_search is not None and request.beam_search.stop and self._watch_text is None:
            raise ValueError(f"request {request.request_id!r} has stop strings, and nobody here reads text")

    def add(self, request: EngineRequest, arrived_at: float | None = None) -> None:
        """Line up all choices of a request, which has arrived just now or then. Raises what `check` does."""
        self.check(request)
        arrived_at = self.clock() if arrived_at is None else arrived_at
        if request.beam_search is not None:
            (beam,) = self._line_up(search_from_start(request), arrived_at)
            self._searches.add(BeamMembers(request, request.beam_search, self._watch_text, beam))
        else:
            self._choices.add(self._line_up(request, arrived_at))

    def _line_up(self, request: EngineRequest, arrived_at: float) -> list[Request]:
        choices = make_choices(request, self._num_arrived, arrived_at, self._config.block_size)
        self._num_arrived += len(choices)
        for choice in choices:
            if request.guide:
                choice.group = Guided(choice, request.guide, self._config.block_size)
            self._waiting.push(choice)
        return choices

    def abort(self, request_id: str, choice: int | None = None) -> list[ChoiceHistory]:
        """End one choice, or all. Their blocks are free at once; what is unknown or has ended is left alone.

        Returns what became of those that ended with it.
        """
        now = self.clock()
        return self._choices.abort(request_id, choice, now) + self._searches.abort(request_id, choice, now)

    def explain(self, request_id: str) -> list[ChoiceHistory]:
        """What became so far of a request's choices that have not ended; of none, if it is unknown."""
        now = self.clock()
        return self._choices.explain(request_id, now) + self._searches.explain(request_id, now)

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
            step.budget = min(step.budget, self._room.num_tokens(self._others, self._least_background(background)))
            self._fill(step, background, is_background=True)
        if not step.shares:
            return StepPlan((), (), (), ())
        scheduled = tuple(step.shares[key] for key in self._running if key in step.shares)
        self._num_added = 0 if self._others is None else step.load().num_rows - self._others.num_rows
        self._counters.count_step(sum(share.num_tokens for share in scheduled))
        return StepPlan(self._run_state.take_released(), tuple(step.copies), tuple(step.admitted), scheduled)

    def note_seconds(self, seconds: float) -> None:
        """The last step has taken so long, which decides how much background work is added to later ones."""
        self._counters.step_s += seconds
        if self._others is not None:
            self._room.observe(self._others, self._num_added, seconds)

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after one whose results are still to come, if these cannot matter to it.

        It goes between that one's execution and its `update`, and is executed and updated after it.
        """
        if self._waiting and self._run_state.num_free_slots > 0:
            return None
        others = self._others
        if others is not None and (others.num_rows or (self._waiting and not self._waiting.peek().is_background)):
            return None  # how much background work there is beside others, and who takes its place, is decided by step
        going = goes_on_alone(plan, self._running.values())
        if not going or len(going) > self._limit.budget(self._running, self._waiting):
            return None
        ahead = plan_ahead(going, self._pool, self._config.block_size)
        if ahead is not None:
            self._counters.count_step(len(going))
        return ahead

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take in what the plan brought; results of choices that were aborted meanwhile are dropped."""
        now = self.clock()
        if result.out_of_memory:
            return self._retreat(plan, result.out_of_memory, now)
        self._limit.note_success()
        number = self._counters.steps_done + 1
        prefills: list[int] = []
        results: dict[str, ChoiceResult] = {}
        for share, choice in zip(plan.scheduled, result.choices, strict=True):
            if share.key != choice.key:
                raise IntegrityError(f"the runner answered for {choice.key!r} in place of {share.key!r}")
            if (request := self._running.get(share.key)) is not None:
                results[share.key] = choice
                request.num_computed += share.num_tokens
                request.progress.note_step(number)
                if request.progress.is_prefilling:
                    prefills.append(share.num_tokens)
                request.prompt_logprobs += choice.prompt_logprobs
                if self._counts_service and (num_output := len(choice.tokens) or bool(choice.beam_candidates)):
                    self._waiting.note_service(request, num_output=num_output)
        self._counters.count_result(prefills, len(results) - len(prefills))
        return self._choices.advance(plan.scheduled, results, now) + self._searches.advance(results, now)

    def _retreat(self, plan: StepPlan, reason: str, now: float) -> list[RequestOutput]:
        """Go on after a step for which memory ran out: it brought nobody anything."""
        self._counters.out_of_memory += 1
        retreat = self._limit.retreat(plan, self._running, reason)
        if retreat.preempted is not None:
            self._preempt(retreat.preempted)
        if retreat.failed is None:
            return []
        owner = self._searches if retreat.failed.request_id in self._searches else self._choices
        return owner.fail(retreat.failed, OUT_OF_MEMORY, now)

    def _preempt(self, victim: Request, not_yet_sent: Collection[str] = ()) -> None:
        """Have a choice, with its group, wait again; `not_yet_sent` as for the run_state."""
        self._run_state.preempt(victim, not_yet_sent)
        self._counters.preemptions += 1
        victim.progress.note_preemption(self.clock())

    def stats(
        self, speculation: tuple[SpeculationStats, ...] = (), learning: LearningStats | None = None
    ) -> EngineStats:
        """A snapshot of counters and gauges, with what the runner says of its speculation and learning."""
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_usage=self._pool.num_used / self.num_blocks,
            num_background_running=sum(request.is_background for request in self._running.values()),
            num_background_waiting=self._waiting.num_background,
            kv_held_blocks=self._pool.num_used,
            kv_cached_blocks=self._pool.num_cached,
            speculation=speculation,
            learning=learning,
            **self._counters.totals(),
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block and every choice is accounted for."""
        self._pool.check_integrity([request.blocks for request in self._running.values()])
        groups = self._choices.members + self._searches.members
        check_books(groups, self._running, len(self._waiting), self._config.block_size)

    # -- one step ------------------------------------------------------------------------------------------------------

    def _fill(self, step: Step, running: Sequence[Request], *, is_background: bool = False) -> None:
        """Schedule running choices, then their drafts, then those that wait."""
        for request in running:
            leads = request.group is None or request is request.members[0]
            if leads and request.key in self._running:  # not preempted for one before it
                self._continue(request, step)
        for request in running:
            if request.num_draft and request.key in self._running:
                self._grant_drafts(request, step)
        self._admit_waiting(step, is_background=is_background)

    def _continue(self, request: Request, step: Step) -> None:
        """Schedule a running choice and the others of its group. Where KV blocks run out, preempt the running choice
        that the policy ranks last (`rank` of waiting_queue.py), which may be this one.
        """
        if request.only_decodes and request.num_computed < len(request.blocks) * self._config.block_size:
            if step.budget:
                step.give_decode(request)
            return
        members = request.members
        shares = lockstep(members, step.budget)
        if not any(shares):
            return
        starts = [self._sharing.fork(member) for member in members]
        num_new = [
            self._num_to_grow(member, num_tokens) if start is None else self._num_to_begin(member, start)
            for member, start, num_tokens in zip(members, starts, shares, strict=True)
        ]
        while not self._pool.can_allocate(sum(num_new)):
            victim = max(self._running.values(), key=self._waiting.rank)
            self._preempt(victim, not_yet_sent=step.take_back(victim.members))
            if victim in members:
                return
        for member, start, count, num_tokens in zip(members, starts, num_new, shares, strict=True):
            new_blocks = self._pool.allocate(count)
            if start is not None:
                self._pool.share(start.shared)
                self._place(member, start, new_blocks, step)
                step.admit(member, num_tokens, start.forked_from)
            elif num_tokens:
                member.blocks += new_blocks
                step.give(member, num_tokens, tuple(new_blocks))

    def _grant_drafts(self, request: Request, step: Step) -> None:
        """Give a decoding choice, and its guide, room for its drafts, as far as budget and free blocks go.

        The output that is left to it bounds them, so they stay within the blocks and positions that it may ever use.
        """
        share = step.shares.get(request.key)
        if share is None or request.num_computed + share.num_tokens < len(request.tokens):
            return
        members = request.members
        num_draft = min(request.num_draft, step.budget // len(members), request.max_tokens - request.num_output - 1)
        while num_draft > 0:
            lengths = [len(member.tokens) + num_draft for member in members]
            num_new = [
                max(0, self._blocks_for(length) - len(member.blocks))
                for member, length in zip(members, lengths, strict=True)
            ]
            if self._pool.can_allocate(sum(num_new)):
                break
            num_draft -= 1
        else:
            return
        for member, count in zip(members, num_new, strict=True):
            new_blocks = self._pool.allocate(count)
            member.blocks += new_blocks
            step.give_drafts(member, num_draft, tuple(new_blocks))

    def _least_background(self, running: Sequence[Request]) -> int:
        """The fewest tokens that bring on the background choice that is served first."""
        first = next((request for request in running if request is request.members[0]), None)
        if first is None:
            return len(self._waiting.peek().members) if self._waiting else 1
        return least_share(first.members)

    def _admit_waiting(self, step: Step, *, is_background: bool) -> None:
        """Admit from the head of the queue for as long as it fits; background work makes way for others."""
        while self._waiting and step.budget >= len(self._waiting.peek().members):
            head = self._waiting.peek()
            if head.is_background != is_background:
                return
            starts: Sequence[Start] | None = ()
            if has_slots := self._run_state.num_free_slots >= (1 if head.group is None else head.group.width):
                starts = self._starts_of(head)
            if starts is None:
                return  # others are computing what it will share
            if has_slots and self._has_blocks_for(head, starts):
                self._admit(head, starts, step)
            elif is_background or not self._make_way():
                return

    def _starts_of(self, head: Request) -> Sequence[Start] | None:
        """From where each member of a group begins; None as long as that is not known."""
        found = [self._sharing.find_start(member, self._choices.running_siblings(member)) for member in head.members]
        starts = [start for start in found if start is not None]
        return starts if len(starts) == len(found) else None

    def _has_blocks_for(self, head: Request, starts: Sequence[Start]) -> bool:
        num_new = sum(map(self._num_to_begin, head.members, starts))
        # Whatever is shared: to find out how many of those blocks nobody else holds takes a look at each.
        if not self._pool.can_allocate(num_new):
            return False
        return self._pool.can_allocate(num_new, sharing={block for start in starts for block in start.shared})

    def _make_way(self) -> bool:
        """Have the background choice that matters least wait; False if none runs."""
        background = [request for request in self._running.values() if request.is_background]
        if not background:
            return False
        self._preempt(max(background, key=self._waiting.rank))
        return True

    def _admit(self, head: Request, starts: Sequence[Start], step: Step) -> None:
        """Let the head of the queue run, for which there is room."""
        members = head.members
        num_new = [self._num_to_begin(member, start) for member, start in zip(members, starts, strict=True)]
        self._waiting.pop()
        self._pool.share([block for start in starts for block in start.shared])
        for member, start, count in zip(members, starts, num_new, strict=True):
            self._place(member, start, self._pool.allocate(count), step)
        for member, start, num_tokens in zip(members, starts, lockstep(members, step.budget), strict=True):
            step.admit(member, num_tokens, start.forked_from)
        head.progress.note_admission(self.clock(), head.num_cached or 0)

    def _num_to_grow(self, request: Request, num_tokens: int) -> int:
        """The blocks that a running request lacks to compute so many tokens."""
        end = request.num_computed + num_tokens + request.num_candidates
        return max(0, self._blocks_for(end) - len(request.blocks))

    def _num_to_begin(self, request: Request, start: Start) -> int:
        """The blocks that a request needs for all of its tokens, beside those that it shares."""
        return self._blocks_for(len(request.tokens) + request.sampling.num_candidates) - len(start.shared)

    def _place(self, request: Request, start: Start, new_blocks: list[int], step: Step) -> None:
        """Let a request run, in blocks of which it holds the shared ones already."""
        if start.copied is not None:
            step.copies.append((start.copied, new_blocks[0]))
        request.blocks = [*start.shared, *new_blocks]
        request.num_computed = start.num_computed
        request.forked_from = None
        if request.num_cached is None:
            request.num_cached = start.num_cached
            self._counters.prefix_queries += start.num_looked_up
            self._counters.prefix_hits += min(start.num_cached, start.num_looked_up)  # a fork looks nothing up
            self._waiting.note_service(request, num_input=request.remaining)
        self._running[request.key] = request

    def _blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self._config.block_size)
