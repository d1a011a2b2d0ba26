"""Blocks of cache groups that a choice has passed, and which of them are evicted first."""

from model_runner.contract import CacheGroup, SamplingParams
from scheduler.block_groups import GroupBlocks, PageBlocks, WindowBlocks
from scheduler.interface import ChoiceState, EngineRequest
from scheduler.request import Request, make_choices

BLOCK = 4
PROMPT = 41  # its last boundary at which another can begin is 10


def pass_blocks(group: GroupBlocks, last: int) -> list[int]:
    """A choice passes one named block after the other; returns the indices of the blocks in the order of eviction."""
    request = EngineRequest("a", tuple(range(PROMPT)), SamplingParams(), 100, (ChoiceState(0),))
    [choice] = make_choices(request, 0, 0.0, BLOCK)
    index_of = {}
    held: dict[int, int] = {}
    for index in range(last):
        [held[index]] = group.pool.allocate(1)
        index_of[held[index]] = index
        group.cache.insert(bytes([index]), held[index])
        advance(choice, index + 1)
        group.give_back(choice, held)
    cached = group.pool.num_cached
    group.pool.allocate(group.pool.num_blocks - last)  # all that are free
    return [index_of[block] for block in group.pool.allocate(cached)]


def advance(choice: Request, num_blocks: int) -> None:
    choice.num_computed, choice.num_state_blocks = num_blocks * BLOCK, num_blocks


def test_blocks_before_the_end_of_a_prompt_go_last() -> None:
    window = WindowBlocks(CacheGroup("window", 30, window=4 * BLOCK), BLOCK, 0)
    assert pass_blocks(window, 20)[-4:] == [6, 7, 8, 9]
    page = PageBlocks(CacheGroup("page", 30), BLOCK, 0)
    assert pass_blocks(page, 20)[-1] == 9
    page = PageBlocks(CacheGroup("page", 30), BLOCK, 6 * BLOCK)
    assert pass_blocks(page, 20)[-4:] == [5, 9, 11, 17]
