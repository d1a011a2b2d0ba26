"""Room for the candidates of contrastive search, read off the plans."""

import pytest

from model_runner.contract import ChoiceResult, StepResult
from scheduler.block_pool import IntegrityError
from tests.scheduler.driving import make_engine, make_request, run, shares, tokens_of
from tests.scheduler.simulated_world import expected_output


def searching(name="a", num_prompt=6, max_tokens=4, top_k=3, **fields):
    return make_request(name, num_prompt, max_tokens, top_k=top_k, penalty_alpha=0.5, temperature=0.0, **fields)


def candidates(plan):
    return {share.key.strip(":"): share.num_candidates for share in plan.scheduled}


def test_the_first_step_only_looks_and_every_other_one_brings_a_token():
    engine = make_engine()
    request = searching(max_tokens=4)
    outputs = run(engine, request)[":a", 0]
    assert [shares(plan)["a/0"] for plan in engine.runner.plans] == [6, 1, 1, 1, 1]
    assert [candidates(plan)["a/0"] > 0 for plan in engine.runner.plans] == [False, True, True, True, True]
    assert [len(output.tokens) for output in outputs] == [1, 1, 1, 1]
    assert {output.num_rejected for output in outputs} == {0}
    assert tokens_of(outputs) == expected_output(request, 0)[0]


def test_without_budget_for_all_candidates_a_choice_waits_and_others_go_on():
    engine = make_engine(max_num_batched_tokens=5, max_num_seqs=3)
    requests = [searching("a", 1, 6, top_k=4), searching("b", 1, 6, top_k=4), make_request("c", 1, 9)]
    outputs = run(engine, *requests)
    for request in requests:
        assert tokens_of(outputs[request.request_id, 0]) == expected_output(request, 0)[0]
    assert any("c/0" in shares(plan) and len(plan.scheduled) == 2 for plan in engine.runner.plans)
    for plan in engine.runner.plans:
        assert sum(shares(plan).values()) + sum(candidates(plan).values()) <= 5


def test_out_of_blocks_for_candidates_the_newest_goes():
    engine = make_engine(num_blocks=6, prefix_caching=False)
    requests = [searching("old", 8, 8), searching("new", 7, 9)]
    outputs = run(engine, *requests)
    for request in requests:
        assert tokens_of(outputs[request.request_id, 0]) == expected_output(request, 0)[0]
    assert engine.stats().preemptions > 0
    assert engine.stats().kv_usage == 0.0


def test_every_position_is_computed_and_found_by_others():
    engine = make_engine()
    run(engine, make_request("a", 9, 2))
    assert run(engine, searching("b", 9, 2))[":b", 0][0].num_cached_tokens == 0
    engine = make_engine()
    run(engine, searching("b", 9, 2, n=2))
    assert not any(plan.copies for plan in engine.runner.plans)
    assert run(engine, make_request("a", 9, 2))[":a", 0][0].num_cached_tokens == 8


def test_nothing_to_generate_ends_with_the_look():
    engine = make_engine()
    (output,) = run(engine, searching(max_tokens=0))[":a", 0]
    assert (output.tokens, output.finish_reason) == ((), "length")
    assert len(engine.runner.plans) == 1


def test_what_never_fits_is_refused():
    engine = make_engine(num_blocks=4, max_num_batched_tokens=8)
    with pytest.raises(ValueError, match="1 token and 8 candidates in one step, but max_num_batched_tokens is 8"):
        engine.add(searching(top_k=8))
    with pytest.raises(ValueError, match=r"12 prompt . 2 output tokens and 3 candidates, but the cache has 4"):
        engine.add(searching(num_prompt=12, max_tokens=2, top_k=3))
    run(engine, searching(num_prompt=12, max_tokens=2, top_k=2))


@pytest.mark.parametrize(("step", "tokens"), [(0, (5,)), (1, ())])
def test_a_runner_that_breaks_the_contract_is_noticed(step, tokens):
    """A token without candidates, none with them."""
    engine = make_engine()
    engine.add(searching())
    for _ in range(step):
        engine.step()
    plan = engine.scheduler.schedule()
    with pytest.raises(IntegrityError):
        engine.scheduler.update(plan, StepResult((ChoiceResult(":a/0", tokens),)))
