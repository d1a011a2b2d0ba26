"""How choices begin together, resume, end, are aborted or refused."""

from dataclasses import replace

import pytest

from model_runner.contract import ChoiceResult, Failure, SamplingParams, StepResult
from scheduler.block_pool import IntegrityError
from scheduler.engine import Engine
from scheduler.interface import ChoiceState, FinishReason
from scheduler.scheduler import Scheduler
from tests.scheduler.driving import CONFIG, make_engine, make_request, run, shares, tokens_of
from tests.scheduler.simulated_runner import SimulatedRunner
from tests.scheduler.simulated_world import expected_output, expected_prompt_logprobs, make_groups

# -- several choices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_prompt", "num_shared", "num_copies"), [(6, 1, 2), (8, 1, 2), (9, 2, 0), (1, 0, 0)])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_siblings_fork_the_prompt_and_compute_its_last_token(num_prompt, num_shared, num_copies, prefix_caching):
    engine = make_engine(prefix_caching=prefix_caching)
    request = make_request("a", num_prompt, 3, n=3)
    outputs = run(engine, request)
    assert [tokens_of(outputs[":a", index]) for index in range(3)] == [expected_output(request, i)[0] for i in range(3)]
    first, second = engine.runner.plans[:2]
    if num_prompt == 1:
        assert shares(first) | shares(second) == {f"a/{index}": 1 for index in range(3)}
        return
    assert shares(first) == {"a/0": num_prompt}
    assert shares(second) == {"a/0": 1, "a/1": 1, "a/2": 1}
    leader = first.admitted[0].blocks
    for forked in second.admitted:
        assert forked.forked_from == ":a/0"
        assert forked.num_computed == num_prompt - 1
        assert forked.blocks[:num_shared] == leader[:num_shared]
        assert not set(forked.blocks[num_shared:]) & set(leader)
    assert len(second.copies) == num_copies
    assert all(source == leader[num_shared] for source, _, _ in second.copies)


def test_siblings_of_a_chunked_prompt_wait_for_all_of_it():
    engine = make_engine(max_num_batched_tokens=4)
    run(engine, make_request("a", 10, 3, n=2))
    assert [shares(plan) for plan in engine.runner.plans[:4]] == [
        {"a/0": 4},
        {"a/0": 4},
        {"a/0": 2},
        {"a/0": 1, "a/1": 1},
    ]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_siblings_of_a_choice_that_is_gone_start_on_their_own(max_tokens):
    engine = make_engine()
    request = make_request("a", 6, max_tokens, n=3)
    outputs = run(engine, request)
    assert [tokens_of(outputs[":a", index]) for index in range(3)] == [expected_output(request, i)[0] for i in range(3)]
    assert not any(plan.copies for plan in engine.runner.plans)


def test_siblings_of_an_aborted_choice_start_on_their_own():
    engine = make_engine(max_num_batched_tokens=4)
    engine.add(make_request("a", 10, 2, n=2))
    engine.step()
    engine.abort(":a", 0)
    outputs = run(engine)
    assert list(outputs) == [(":a", 1)]
    assert tokens_of(outputs[":a", 1]) == expected_output(make_request("a", 10, 2, n=2), 1)[0]


def test_choice_0_alone_delivers_prompt_logprobs():
    outputs = run(make_engine(), make_request("a", 6, 2, n=3, prompt_logprobs=0))
    assert [len(outputs[":a", index][0].prompt_logprobs) for index in range(3)] == [5, 0, 0]


def test_a_fork_reports_what_its_sibling_found_in_the_cache():
    engine = make_engine()
    cold = run(engine, make_request("a", 9, 2, n=2))
    warm = run(engine, make_request("b", 9, 2, n=2))
    assert [outputs[0].num_cached_tokens for outputs in [*cold.values(), *warm.values()]] == [0, 0, 8, 8]


# -- beginnings and ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_done", [1, 3, 4])
def test_a_resumed_request_goes_on_where_it_was(num_done):
    request = make_request("a", 6, 4, logprobs=0, prompt_logprobs=0)
    tokens, logprobs, reason = expected_output(request, 0)
    resumed = replace(request, choices=(ChoiceState(0, tuple(tokens[:num_done])),))
    outputs = run(make_engine(), resumed)[":a", 0]
    assert tokens_of(outputs) == tokens[num_done:]
    assert [item for output in outputs for item in output.logprobs] == logprobs[num_done:]
    assert [output.prompt_logprobs for output in outputs] == [()] * len(outputs)
    assert outputs[-1].finish_reason is reason


