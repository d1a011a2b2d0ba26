"""Beams in the scheduler: the search itself against brute force, and its requests among others under pressure."""

import random
from dataclasses import replace

import pytest

from model_runner.contract import BeamCandidate, SamplingParams
from scheduler.beam_search import BeamSearcher, Continuation, Rules
from scheduler.engine import Engine
from scheduler.interface import BeamSearch, ChoiceState, EngineRequest, FinishReason, SchedulerConfig
from scheduler.scheduler import Scheduler
from tests.scheduler.driving import make_engine, make_request, run, tokens_of
from tests.scheduler.simulated_beams import best_of_all, expected_sequences
from tests.scheduler.simulated_runner import VOCAB, KVMismatchError, SimulatedRunner
from tests.scheduler.simulated_world import expected_output


def make_search(name="a", num_prompt=6, max_tokens=5, num_return=1, stop=(), logprobs=None, **search):
    choices = tuple(ChoiceState(index) for index in range(num_return))
    sampling = SamplingParams(temperature=0.0, stop_token_ids=stop, logprobs=logprobs)
    prompt = tuple(range(num_prompt))
    return EngineRequest(f":{name}", prompt, sampling, max_tokens, choices, beam_search=BeamSearch(**search))


def offer(**logprobs):
    """The candidates of a beam, by token ids that are written as letters."""
    return [BeamCandidate(ord(letter), logprob) for letter, logprob in logprobs.items()]


# -- the search alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("length", [1, 2])
def test_with_as_many_beams_as_sequences_the_best_of_all_is_found(length, length_penalty):
    width = VOCAB ** (length - 1) * 3
    request = make_search(max_tokens=length, width=width, length_penalty=length_penalty)
    best = expected_sequences(request)[0]
    score, tokens = best_of_all(request.prompt, length, length_penalty)
    assert best.beam.tokens == tokens
    assert best.score == pytest.approx(score)


def test_a_sequence_that_ends_outside_the_best_is_no_answer():
    rules = Rules(BeamSearch(width=1), (ord("e"),), max_tokens=9)
    searcher = BeamSearcher(rules)
    assert searcher.advance([offer(a=-1.0, e=-1.1, b=-2.0)]) == [Continuation(0, ord("a"))]
    assert searcher.finished() == []
    assert searcher.advance([offer(e=-1.0, b=-9.0)]) == []
    assert [(ended.beam.tokens, ended.score) for ended in searcher.finished()] == [((ord("a"), ord("e")), -1.0)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "goes_on"),
    [(True, 1.0, False), (False, 1.0, False), ("never", 1.0, True), ("never", 0.0, False)],
)
def test_when_a_search_is_over(early_stopping, length_penalty, goes_on):
    """One sequence has ended with -3, the beam has -3.2 and may get one token more, which may cost nothing."""
    search = BeamSearch(width=1, early_stopping=early_stopping, length_penalty=length_penalty)
    searcher = BeamSearcher(Rules(search, (ord("e"),), max_tokens=3))
    searcher.advance([offer(a=-1.0, b=-5.0)])
    assert bool(searcher.advance([offer(e=-2.0, a=-2.2)])) == goes_on


def test_groups_avoid_what_the_earlier_ones_took():
    search = BeamSearch(width=2, groups=2, diversity_penalty=1.5)
    searcher = BeamSearcher(Rules(search, (), max_tokens=2))
    first = searcher.advance([offer(a=-0.5, b=-1.0, c=-3.0)])
    assert [chr(step.token_id) for step in first] == ["a", "b"]
    second = searcher.advance([offer(a=-0.5, b=-1.0), offer(a=-0.5, c=-3.0)])
    assert second == []
    totals = {tuple(map(chr, ended.beam.tokens)): ended.beam for ended in searcher.finished()}
    assert totals["a", "a"].total == pytest.approx(-1.0)
    assert totals["b", "a"].total == pytest.approx(-1.5)  # the group before had ended with this step
    assert totals["b", "a"].logprob == pytest.approx(-1.5)


def test_what_diversity_costs_counts_in_the_score_alone():
    """A group that takes the token of an earlier one in spite of it has a lower score, and the same log-probability."""
    search = BeamSearch(width=2, groups=2, diversity_penalty=1.5)
    searcher = BeamSearcher(Rules(search, (), max_tokens=2))
    assert [chr(step.token_id) for step in searcher.advance([offer(a=-0.5, b=-2.5)])] == ["a", "a"]
    assert searcher.advance([offer(a=-0.5, b=-2.5)] * 2) == []
    assert [(ended.score, ended.beam.logprob) for ended in searcher.finished()] == [(-0.5, -1.0), (-1.25, -1.0)]


