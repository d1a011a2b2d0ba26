"""Who computes what in which step, read off the plans."""

from dataclasses import replace

import pytest

from model_runner.contract import StepPlan
from tests.scheduler.driving import make_engine, make_request, run, shares, tokens_of
from tests.scheduler.simulated_world import expected_output, expected_prompt_logprobs

# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_into_chunks_that_share_steps_with_decoding():
    engine = make_engine(max_num_batched_tokens=8, prefix_caching=False)
    run(engine, make_request("a", 3, 5), make_request("b", 20, 2), make_request("c", 2, 1))
    assert [shares(plan) for plan in engine.runner.plans] == [
        {"a/0": 3, "b/0": 5},
        {"a/0": 1, "b/0": 7},
        {"a/0": 1, "b/0": 7},
        {"a/0": 1, "b/0": 1, "c/0": 2},
        {"a/0": 1, "b/0": 1},
    ]


def test_no_more_than_max_num_seqs_run_and_the_rest_follows_in_order():
    engine = make_engine(max_num_seqs=2)
    run(engine, *(make_request(name, 4, 2) for name in "abcde"))
    admitted = [[a.key for a in plan.admitted] for plan in engine.runner.plans if plan.admitted]
    assert admitted == [[":a/0", ":b/0"], [":c/0", ":d/0"], [":e/0"]]


def test_a_small_request_does_not_overtake_one_that_does_not_fit():
    engine = make_engine(num_blocks=4, prefix_caching=False)
    run(engine, make_request("a", 5, 3), make_request("big", 10, 2), make_request("small", 1, 1))
    order = [a.key for plan in engine.runner.plans for a in plan.admitted]
    assert order == [":a/0", ":big/0", ":small/0"]
    assert not any({":a/0", ":small/0"} <= {share.key for share in plan.scheduled} for plan in engine.runner.plans)


def test_a_plan_without_work_is_empty_and_changes_nothing():
    engine = make_engine()
    assert engine.scheduler.schedule() == StepPlan((), (), (), ())
    assert engine.step() == []
    assert engine.runner.plans == []
    assert engine.stats().steps == 0


def test_released_keys_wait_for_a_plan_that_reaches_the_runner():
    engine = make_engine()
    run(engine, make_request("a"))
    assert engine.step() == []
    run(engine, make_request("a"))  # the same key: released and admitted in one plan
    plan = next(plan for plan in engine.runner.plans if plan.released)
    assert plan.released == (":a/0",) == tuple(a.key for a in plan.admitted)


# -- preemption --------------------------------------------------------------------------------------------------------


def test_out_of_blocks_the_newest_goes_and_comes_back_with_its_output():
    engine = make_engine(num_blocks=5, prefix_caching=False)
    requests = [make_request("old", 8, 8), make_request("new", 7, 9)]
    outputs = run(engine, *requests)
    for request in requests:
        assert tokens_of(outputs[request.request_id, 0]) == expected_output(request, 0)[0]
    again = [a for plan in engine.runner.plans for a in plan.admitted if len(a.tokens) > a.num_prompt]
    assert [(a.key, a.num_prompt, a.num_computed) for a in again] == [(":new/0", 7, 0)]
    assert again[0].tokens[7:] == tuple(expected_output(requests[1], 0)[0][: len(again[0].tokens) - 7])
    assert engine.stats().preemptions == 1


def test_a_preempted_choice_finds_its_own_blocks_again():
    engine = make_engine(num_blocks=6)
    outputs = run(engine, make_request("old", 8, 8), make_request("new", 8, 8, seed=3))
    again = [a for plan in engine.runner.plans for a in plan.admitted if len(a.tokens) > a.num_prompt]
    assert again
    assert all(a.num_computed >= 4 for a in again)
    assert {output.num_cached_tokens for output in outputs[":new", 0]} == {0}  # saved nothing that was not lost before
    assert (engine.stats().prefix_queries, engine.stats().prefix_hits) == (16, 0)


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", ":vip/0"), ("priority", ":slow/0")])
def test_the_policy_names_the_victim(policy, victim):
    engine = make_engine(num_blocks=4, prefix_caching=False, policy=policy)
    engine.add(replace(make_request("slow", 8, 8), priority=5))
    engine.step()  # it runs before the other one arrives
    run(engine, replace(make_request("vip", 4, 8), priority=1))
    released = [key for plan in engine.runner.plans for key in plan.released]
    assert released[0] == victim


