"""Cost per step of a choice that waits at the head of the queue, and its updates when the cache changes."""

from dataclasses import replace

import pytest

from scheduler.prefix_cache import Lookup, PrefixCache
from tests.scheduler.driving import make_engine, make_request, run, tokens_of
from tests.scheduler.simulated_world import expected_output


@pytest.fixture
def lookups(monkeypatch):
    """How many names each look into the prefix cache asked for."""
    asked = []
    lookup = PrefixCache.lookup

    def counted(self, names):
        names = list(names)
        asked.append(len(names))
        return lookup(self, names)

    monkeypatch.setattr(PrefixCache, "lookup", counted)
    return asked


def elsewhere(request, first):
    """The request with a prompt of other tokens."""
    return replace(request, prompt=tuple(range(first, first + len(request.prompt))))


def test_a_head_is_looked_up_anew_only_when_the_cache_changes_where_it_looks(lookups):
    engine = make_engine(num_blocks=12)
    requests = [make_request("old", 8, 30), make_request("head", 46, 2)]
    outputs = run(engine, *requests)
    assert engine.stats().steps >= 30
    assert lookups == [1, 11, 11]  # "old", the head before the prompt that they share was computed, and after
    assert outputs[":head", 0][0].num_cached_tokens == 8
    for request in requests:
        assert tokens_of(outputs[request.request_id, 0]) == expected_output(request, 0)[0]


def test_a_head_does_not_count_on_blocks_that_were_evicted_while_it_waited(lookups):
    engine = make_engine(num_blocks=12)
    run(engine, make_request("first", 24, 1))
    lookups.clear()
    requests = [elsewhere(make_request("old", 8, 30), 24), make_request("head", 44, 2)]
    outputs = run(engine, *requests)
    assert lookups[:2] == [1, 10]
    assert set(lookups[2:]) == {10}
    assert 2 < len(lookups) < 10  # one for each block that was taken from it
    assert outputs[":head", 0][0].num_cached_tokens < 24
    for request in requests:
        assert tokens_of(outputs[request.request_id, 0]) == expected_output(request, 0)[0]


def test_choices_that_wait_for_their_siblings_prompt_look_once(lookups):
    engine = make_engine(max_num_batched_tokens=6)
    run(engine, make_request("a", 40, 2, n=3))
    assert engine.stats().steps > 7
    assert len(lookups) <= 3 + 40 // 6 + 1  # the prompt's own blocks are found as they come


def test_a_lookup_says_what_changes_it():
    cache, names = PrefixCache(), [bytes([i]) for i in range(5)]
    cache.insert(names[0], 7)
    cache.insert(names[1], 8)

    def after(change):
        held = cache.lookup(names)
        lookup = Lookup(held, names[len(held) : len(held) + 1])
        cache.followed = [lookup]
        change()
        return lookup.is_current

    assert after(lambda: cache.insert(b"other", 1))
    assert after(lambda: cache.insert(names[3], 2))  # of no use without the one before it
    assert after(lambda: cache.forget(1))
    assert after(lambda: cache.forget(2))
    assert not after(lambda: cache.forget(7))
    cache.insert(names[0], 9)
    assert not after(lambda: cache.insert(names[2], 3))
    assert after(lambda: cache.insert(names[2], 4))  # the name has a block
