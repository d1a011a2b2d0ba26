"""What is kept of an engine's numbers when it has ended."""

from dataclasses import fields, replace

from scheduler.interface import EngineLoad, EngineStats


def test_an_engine_that_has_ended_has_no_load_and_has_counted():
    counted = EngineStats(prefix_queries=3, prefix_hits=2, preemptions=1, steps=7, scheduled_tokens=9)
    loaded = replace(counted, **{one.name: 5 for one in fields(EngineLoad)})
    assert loaded.num_background_waiting == loaded.num_running == 5
    assert loaded.ended() == counted