def test_resumed_siblings_compute_their_prompt_once():
    request = make_request("a", 9, 4, n=3)
    states = tuple(ChoiceState(index, tuple(expected_output(request, index)[0][:2])) for index in range(3))
    engine = make_engine(prefix_caching=False)
    outputs = run(engine, replace(request, choices=states))
    assert [tokens_of(outputs[":a", i]) for i in range(3)] == [expected_output(request, i)[0][2:] for i in range(3)]
    assert [a.num_computed for plan in engine.runner.plans for a in plan.admitted] == [0, 8, 8]


def test_a_stop_token_ends_a_choice_and_is_its_last_token():
    tokens = expected_output(make_request("a"), 0)[0]
    (*_, last) = run(make_engine(), make_request("a", stop_token_ids=(tokens[2],)))[":a", 0]
    assert (last.tokens, last.finish_reason, last.stop_token_id) == ((tokens[2],), FinishReason.STOP, tokens[2])


def test_no_tokens_asked_for_still_bring_the_prompt():
    request = make_request("a", 6, 0, prompt_logprobs=0, logprobs=0)
    (output,) = run(make_engine(), request)[":a", 0]
    assert (output.tokens, output.logprobs, output.finish_reason) == ((), (), FinishReason.LENGTH)
    assert list(output.prompt_logprobs) == expected_prompt_logprobs(request)


def test_an_error_ends_its_choice_alone_and_takes_its_blocks_out_of_the_cache():
    engine = make_engine()
    healthy = make_request("healthy", 9, 6)
    seed = next(
        s for s in range(1000) if expected_output(replace(healthy, sampling=SamplingParams(seed=s)), 0)[2] == "error"
    )
    sick = replace(healthy, request_id=":sick", sampling=SamplingParams(seed=seed))
    outputs = run(engine, sick)[":sick", 0]
    assert (outputs[-1].finish_reason, outputs[-1].error) == (FinishReason.ERROR, Failure("the logits are not finite"))
    both = run(engine, healthy, replace(sick, request_id=":again"))
    assert both[":healthy", 0][0].num_cached_tokens == 0
    assert tokens_of(both[":healthy", 0]) == expected_output(healthy, 0)[0]
    assert engine.stats().kv_usage == 0.0


@pytest.mark.parametrize("n", [1, 2])
def test_nothing_that_a_failed_choice_wrote_is_found_again(n):
    """Neither what it held and what it had given back, nor what a sibling goes on with. All of it is damaged here."""
    engine = make_engine(groups=make_groups(CONFIG, 32), max_num_batched_tokens=8)
    healthy = make_request("healthy", 29, 6)

    def fails(seed):
        """After one token, and the sibling not at all."""
        outputs = [expected_output(replace(healthy, sampling=SamplingParams(seed=seed)), index) for index in range(2)]
        return outputs[0][2] == "error" and len(outputs[0][0]) == 1 and outputs[1][2] != "error"

    seed = next(seed for seed in range(10_000) if fails(seed))
    choices = tuple(ChoiceState(index) for index in range(n))
    outputs = run(engine, replace(healthy, request_id=":sick", sampling=SamplingParams(seed=seed), choices=choices))
    assert outputs[":sick", 0][-1].finish_reason is FinishReason.ERROR
    engine.runner.kvs[:] = [[["damaged"] * len(block) for block in group] for group in engine.runner.kvs]
    engine.runner.kv = engine.runner.kvs[0]
    for name, num_prompt, num_cached in (("first", 29, 0), ("second", 29, 28), ("shorter", 17, 16)):
        request = make_request(name, num_prompt)
        (first, *others) = run(engine, request)[request.request_id, 0]
        assert first.num_cached_tokens == num_cached
        assert tokens_of([first, *others]) == expected_output(request, 0)[0]


# -- abort -------------------------------------------------------------------------------------------------------------


def test_abort_frees_the_blocks_at_once_and_tells_the_runner_next():
    engine = make_engine()
    engine.add(make_request("a", 6, 4))
    engine.add(make_request("b", 6, 4))
    engine.step()
    used = engine.stats().kv_usage
    engine.abort(":a")
    assert 0 < engine.stats().kv_usage < used
    assert {output.request_id for output in engine.step()} == {":b"}
    assert engine.runner.plans[-1].released == (":a/0",)


def test_abort_while_waiting_is_no_news_to_the_runner():
    engine = make_engine(max_num_seqs=1)
    engine.add(make_request("a"))
    engine.add(make_request("b"))
    engine.step()
    engine.abort(":b")
    run(engine)
    assert not any(":b/0" in plan.released for plan in engine.runner.plans)


