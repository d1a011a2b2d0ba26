"""Followers of the log know the cache's contents, compared with the KV itself."""

from dataclasses import replace

import pytest

from model_runner.contract import Contrastive, SamplingParams
from scheduler.engine import Engine
from scheduler.interface import BeamSearch
from scheduler.prefix_cache import AllBlocksCleared, BlockRemoved, BlockStored, CacheLog
from scheduler.scheduler import Scheduler
from tests.scheduler.driving import CONFIG, RecordingRunner, make_request, run
from tests.scheduler.simulated_runner import extend_hash
from tests.scheduler.simulated_world import World
from tests.scheduler.test_random_traffic import WORLDS

PLAIN = ""


class Follower:
    """Knows the prefixes that can be found, as hashes of all their tokens, from nothing but events."""

    def __init__(self):
        self.found = {}  # name -> hash of the prefix
        self.met = {}  # the same of every block that there ever was
        self.num_events = 0

    def apply(self, events):
        for event in events:
            self.num_events += 1
            match event:
                case BlockStored(name, parent, tokens):
                    assert name not in self.found, "stored twice"
                    history = 0 if parent is None else self.met[parent]
                    for token in tokens:
                        history = extend_hash(history, token)
                    self.found[name] = self.met[name] = history
                case BlockRemoved(name):
                    del self.found[name]
                case AllBlocksCleared():
                    self.found.clear()


class FollowedWorld(World):
    def _start_engine(self):
        super()._start_engine()
        self.log = CacheLog()
        self.scheduler = Scheduler(self.config, self.num_blocks, cache_log=self.log)
        self.follower = getattr(self, "follower", None) or Follower()
        self.has_told = False  # a new engine does with its first block

    def _step(self):
        super()._step()
        events = self.log.take()
        self.tally["silent"] += not events
        self.follower.apply(events)
        self.has_told |= bool(events)
        kept = [self.runner.kv[block][-1] for block in self.scheduler._sharing._cache]
        known = set(self.follower.found.values()) if self.has_told else set()
        assert known == {history for salt, history in kept if salt == PLAIN}
        self.tally["salted"] += any(salt != PLAIN for salt, _ in kept)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(("seed", "config", "num_blocks"), [(i, *world) for i, world in enumerate(WORLDS)])
def test_events_are_what_the_cache_holds(seed, config, num_blocks, runs_ahead):
    world = FollowedWorld(seed, config, num_blocks, num_draft=seed % 2, runs_ahead=runs_ahead).run(num_steps=1000)
    assert world.preemptions > 0
    if not config.prefix_caching:
        assert world.follower.num_events == 0
        return
    assert world.follower.num_events > 100
    assert world.tally["salted"] > 100
    assert world.tally["silent"] > 100 or config.block_size == 1


@pytest.mark.parametrize("method", ["note_stored", "note_removed"])
def test_an_event_that_is_missing_is_caught(method, monkeypatch):
    note = getattr(CacheLog, method)

    def forgetful(self, name, *args):
        if name[0] % 16:
            note(self, name, *args)

    monkeypatch.setattr(CacheLog, method, forgetful)
    with pytest.raises((AssertionError, KeyError)):
        FollowedWorld(0, *WORLDS[0]).run(num_steps=1000)


def followed_engine(num_blocks=32):
    log = CacheLog()
    scheduler = Scheduler(CONFIG, num_blocks, cache_log=log)
    return Engine(scheduler, RecordingRunner(num_blocks, CONFIG.block_size)), log


def test_a_prompt_is_told_block_by_block_after_the_end_of_what_was_before():
    engine, log = followed_engine()
    assert log.take() == []
    request = make_request(num_prompt=9, max_tokens=0)
    run(engine, request)
    cleared, first, second = log.take()
    assert cleared == AllBlocksCleared()
    assert (first.parent, first.tokens) == (None, request.prompt[:4])
    assert (second.parent, second.tokens) == (first.name, request.prompt[4:8])
    run(engine, replace(request, request_id=":again"))
    assert log.take() == []


@pytest.mark.parametrize("change", [{"cache_salt": "red", "request_id": "red:a"}, {"contrastive": True}])
def test_what_a_plain_prompt_does_not_find_is_not_told(change):
    engine, log = followed_engine(num_blocks=4)
    request = make_request(num_prompt=9, max_tokens=2)
    if change.pop("contrastive", False):
        contrastive = Contrastive(0.2, 1.0, 1.0, 0.5)
        change["sampling"] = replace(request.sampling, contrastive=contrastive)
    run(engine, replace(request, **change))
    assert log.take() == []
    run(engine, make_request("b", num_prompt=9, max_tokens=2))
    names = {event.name for event in log.take() if isinstance(event, BlockStored)}
    run(engine, replace(request, **change))  # in the place of those
    removed = {event.name for event in log.take()}
    assert removed
    assert removed <= names


@pytest.mark.parametrize(
    "change",
    [
        {"beam_search": BeamSearch(3)},
        {"beam_search": BeamSearch(4, groups=2, diversity_penalty=0.5), "max_tokens": 20},
        {"guide": (7, 8, 9, 10, 11), "sampling": SamplingParams(seed=1, guidance=1.5)},
    ],
)
def test_groups_are_told_of_like_others(change):
    """Beams fork their tokens and names; a guide has a prompt of its own."""
    engine, log = followed_engine()
    follower, num_seen = Follower(), 0
    engine.add(replace(make_request(num_prompt=9, max_tokens=9), **change))
    while engine.has_work:
        engine.step()
        follower.apply(log.take())
        kept = {engine.runner.kv[block][-1][1] for block in engine.scheduler._sharing._cache}
        assert set(follower.found.values()) == kept
        num_seen = max(num_seen, len(kept))
    assert num_seen > 4


def test_nothing_is_kept_for_nobody():
    engine = Engine(Scheduler(CONFIG, 32), RecordingRunner(32, CONFIG.block_size))
    run(engine, make_request(num_prompt=9))
    assert engine.scheduler._sharing._cache.log is None
