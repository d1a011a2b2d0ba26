"""Random traffic for the scheduler, watched from outside: what comes out must be what brute force says."""

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace

from model_runner.contract import CacheGroup, SamplingParams
from scheduler.interface import BACKGROUND, ChoiceState, EngineRequest, FinishReason
from scheduler.scheduler import Scheduler
from tests.scheduler.simulated_runner import POISON, SimulatedRunner, contents, extend_hash, next_token, token_logprobs


def make_groups(config, num_blocks, windows=(3, 9)):
    """Windows, rows and pages with as many blocks as one choice may need, and a few more."""
    least = {
        "width": 1,
        "length": 60,
        "budget": config.max_num_batched_tokens + 3,
        "block_size": config.block_size,
        "extra": 6,
        "snapshot_every": config.snapshot_every,
    }

    def sized(kind, window=0):
        group = CacheGroup(kind, 0, window)
        return replace(group, num_blocks=group.most_held(**least) + num_blocks // 2)

    return (*(sized("window", window) for window in windows), sized("rows"), sized("page"))


def expected_output(request, choice):
    """(tokens, logprobs, reason) of one choice: no blocks, no batches, one token after the other."""
    sampling = replace(request.sampling, choice=choice)
    history = 0
    for content in contents(request.prompt, request.images):
        history = extend_hash(history, content)
    tokens, logprobs = [], []
    while True:
        token = next_token(history, sampling)
        if token == POISON:
            return tokens, logprobs, FinishReason.ERROR
        if request.max_tokens == 0:
            return tokens, logprobs, FinishReason.LENGTH
        tokens.append(token)
        if sampling.logprobs is not None:
            logprobs.append(token_logprobs(history, token))
        history = extend_hash(history, token)
        if token in sampling.stop_token_ids:
            return tokens, logprobs, FinishReason.STOP
        if len(tokens) == request.max_tokens:
            return tokens, logprobs, FinishReason.LENGTH


def expected_prompt_logprobs(request):
    history, expected = 0, []
    for token, following in zip(request.prompt, request.prompt[1:], strict=False):
        history = extend_hash(history, token)
        expected.append(token_logprobs(history, following))
    return expected


@dataclass
class Watched:
    """One choice as a client sees it."""

    request: EngineRequest
    index: int
    deadline: int
    """Step until which it must have ended under first come, first served."""
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)

    @property
    def key(self):
        return f"{self.request.request_id}/{self.index}"

    @property
    def work(self):
        return len(self.request.prompt) + self.request.max_tokens + (2 if self.request.sampling.num_candidates else 1)


def rank(watched):
    return watched.request.tier, watched.request.priority


