"""40,000 steps of random traffic against brute force, and broken schedulers that must not get through."""

from dataclasses import replace

import pytest

from model_runner.contract import StepPlan
from scheduler.block_groups import PageBlocks, RowsBlocks, WindowBlocks
from scheduler.block_pool import BlockPool, IntegrityError
from scheduler.interface import FinishReason, SchedulerConfig
from scheduler.prefix_cache import BlockChain, Lookup, PrefixCache
from scheduler.scheduler import Scheduler
from scheduler.sharing import KVSharing
from tests.scheduler.simulated_runner import KVMismatchError
from tests.scheduler.simulated_world import World, make_groups


def make_config(policy="fcfs", budget=16, prefix_caching=True, block_size=4, max_num_seqs=6):
    return SchedulerConfig(block_size, max_num_seqs, budget, 60, policy, prefix_caching)


WORLDS = [
    (make_config("fcfs", budget=16), 20),
    (make_config("fcfs", budget=5, block_size=8), 9),
    (make_config("fcfs", budget=64, prefix_caching=False), 24),
    (make_config("priority", budget=12), 18),
    (make_config("priority", budget=3, prefix_caching=False), 16),
    (make_config("fair", budget=24), 20),
    (make_config("fair", budget=512, block_size=16, max_num_seqs=12), 12),
    (make_config("fcfs", budget=3, block_size=1), 45),
]


@pytest.mark.parametrize(("seed", "config", "num_blocks"), [(i, *world) for i, world in enumerate(WORLDS)])
def test_output_is_that_of_brute_force_and_nothing_leaks(seed, config, num_blocks):
    world = World(seed, config, num_blocks).run(num_steps=5000)
    assert world.preemptions > 10
    assert world.tally["reused"] > 10
    assert world.tally["idle"] > 10
    assert world.tally["forked"] > 10 or config.block_size == 1  # nothing is ever split there
    assert world.tally["resumed"] > 0
    assert world.tally["aborted"] > 10
    assert all(world.tally[reason] > 5 for reason in FinishReason)


@pytest.mark.parametrize(("config", "num_blocks"), WORLDS[:5])
def test_drafts_change_nothing(config, num_blocks):
    world = World(9, config, num_blocks, num_draft=3).run(num_steps=1000)
    assert world.preemptions > 0
    assert world.tally["drafted"] > 100
    assert world.tally["forked"] > 0
    assert all(world.tally[reason] > 0 for reason in FinishReason)


@pytest.mark.parametrize(("seed", "config", "num_blocks"), [(0, *WORLDS[5]), (1, *WORLDS[6]), (2, *WORLDS[4])])
def test_background_work_changes_nothing(seed, config, num_blocks):
    world = World(seed, config, num_blocks, num_draft=2, runs_ahead=seed == 1, in_background=0.5).run(num_steps=2000)
    assert world.preemptions > 10
    assert world.tally["in background"] > 50
    assert all(world.tally[reason] > 0 for reason in FinishReason)


@pytest.mark.parametrize(("seed", "config", "num_blocks"), [(i, *world) for i, world in enumerate(WORLDS)])
def test_steps_that_are_planned_ahead_change_nothing(seed, config, num_blocks):
    world = World(seed, config, num_blocks, num_draft=seed % 2, runs_ahead=True).run(num_steps=1200)
    assert world.preemptions > 0
    assert world.tally["ahead"] > (20 if config.max_num_batched_tokens > 12 else 0)
    assert world.tally["aborted"] > 0
    assert all(world.tally[reason] > 0 for reason in FinishReason)


@pytest.mark.parametrize(("seed", "config", "num_blocks"), [(i, *world) for i, world in enumerate(WORLDS)])
def test_candidates_have_room_or_wait(seed, config, num_blocks):
    most = min(6, config.max_num_batched_tokens - 1)
    world = World(seed, config, num_blocks, num_draft=2, most_candidates=most).run(num_steps=1000)
    assert world.preemptions > 0
    assert world.tally["compared"] > 100
    assert world.tally["left out"] > 0 or config.max_num_batched_tokens > 16
    assert all(world.tally[reason] > 0 for reason in FinishReason)