def test_under_the_fair_policy_a_preempted_choice_keeps_its_turn():
    engine = make_engine(num_blocks=5, prefix_caching=False, policy="fair")
    requests = [make_request("old", 8, 8), make_request("new", 7, 9), make_request("last", 7, 2)]
    run(engine, *(replace(request, cache_salt=request.request_id) for request in requests))
    admissions = [a.key for plan in engine.runner.plans for a in plan.admitted]
    assert admissions == [":old/0", ":new/0", ":new/0", ":last/0"]


def test_preempted_in_mid_prompt_prompt_logprobs_start_over_and_come_once():
    engine = make_engine(num_blocks=9, max_num_batched_tokens=4, prefix_caching=False)
    slow = make_request("slow", 24, 2, prompt_logprobs=0)
    outputs = run(engine, make_request("old", 8, 12), slow)
    assert engine.stats().preemptions == 1
    assert list(outputs[":slow", 0][0].prompt_logprobs) == expected_prompt_logprobs(slow)
    admissions = [a for plan in engine.runner.plans for a in plan.admitted if a.key == ":slow/0"]
    assert [(len(a.tokens), a.sampling.prompt_logprobs) for a in admissions] == [(24, 0), (24, 0)]


def test_preempted_after_delivery_prompt_logprobs_are_not_asked_for_again():
    engine = make_engine(num_blocks=5, prefix_caching=False)
    outputs = run(engine, make_request("old", 8, 8), make_request("new", 7, 9, prompt_logprobs=0))
    admissions = [a for plan in engine.runner.plans for a in plan.admitted if a.key == ":new/0"]
    assert [a.sampling.prompt_logprobs for a in admissions] == [0, None]
    assert [len(output.prompt_logprobs) for output in outputs[":new", 0]] == [6] + [0] * 8


# -- prefix cache ------------------------------------------------------------------------------------------------------


def test_a_prefix_is_computed_once_and_counted():
    engine = make_engine()
    run(engine, make_request("a", 9, 2))
    outputs = run(engine, make_request("b", 9, 2), make_request("c", 11, 2))
    assert [outputs[key][0].num_cached_tokens for key in [(":b", 0), (":c", 0)]] == [8, 8]
    assert (engine.stats().prefix_queries, engine.stats().prefix_hits) == (29, 16)
    assert engine.stats().kv_usage == 0.0


def test_the_last_token_is_always_computed():
    engine = make_engine()
    run(engine, make_request("a", 8, 2))
    outputs = run(engine, make_request("b", 8, 2))
    assert outputs[":b", 0][0].num_cached_tokens == 4


@pytest.mark.parametrize("length", [3, 8, 9, 21])
def test_what_a_prompt_adds_to_the_cache_is_what_it_finds_next_time(length: int):
    engine = make_engine()
    run(engine, make_request("a", 9, 2))
    first = run(engine, make_request("b", length, 2))[":b", 0][0]
    again = run(engine, make_request("c", length, 2))[":c", 0][0]
    assert again.num_cached_tokens == first.num_cached_tokens + first.num_written_tokens
    assert again.num_written_tokens == 0


def test_salts_do_not_share():
    engine = make_engine()
    run(engine, replace(make_request(), request_id="red:a", cache_salt="red"))
    outputs = run(engine, replace(make_request(), request_id="blue:a", cache_salt="blue"))
    assert outputs["blue:a", 0][0].num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_looked_up():
    engine = make_engine(prefix_caching=False)
    run(engine, make_request("a", 9, 2))
    outputs = run(engine, make_request("b", 9, 2))
    assert outputs[":b", 0][0].num_cached_tokens == 0
    assert engine.stats().prefix_queries == 0


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it():
    engine = make_engine(max_num_batched_tokens=5)
    request = make_request("a", 9, 2, prompt_logprobs=0)
    run(engine, request)
    outputs = run(engine, replace(request, request_id=":b"))[":b", 0]
    assert outputs[0].num_cached_tokens == 0
    assert list(outputs[0].prompt_logprobs) == expected_prompt_logprobs(request)
    assert run(engine, make_request("c", 9, 2))[":c", 0][0].num_cached_tokens == 8


def test_output_is_found_as_a_prefix_too():
    engine = make_engine()
    request = make_request("a", 9, 6)
    tokens = tokens_of(run(engine, request)[":a", 0])
    follow_up = replace(request, request_id=":b", prompt=(*request.prompt, *tokens), max_tokens=0)
    assert run(engine, follow_up)[":b", 0][0].num_cached_tokens == 12  # the last token's KV was never computed
