"""An engine's counters, against counts by hand or from the plans."""

from dataclasses import fields, replace

from scheduler.interface import EngineLoad, EngineStats
from tests.scheduler.driving import make_engine, make_request, run


def test_an_engine_that_has_ended_has_no_load_and_has_counted():
    counted = EngineStats(prefix_queries=3, prefix_hits=2, preemptions=1, steps=7, scheduled_tokens=9)
    loaded = replace(counted, **{one.name: 5 for one in fields(EngineLoad)})
    assert loaded.num_background_waiting == loaded.num_running == 5
    assert loaded.ended() == counted


def test_what_a_step_computes_of_prompts_and_beyond_them():
    engine = make_engine(max_num_batched_tokens=8, prefix_caching=False)
    for request in (make_request("a", 3, 5), make_request("b", 20, 2), make_request("c", 2, 1)):
        engine.add(request)
    seen = []
    while engine.has_work:
        engine.step()
        stats = engine.stats()
        seen.append((stats.steps_done, stats.prefill_tokens, stats.decode_tokens))
    # Steps of a 3, b 5; a 1, b 7, twice; a 1, b its last, c 2; a 1, b 1.
    assert seen == [(1, 8, 0), (2, 15, 1), (3, 22, 2), (4, 25, 3), (5, 25, 5)]


def test_what_was_preempted_is_computed_like_a_prompt():
    engine = make_engine(num_blocks=5, prefix_caching=False)
    run(engine, make_request("old", 8, 8), make_request("new", 7, 9))
    again = [a for plan in engine.runner.plans for a in plan.admitted if len(a.tokens) > a.num_prompt]
    stats = engine.stats()
    assert stats.prefill_tokens == 8 + 7 + sum(len(one.tokens) for one in again)
    assert stats.decode_tokens == (8 - 1) + (9 - 1) - len(again)  # the first token comes with the prompt, and again
    assert stats.steps_done == len(engine.runner.plans)


def test_seconds_are_those_that_steps_took():
    ticks = iter(range(1000))
    engine = make_engine()
    engine._clock = lambda: next(ticks)  # twice a step: when it begins, and when its result is there
    run(engine, make_request("a", 6, 4))
    assert engine.stats().step_s == engine.stats().steps_done == 4


def test_every_block_is_held_cached_or_free():
    engine = make_engine(num_blocks=8)  # of 4 tokens
    engine.add(make_request("a", 9, 4))
    seen = []
    while engine.has_work:
        engine.step()
        seen.append((engine.stats().kv_held_blocks, engine.stats().kv_cached_blocks))
    assert seen == [(3, 0)] * 3 + [(0, 3)]  # 12 tokens computed, of the last one nothing is
    engine.add(make_request("b", 9, 1))
    engine.scheduler.schedule()
    assert (engine.stats().kv_held_blocks, engine.stats().kv_cached_blocks) == (3, 1)  # it shares two of the three
