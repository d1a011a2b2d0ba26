"""Fair shares in the whole scheduler."""

from dataclasses import replace

import pytest

from bench.fairness_bound import worst_of
from tests.scheduler.driving import make_engine, make_request, run


def test_what_clients_get_differs_by_no_more_than_the_paper_s_bound():
    assert worst_of(200, "fair") <= 1


def test_first_come_first_served_does_not_keep_the_bound():
    assert worst_of(200, "fcfs") > 1


def test_a_flood_delays_another_client_s_first_token_by_one_step_at_most():
    """As soon as a place is free it is the other one's."""
    engine = make_engine(num_blocks=64, policy="fair", max_num_seqs=4)
    for index in range(50):
        engine.add(replace(make_request(f"flood {index}", 6, 4), client="flood"))
    engine.step()
    engine.add(replace(make_request("other", 6, 4), client="other"))
    plans = len(engine.runner.plans)
    run(engine)
    admitted = [[entry.key for entry in plan.admitted] for plan in engine.runner.plans[plans:]]
    assert next(keys for keys in admitted if keys)[0] == ":other/0"


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_lower_tier_passes_all_that_wait(policy):
    engine = make_engine(policy=policy, max_num_seqs=1)
    for name, tier in (("a", 0), ("b", 0), ("c", 1), ("vip", -1)):
        engine.add(replace(make_request(name), tier=tier))
    run(engine)
    order = [entry.key for plan in engine.runner.plans for entry in plan.admitted]
    assert order == [":vip/0", ":a/0", ":b/0", ":c/0"]
