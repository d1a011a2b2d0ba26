"""Batches of random choices, against batches that are laid out token by token (tests/model_runner/batches.py)."""

import random
from array import array
from dataclasses import fields

import numpy as np

from model_runner.batch import Batch, BatchChoice, BatchMaker, LogitRows, StepTokens, tree_paths
from model_runner.contract import CacheGroup
from model_runner.draft_tree import DraftTree
from tests.model_runner.batches import Chunk, make_batch
from tests.model_runner.batches import tree_paths as paths_of

SIZE = 4


def drawn(chance: random.Random, block: int) -> tuple[list[int], int, DraftTree, array]:
    """Known tokens from a start, then a tree, in blocks from this one on."""
    known, start, nodes = (chance.randint(low, high) for low, high in ((1, 9), (0, 9), (0, 4)))
    tree = DraftTree(tuple(range(nodes)), tuple(chance.randrange(-1, node) if node else -1 for node in range(nodes)))
    count = -(-(start + known + nodes) // SIZE)
    return (
        chance.choices(range(99), k=known),
        start,
        tree,
        array("i", chance.sample(range(block, block + count), count)),
    )


def test_tokens_and_trees_are_where_their_blocks_are() -> None:
    chance = random.Random(0)
    for width in (1, 1, 2, 5, 9):
        drawn_choices = [drawn(chance, 10 * index) for index in range(width)]
        tokens, chunks, owners, paths = StepTokens(), [], [], []
        for index, (known, start, tree, blocks) in enumerate(drawn_choices):
            end = start + len(known)
            tokens.add([*known, *tree.tokens], start)
            chunks += [Chunk(known, start, list(blocks)), Chunk(tree.tokens, end, list(blocks), tree.parents)]
            owners += [index] * (len(known) + len(tree))
            paths += [[]] * len(known) + [[end + node for node in tree.path(of)] for of in range(len(tree))]
        found = BatchMaker(SIZE).make(
            [BatchChoice(blocks=blocks) for *_, blocks in drawn_choices],
            tokens,
            LogitRows([0]),
            paths=tree_paths(tokens, [tree for _, _, tree, _ in drawn_choices]),
        )
        expected = make_batch(chunks, SIZE)
        for name in ("tokens", "positions", "block_of", "offset_of"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        assert found.choice_of.tolist() == owners
        assert found.paths is not None
        for of in fields(found.paths):
            assert np.array_equal(getattr(found.paths, of.name), getattr(paths_of(paths, found.positions), of.name))


def recurrent(table: list[int], pages: list[int], start: int, count: int, covered: int) -> Batch:
    groups = CacheGroup("rows", 50), CacheGroup("page", 50)
    choice = BatchChoice(blocks=array("i", range(9)), groups=(array("i", table), array("i", pages)))
    tokens = StepTokens([0] * count, [start], [count])
    return BatchMaker(SIZE, groups).make([choice], tokens, LogitRows(()), num_state_blocks=[covered])


def test_blocks_that_a_step_begins_and_folds_are_scratch() -> None:
    states = recurrent([-1, 3, -1, -1, 7], [2, -1, -1, 5], start=6, count=11, covered=1).states
    assert states is not None
    assert states.anchors == [(1, 2)]
    assert [list(rows) for rows in states.rows] == [[-1, 3, 50, 51, 7]]
    assert states.pages == [[(3, 5)]]


def test_nothing_is_folded_inside_a_block() -> None:
    states = recurrent([3], [], start=1, count=2, covered=0).states
    assert states is not None
    assert (states.anchors, states.pages) == ([(0, -1)], [[]])
    assert [list(rows) for rows in states.rows] == [[3]]