class World:
    """Adds, aborts, restarts and steps at random. Every broken promise is an AssertionError or KVMismatchError."""

    def __init__(
        self, seed, config, num_blocks, num_draft=0, most_candidates=0, runs_ahead=False, in_background=0.0, groups=()
    ):
        self.random = random.Random(seed)
        self.config = config
        self.num_blocks = num_blocks
        self.num_draft = num_draft
        self.most_candidates = most_candidates
        self.runs_ahead = runs_ahead
        self.in_background = in_background
        self.groups = groups
        self.live = {}  # key -> Watched, in the order of arrival
        self.num_steps = 0
        self.num_added = 0
        self.preemptions = 0
        self.tally = defaultdict(int)
        self.prefixes = [self._tokens(self.random.randint(4, 20)) for _ in range(3)]
        self._start_engine()

    def run(self, num_steps):
        """Traffic for so many steps, then let everything finish and look for what was left behind."""
        while self.num_steps < num_steps:
            is_rush_hour = self.num_steps // 150 % 2 == 0  # and quiet hours, in which everything may finish
            if self.random.random() < (0.25 if is_rush_hour else 0.02) and len(self.live) < 40:
                self._add()
            if self.random.random() < 0.04:
                self._abort()
            if self.random.random() < 0.002:
                self._restart()
            self._step()
        while self.live:
            self._step()
        self._check_empty()
        return self

    def _tokens(self, count):
        return tuple(self.random.randrange(4) for _ in range(count))  # few different ones, so that prefixes meet

    def _start_engine(self):
        self.num_scheduled = 0
        self.num_done = 0
        self.scheduler = Scheduler(self.config, self.num_blocks, groups=self.groups)
        self.runner = SimulatedRunner(self.num_blocks, self.config.block_size, self.num_draft, self.groups)

    def _add(self):
        pick = self.random
        searches = self.most_candidates and pick.random() < 0.5
        num_candidates = pick.randint(1, self.most_candidates) if searches else 0
        capacity = min(self.config.max_model_len, self.num_blocks * self.config.block_size - num_candidates)
        prompt = pick.choice(self.prefixes)[: pick.randint(0, 20)] + self._tokens(pick.randint(1, 12))
        prompt = prompt[:capacity]
        salt = pick.choice(["", "red", "blue"])
        self.num_added += 1
        request = EngineRequest(
            request_id=f"{salt}:{self.num_added}",
            prompt=prompt,
            sampling=SamplingParams(
                seed=pick.randrange(3),
                stop_token_ids=pick.choice([(), (1, 2, 3)]),
                logprobs=pick.choice([None, 0]),
                prompt_logprobs=pick.choice([None, None, None, 0]),
                top_k=num_candidates,
                penalty_alpha=0.5 if searches else 0.0,
            ),
            max_tokens=pick.randint(0, min(30, capacity - len(prompt))),
            choices=tuple(ChoiceState(index) for index in range(pick.choice([1, 1, 1, 2, 5]))),
            priority=pick.randrange(3),
            cache_salt=salt,
            tier=BACKGROUND if self.in_background and pick.random() < self.in_background else 0,
        )
        self._submit(request, {})

    def _submit(self, request, states):
        self.scheduler.add(request)
        for choice in request.choices:
            watched = states.get(choice.index) or Watched(request, choice.index, 0)
            self.live[watched.key] = watched
            watched.deadline = self.num_steps + sum(other.work for other in self.live.values())

    def _abort(self):
        if self.live:
            victim = self.random.choice(list(self.live.values()))
            choice = self.random.choice([None, victim.index])
            self.scheduler.abort(victim.request.request_id, choice)
            for key in [key for key, watched in self.live.items() if watched.request is victim.request]:
                if choice is None or self.live[key].index == choice:
                    del self.live[key]
                    self.tally["aborted"] += 1

    def _restart(self):
        """The engine dies; what was live comes back with the output that it already has."""
        self.preemptions += self.scheduler.stats().preemptions
        self._start_engine()
        before = defaultdict(dict)
        for watched in self.live.values():
            before[watched.request.request_id][watched.index] = watched
        self.live = {}
        for states in before.values():
            resumed = tuple(ChoiceState(index, tuple(watched.tokens)) for index, watched in states.items())
            request = replace(next(iter(states.values())).request, choices=resumed)
            for watched in states.values():
                watched.request = request
            self._submit(request, states)
            self.tally["resumed"] += len(resumed)

    def _step(self):
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.num_steps += 1
        assert bool(plan.scheduled) == bool(self.live), "a step without progress"
        if not plan.scheduled:
            self.tally["idle"] += 1
            return
        result = self.runner.execute(plan)
        self._check_plan(plan)
        self._check_order(plan)
        while plan is not None:
            self.scheduler.note_seconds(1 + sum(share.num_rows for share in plan.scheduled) / 10)
            if self.random.random() < 0.02:
                self._abort()
            ahead = None if result.out_of_memory or not self.runs_ahead else self.scheduler.schedule_ahead(plan)
            if ahead is not None:
                self._check_lengths(ahead, num_next=1)
            if not result.out_of_memory:
                self.num_done += sum(share.num_tokens for share in plan.scheduled if share.key in self.live)
            for output in self.scheduler.update(plan, result):
                self._receive(output)
            self.scheduler.check_integrity()
            stats = self.scheduler.stats()
            assert stats.prefill_tokens + stats.decode_tokens == self.num_done
            if ahead is not None:
                self.runner.ended = {key for key in self.runner.live if key not in self.live}
                result = self.runner.execute(ahead)
                self.num_scheduled += len(ahead.scheduled)
                self.num_steps += 1
                self.tally["ahead"] += 1
                if self.random.random() < 0.1:
                    self._add()
            plan = ahead

    def _check_plan(self, plan):
        num_tokens = sum(share.num_tokens for share in plan.scheduled)
        assert sum(share.num_rows for share in plan.scheduled) <= self.config.max_num_batched_tokens
        self._check_lengths(plan)
        self.tally["drafted"] += sum(share.num_draft for share in plan.scheduled)
        self.tally["compared"] += sum(share.num_candidates for share in plan.scheduled)
        self.num_scheduled += num_tokens
        assert self.scheduler.stats().scheduled_tokens == self.num_scheduled
        running = [key for key in self.runner.live if key in self.live]
        assert len(running) <= self.config.max_num_seqs
        scheduled = [share.key for share in plan.scheduled]
        assert scheduled == [key for key in running if key in scheduled], "not in admission order"
        self.tally["forked"] += len(plan.copies)
        self.tally["reused"] += sum(admitted.num_computed > 0 for admitted in plan.admitted)

    def _check_lengths(self, plan, num_next=0):
        """No step finds tokens beyond those that a choice may have; `num_next` are to be found."""
        for share in plan.scheduled:
            tokens = self.runner.live[share.key].tokens
            if share.key in self.live and tokens[-1] != POISON:
                request = self.live[share.key].request
                most = len(request.prompt) + max(request.max_tokens, 1)
                assert len(tokens) + num_next <= most, "more tokens than may come"

    def _check_order(self, plan):
        """Nobody is left out or overtaken who need not be."""
        running = [key for key in self.runner.live if key in self.live]
        scheduled = [share.key for share in plan.scheduled]
        spare = self.config.max_num_batched_tokens - sum(share.num_rows for share in plan.scheduled)
        for key in set(running) - set(scheduled):
            live = self.runner.live[key]
            if self.live[key].request.tier >= BACKGROUND:
                self.tally["in background"] += 1
                continue
            assert self.most_candidates, "a running choice was left out"
            assert spare < 1 + live.num_candidates, "it had room"
            self.tally["left out"] += 1
        if self.config.policy == "fcfs":
            arrived = list(self.live)
            assert running == arrived[: len(running)], "a later choice overtook"
        if self.config.policy == "priority":
            waiting = [watched for key, watched in self.live.items() if key not in self.runner.live]
            for admitted in plan.admitted:
                best = min((rank(watched) for watched in waiting), default=(BACKGROUND, 9))
                assert rank(self.live[admitted.key]) <= best

    def _receive(self, output):
        watched = self.live[f"{output.request_id}/{output.choice}"]
        assert 0 <= output.num_cached_tokens <= len(watched.request.prompt)
        assert 0 <= output.num_written_tokens <= len(watched.request.prompt) - output.num_cached_tokens
        assert not (output.prompt_logprobs and watched.prompt_logprobs), "prompt logprobs came twice"
        watched.tokens += output.tokens
        watched.logprobs += output.logprobs
        watched.prompt_logprobs += output.prompt_logprobs
        if output.finish_reason is not None:
            del self.live[watched.key]
            self._check_finished(watched, output)

    def _check_finished(self, watched, output):
        request = watched.request
        assert (watched.tokens, watched.logprobs, output.finish_reason) == expected_output(request, watched.index)
        assert (output.error is not None) == (output.finish_reason is FinishReason.ERROR)
        assert output.stop_token_id == (watched.tokens[-1] if output.finish_reason is FinishReason.STOP else None)
        wants_prompt = request.sampling.prompt_logprobs is not None and watched.index == 0
        if watched.tokens or output.finish_reason is not FinishReason.ERROR:
            assert watched.prompt_logprobs == (expected_prompt_logprobs(request) if wants_prompt else [])
        if self.config.policy == "fcfs":
            assert self.num_steps <= watched.deadline, "starved"
        self.tally[output.finish_reason] += 1

    def _check_empty(self):
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
        assert stats.steps_done + stats.out_of_memory == stats.steps
        assert not self.scheduler.has_work
        self.preemptions += stats.preemptions
        probe = EngineRequest(":probe", (0,), SamplingParams(), max_tokens=0)
        self.scheduler.add(probe)
        plan = self.scheduler.schedule()
        self.scheduler.update(plan, self.runner.execute(plan))
        assert list(self.runner.live) == [":probe/0"], "the runner was never told to forget the others"