def test_a_negative_length_penalty_favours_the_short_and_needs_no_patience():
    """Two sequences have ended with -3 * 1 and -1.5 * 2. The best beam has -1.42 * 2 now, and no more at its end."""
    search = BeamSearch(width=2, early_stopping="never", length_penalty=-1.0)
    searcher = BeamSearcher(Rules(search, (ord("e"),), max_tokens=3))
    searcher.advance([offer(a=-1.4, e=-3.0, b=-5.0)])
    assert searcher.advance([offer(a=-0.02, e=-0.1, b=-9.0), offer(a=-9.0, b=-9.0)])
    assert [ended.score for ended in searcher.finished()] == [-3.0, -3.0]
    assert searcher.advance([offer(a=-0.2, b=-9.0), offer(a=-9.0, b=-9.0)]) == []
    assert [ended.score for ended in searcher.finished()] == [-3.0, -3.0]


# -- its requests ------------------------------------------------------------------------------------------------------


def test_the_best_sequences_are_the_choices():
    request = make_search(num_return=3, width=4, max_tokens=7, logprobs=0)
    outputs = run(make_engine(), request)
    expected = expected_sequences(request)
    for choice in range(3):
        of_choice = outputs[":a", choice]
        assert tuple(tokens_of(of_choice)) == expected[choice].beam.tokens
        assert [report for output in of_choice for report in output.logprobs] == list(expected[choice].beam.reports)
        assert of_choice[-1].finish_reason is FinishReason.LENGTH
        assert of_choice[-1].beam.score == expected[choice].score
        assert of_choice[-1].beam.cumulative_logprob == expected[choice].beam.logprob


def test_what_all_beams_share_is_streamed_before_the_end():
    engine = make_engine()
    request = make_search(width=2, max_tokens=24)
    outputs = run(engine, request)[":a", 0]
    assert len(outputs) > 1
    assert tuple(tokens_of(outputs)) == expected_sequences(request)[0].beam.tokens


def test_each_step_tells_how_many_tokens_all_beams_have_drawn():
    """Also while they share none: groups that avoid each other's tokens have nothing to stream before the end."""
    engine = make_engine()
    engine.add(make_search(num_prompt=3, width=4, max_tokens=6, groups=2, diversity_penalty=50.0))
    told, computed = [], []
    while engine.has_work:
        (output,) = engine.step()
        told.append(output.beam_tokens)
        computed.append(len(engine.runner.plans[-1].scheduled))
    assert computed == [1, 4, 4, 4, 4, 4]
    assert told == [sum(computed[: step + 1]) for step in range(6)]


def test_beams_share_the_prompt_and_copy_only_the_last_block():
    engine = make_engine(max_num_batched_tokens=64)
    run(engine, make_search(num_prompt=10, width=3, max_tokens=1 + 1))
    first, second = engine.runner.plans
    (lead,) = first.admitted
    assert [len(admitted.tokens) for admitted in second.admitted] == [11, 11]
    for fork in second.admitted:
        assert fork.forked_from == lead.key
        assert fork.blocks[:2] == lead.blocks[:2]
        assert fork.blocks[2] != lead.blocks[2]
    assert [copy.source for copy in second.copies] == [lead.blocks[2]] * 2
    assert [share.chosen is not None for share in second.scheduled] == [True, False, False]


def test_forks_share_their_histories():
    """For any prompt length, a plan's tokens for a fork equal the beam's that it was forked from."""
    engine = make_engine(num_blocks=400, max_model_len=400, max_num_batched_tokens=400)
    run(engine, make_search(num_prompt=300, width=3, max_tokens=5))
    forks = [admitted.tokens for plan in engine.runner.plans[1:] for admitted in plan.admitted]
    assert len(forks) > 2
    for tokens in forks:
        assert len(tokens._full) == 300 // 64
        assert all(mine is its for mine, its in zip(tokens._full, forks[0]._full, strict=True))


def test_a_resumed_search_gives_only_what_is_new():
    request = make_search(width=3, max_tokens=8, num_return=2, logprobs=0)
    whole = run(make_engine(), request)
    shared = tokens_of(whole[":a", 0][:-1])
    choices = tuple(ChoiceState(index, tuple(shared)) for index in range(2))
    resumed = run(make_engine(), replace(request, choices=choices))
    for choice in range(2):
        assert [*shared, *tokens_of(resumed[":a", choice])] == tokens_of(whole[":a", choice])


def test_a_choice_that_nobody_wants_any_more_gives_nothing_and_the_last_one_ends_the_search():
    engine = make_engine()
    engine.add(make_search(width=3, max_tokens=20, num_return=2))
    for _ in range(3):
        engine.step()
    engine.abort(":a", 0)
    assert all(output.choice == 1 for _ in range(3) for output in engine.step())
    engine.abort(":a", 1)
    assert not engine.has_work
    engine.check_integrity()
    assert engine.stats().kv_usage == 0


def test_a_waiting_search_can_be_aborted():
    engine = make_engine()
    engine.add(make_search(width=3))
    engine.abort(":a")
    assert not engine.has_work
    engine.check_integrity()


