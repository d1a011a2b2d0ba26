"""The pool against the rules on its first page."""

import pytest

from scheduler.block_pool import BlockPool, IntegrityError, blocks_for
from scheduler.prefix_cache import PrefixCache


def make_pool(num_blocks=4):
    cache = PrefixCache()
    return BlockPool(num_blocks, cache), cache


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_rounds_up(num_tokens, expected):
    assert blocks_for(num_tokens, 4) == expected


def test_every_block_is_handed_out_once():
    pool, _ = make_pool()
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    assert pool.num_used == 4
    assert not pool.can_allocate(1)
    assert pool.can_allocate(0)


def test_a_shared_block_comes_back_with_its_last_reference():
    pool, _ = make_pool()
    table = pool.allocate(2)
    pool.share(table)
    pool.check_integrity([table, table])
    pool.release(table)
    assert pool.num_used == 2
    pool.release(table)
    assert pool.num_used == 0
    pool.check_integrity([])


def test_cached_blocks_go_after_the_free_ones_oldest_first_and_tails_before_heads():
    pool, cache = make_pool()
    old, new = pool.allocate(2), pool.allocate(1)
    for block in [*old, *new]:
        cache.insert(b"%d" % block, block)
    pool.release(old)
    pool.release(new)
    free = pool.allocate(1)
    assert not {*free} & {*old, *new}
    assert [pool.allocate(1)[0] for _ in range(3)] == [old[1], old[0], new[0]]
    assert len(cache) == 0


def test_sharing_a_cached_block_saves_it_from_eviction():
    pool, cache = make_pool(2)
    first, second = pool.allocate(2)
    for block in (first, second):
        cache.insert(b"%d" % block, block)
        pool.release([block])
    assert pool.can_allocate(2)
    assert pool.can_allocate(1, sharing=[first])
    assert not pool.can_allocate(2, sharing=[first])  # the shared one is no longer there to be taken
    pool.share([first])
    assert pool.allocate(1) == [second]
    assert first in cache
    assert second not in cache
    pool.check_integrity([[first], [second]])


def test_releasing_twice_is_an_error():
    pool, _ = make_pool()
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(IntegrityError, match="released more often"):
        pool.release(table)


def test_integrity_names_the_block_whose_references_are_wrong():
    pool, _ = make_pool()
    table = pool.allocate(2)
    pool.check_integrity([table])
    with pytest.raises(IntegrityError, match=f"block {min(table)} counts 1 references, 0 tables"):
        pool.check_integrity([])
    with pytest.raises(IntegrityError, match="counts 1 references, 2 tables"):
        pool.check_integrity([table, table])


def test_integrity_sees_a_lost_block_and_a_lost_name():
    pool, cache = make_pool()
    (block,) = pool.allocate(1)
    cache.insert(b"name", block)
    pool.release([block])
    pool.check_integrity([])
    cache.forget(block)
    with pytest.raises(IntegrityError, match="prefix cache disagrees"):
        pool.check_integrity([])
    pool, _ = make_pool()
    pool._free.pop()
    with pytest.raises(IntegrityError, match=r"3 free \+ 0 cached \+ 0 used"):
        pool.check_integrity([])