def test_abort_of_the_unknown_and_the_finished_does_nothing():
    engine = make_engine()
    engine.abort(":nobody")
    engine.abort(":nobody", 3)
    engine.add(make_request("a", n=2))
    engine.abort(":a", 7)
    outputs = run(engine)
    engine.abort(":a")
    assert len(outputs) == 2
    engine.check_integrity()


def test_a_result_that_comes_after_the_abort_is_dropped_also_when_the_id_is_back():
    engine = make_engine()
    engine.add(make_request("a"))
    plan = engine.scheduler.schedule()
    engine.abort(":a")
    engine.add(make_request("a", seed=4))
    assert engine.scheduler.update(plan, engine.runner.execute(plan)) == []
    assert tokens_of(run(engine)[":a", 0]) == expected_output(make_request("a", seed=4), 0)[0]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ()}, "empty prompt"),
        ({"max_tokens": -1}, "max_tokens must be at least 0, not -1"),
        ({"prompt": (0,) * 40, "max_tokens": 25}, "40 prompt .* 25 output tokens = 65, but the context holds 64"),
        ({"guide": (0,) * 61, "sampling": SamplingParams(guidance=1.5)}, "61 prompt .* 4 output tokens = 65"),
        ({"prompt": (0,) * 30, "max_tokens": 11}, "needs 11 KV blocks of 4 tokens .* the cache has 10"),
        ({"choices": ()}, "choice indices must be distinct"),
        ({"choices": (ChoiceState(1), ChoiceState(1))}, r"not \[1, 1\]"),
        ({"choices": (ChoiceState(-1),)}, r"not \[-1\]"),
        (
            {"max_tokens": 1, "choices": (ChoiceState(0, (1, 2)),)},
            "resumed with 2 output tokens, more than its max_tokens of 1",
        ),
    ],
)
def test_add_refuses_what_can_never_run(change, message):
    engine = make_engine(num_blocks=10)
    with pytest.raises(ValueError, match=message):
        engine.add(replace(make_request(), **change))
    assert not engine.has_work
    assert engine.stats().num_waiting == 0


def test_a_request_that_fills_the_cache_to_the_brim_runs():
    request = make_request("a", 30, 10)
    assert tokens_of(run(make_engine(num_blocks=10), request)[":a", 0]) == expected_output(request, 0)[0]


def test_add_refuses_an_id_in_use_and_takes_it_again_later():
    engine = make_engine()
    engine.add(make_request("a"))
    with pytest.raises(ValueError, match="':a' is already in use"):
        engine.add(make_request("a"))
    run(engine)
    assert run(engine, make_request("a"))


def test_limits_below_one_and_pools_that_differ_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Scheduler(replace(CONFIG, max_num_batched_tokens=0), 8)
    with pytest.raises(ValueError, match="at least 1"):
        Scheduler(CONFIG, 0)
    with pytest.raises(ValueError, match="8 KV blocks, the runner 9"):
        Engine(Scheduler(CONFIG, 8), SimulatedRunner(9, 4))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ChoiceResult(":b/0", (1,)), "returned ':b/0' instead of ':a/0'"),
        (ChoiceResult(":a/0", ()), "got 0 tokens with 0 to compute"),
    ],
)
def test_a_runner_that_breaks_the_contract_is_found_out(answer, message):
    scheduler = Scheduler(CONFIG, 8)
    scheduler.add(make_request("a"))
    plan = scheduler.schedule()
    with pytest.raises(IntegrityError, match=message):
        scheduler.update(plan, StepResult((answer,)))


# -- books -------------------------------------------------------------------------------------------------------------


def test_stats_are_a_snapshot_with_growing_counters():
    engine = make_engine(num_blocks=20, max_num_seqs=1, prefix_caching=False)
    engine.add(make_request("a", 6, 3))
    engine.add(make_request("b", 6, 3))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (1, 1, 2 / 20)
    assert (stats.steps, stats.scheduled_tokens) == (1, 6)
    run(engine)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert (stats.steps, stats.scheduled_tokens, stats.preemptions) == (6, 16, 0)
    assert stats.steps_by_tokens[:3] == (4, 2, 0)  # decodes of 1 token, prompts of 6
    assert sum(stats.steps_by_tokens) == stats.steps


def test_integrity_sees_a_lost_choice_and_uncovered_tokens():
    engine = make_engine()
    engine.add(make_request("a"))
    engine.step()
    (request,) = engine.scheduler._running.values()
    request.num_computed = 9
    with pytest.raises(IntegrityError, match="9 of 7 tokens computed, its blocks cover 8"):
        engine.check_integrity()
    request.num_computed = 6
    engine.scheduler._choices._live.clear()
    with pytest.raises(IntegrityError, match=r"0 live != 1 running \+ 0 waiting"):
        engine.check_integrity()