def test_fewer_sequences_than_were_asked_for_are_an_error_of_the_request():
    class OneWay(SimulatedRunner):
        def _result(self, share):
            result = super()._result(share)
            return type(result)(share.key, (), beam_candidates=result.beam_candidates[:1])

    engine = Engine(Scheduler(SchedulerConfig(4, 8, 32, 64), 32), OneWay(32, 4))
    outputs = run(engine, make_search(width=2, num_return=2))
    assert outputs[":a", 0][-1].finish_reason is FinishReason.LENGTH
    assert outputs[":a", 1][-1].error.by_request


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 9}, "needs 9 slots at a time, but max_num_seqs is 8"),
        ({"width": 4, "groups": 3}, "4 beams cannot be split into 3 equal groups"),
        ({"width": 2, "num_return": 3}, "more sequences than its 2 beams"),
        ({"width": 8, "num_prompt": 20, "max_tokens": 20}, "80 KV blocks"),
        ({"width": 2, "max_tokens": 0}, "max_tokens of at least 1"),
    ],
)
def test_what_can_never_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_engine().add(make_search(**changes))


# -- among others ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "config", "num_blocks"),
    [
        (1, SchedulerConfig(4, 12, 16, 60), 38),
        (2, SchedulerConfig(4, 12, 64, 60, "priority"), 38),
        (3, SchedulerConfig(8, 12, 24, 60, "fair"), 22),
        (4, SchedulerConfig(4, 12, 12, 60, prefix_caching=False), 38),
        (5, SchedulerConfig(2, 24, 48, 60), 74),
    ],
)
def test_random_traffic_gives_what_brute_force_does(seed, config, num_blocks):
    pick = random.Random(seed)
    engine = Engine(Scheduler(config, num_blocks), SimulatedRunner(num_blocks, config.block_size, num_draft=2))
    live, found, num_added = {}, {}, 0
    for step in range(1500):
        if step < 900 and len(live) < 30 and pick.random() < 0.5:
            num_added += 1
            request = random_request(pick, num_added)
            engine.add(request)
            live |= {(request.request_id, choice.index): request for choice in request.choices}
        for output in engine.step():
            key = output.request_id, output.choice
            found.setdefault(key, []).append(output)
            if output.finish_reason is not None:
                check(live.pop(key), output.choice, found.pop(key))
        engine.check_integrity()
        if pick.random() < 0.01 and live:
            name, choice = pick.choice(list(live))
            engine.abort(name, choice)
            del live[name, choice]
    assert not live
    assert engine.stats().kv_usage == 0
    assert engine.stats().preemptions > 10
    assert num_added > 60


def test_forks_without_their_copies_are_caught(monkeypatch):
    schedule = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda self: replace(schedule(self), copies=()))
    with pytest.raises(KVMismatchError):
        run(make_engine(), make_search(width=3, num_prompt=6))


def random_request(pick, number):
    prompt = tuple(pick.randrange(3) for _ in range(pick.randint(1, 12)))
    salt = pick.choice(["", "red"])
    sampling = SamplingParams(
        temperature=0.0,
        seed=pick.randrange(3),
        stop_token_ids=pick.choice([(), tuple(range(0, VOCAB, 3))]),
        logprobs=pick.choice([None, 0]),
    )
    width = pick.choice([1, 2, 3, 4])
    search = BeamSearch(
        width, pick.choice([0.0, 1.0]), pick.choice([True, False, "never"]), groups=pick.choice([1, width])
    )
    is_search = pick.random() < 0.5
    is_guided = not is_search and pick.random() < 0.5
    choices = tuple(ChoiceState(index) for index in range(pick.randint(1, width)))
    if is_guided:
        sampling = replace(sampling, guidance=1.5)
    return EngineRequest(
        f"{salt}:{number}", prompt, sampling, pick.randint(1, 24), choices, pick.randrange(3), salt,
        beam_search=search if is_search else None,
        guide=tuple(pick.randrange(3) for _ in range(pick.randint(1, 12))) if is_guided else (),
    )  # fmt: skip


def check(request, choice, outputs):
    tokens = tuple(tokens_of(outputs))
    reports = tuple(report for output in outputs for report in output.logprobs)
    if request.beam_search is None:
        expected_tokens, expected_reports, reason = expected_output(request, choice)
        assert (tokens, reports) == (tuple(expected_tokens), tuple(expected_reports))
        assert outputs[-1].finish_reason is reason
    else:
        expected = expected_sequences(request)[choice]
        assert (tokens, reports) == (expected.beam.tokens, expected.beam.reports)
        assert outputs[-1].beam.score == expected.score
        assert outputs[-1].finish_reason is expected.reason


def test_beams_beside_others_change_neither():
    search = make_search(width=4, max_tokens=12)
    others = [make_request(f"b{index}", max_tokens=4, seed=1) for index in range(3)]
    together = run(make_engine(), search, *others)
    for request in (search, *others):
        alone = run(make_engine(), request)
        assert tokens_of(together[request.request_id, 0]) == tokens_of(alone[request.request_id, 0])