@pytest.mark.parametrize(("seed", "config", "num_blocks"), [(i, *world) for i, world in enumerate(WORLDS)])
def test_cache_groups_change_nothing(seed, config, num_blocks):
    config = replace(config, snapshot_every=seed % 3 * config.block_size)
    groups = make_groups(config, num_blocks)
    num_draft = 3 * (seed // 2 % 2)
    world = World(seed, config, num_blocks, num_draft, runs_ahead=seed % 2 == 1, groups=groups).run(num_steps=1500)
    assert world.preemptions > 0
    assert world.tally["reused"] > (10 if config.prefix_caching else 0)
    assert all(world.tally[reason] > 0 for reason in FinishReason)


@pytest.mark.parametrize(("config", "num_blocks"), WORLDS[1:6:2])
def test_candidates_go_with_cache_groups(config, num_blocks):
    most, groups = min(6, config.max_num_batched_tokens - 1), make_groups(config, num_blocks)
    world = World(3, config, num_blocks, most_candidates=most, groups=groups).run(num_steps=1000)
    assert world.tally["compared"] > 100


# -- negative controls: each breaks one thing, and the same traffic must notice ----------------------------------------


def run_until_caught(errors=KVMismatchError, *, with_groups=False):
    groups = make_groups(*WORLDS[0]) if with_groups else ()
    world = World(0, *WORLDS[0], num_draft=2, groups=groups)
    with pytest.raises(errors):
        world.run(num_steps=2000)


@pytest.fixture
def unchecked(monkeypatch):
    """With the books unchecked the KV alone has to tell."""
    monkeypatch.setattr(Scheduler, "check_integrity", lambda self: None)


def test_the_control_itself_is_sound(unchecked):
    World(0, *WORLDS[0]).run(num_steps=2000)


def test_a_fork_without_its_copy_is_caught(unchecked, monkeypatch):
    schedule = Scheduler.schedule

    def without_copies(self):
        plan = schedule(self)
        return StepPlan(plan.released, (), plan.admitted, plan.scheduled)

    monkeypatch.setattr(Scheduler, "schedule", without_copies)
    run_until_caught()


def test_blocks_given_back_while_others_hold_them_are_caught(unchecked, monkeypatch):
    def release_at_once(self, blocks):
        for block in blocks:
            self._references[block] = 0
            self._cache.forget(block)
            self._cached.pop(block, None)
            if block not in self._free:
                self._free.append(block)

    monkeypatch.setattr(BlockPool, "release", release_at_once)
    run_until_caught()


def test_publishing_what_is_not_computed_is_caught(unchecked, monkeypatch):
    publish = KVSharing.publish

    def too_early(self, requests):
        (request,) = requests
        num_computed, request.num_computed = request.num_computed, len(request.tokens)
        publish(self, requests)
        request.num_computed = num_computed

    monkeypatch.setattr(KVSharing, "publish", too_early)
    run_until_caught()


def test_names_that_ignore_the_salt_are_caught(unchecked, monkeypatch):
    init = BlockChain.__init__
    monkeypatch.setattr(BlockChain, "__init__", lambda self, salt, *others: init(self, "", *others))
    run_until_caught()


def test_evicted_blocks_that_are_still_found_are_caught(unchecked, monkeypatch):
    monkeypatch.setattr(PrefixCache, "forget", lambda self, block: None)
    run_until_caught()


def test_lookups_that_outlive_their_blocks_are_caught(unchecked, monkeypatch):
    monkeypatch.setattr(Lookup, "note_forget", lambda self, block: None)
    run_until_caught()


@pytest.mark.parametrize("kind", [WindowBlocks, RowsBlocks, PageBlocks])
def test_blocks_of_groups_given_back_too_early_are_caught(kind, unchecked, monkeypatch):
    first_needed = kind.first_needed
    monkeypatch.setattr(kind, "first_needed", lambda self, request: first_needed(self, request) + 1)
    run_until_caught((KVMismatchError, KeyError), with_groups=True)


@pytest.mark.parametrize("kind", [WindowBlocks, PageBlocks])
def test_beginning_without_what_a_group_needs_is_caught(kind, unchecked, monkeypatch):
    monkeypatch.setattr(kind, "before", lambda self, boundary: range(0))
    run_until_caught((KVMismatchError, KeyError), with_groups=True)


def test_a_page_that_is_never_written_is_caught(unchecked, monkeypatch):
    needed = PageBlocks.needed
    monkeypatch.setattr(PageBlocks, "needed", lambda self, *arguments: list(needed(self, *arguments))[1:])
    run_until_caught((KVMismatchError, KeyError), with_groups=True)


def test_a_leaked_block_is_caught_by_the_books(monkeypatch):
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda self, blocks: release(self, blocks[1:]))
    run_until_caught(IntegrityError)
