"""Lookahead decoding, compared with a Jacobi iteration by hand."""

import pytest

from model_runner.draft_tree import ROOT, DraftTree
from model_runner.speculative.lookahead import MOST_PER_TOKEN, SIZE, LookaheadProposer, Pool, Window
from tests.model_runner.speculative.driving import Run, all_of, markov, random_cut

VOCAB = 50
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def make_run(max_nodes: int, cut=all_of, order: int = 2) -> Run:
    return Run(LookaheadProposer(), markov(2, VOCAB, order), VOCAB, list(PROMPT), max_nodes, cut).begin()


def window_of(run: Run) -> Window:
    return run.proposer._choices[0]._window


def pool_of(run: Run) -> Pool:
    return run.proposer._choices[0]._pool


def positions(tree: DraftTree, path: list[int]) -> list[int] | None:
    """The depths of a path's nodes; None if it is not in the tree."""
    node, depths = ROOT, tree.depths()
    found = []
    for token in path:
        child = tree.children().get((node, token))
        if child is None:
            return None
        node = child
        found.append(depths[node])
    return found


@pytest.mark.parametrize("max_nodes", [16, 32, 64])
def test_the_window_is_in_the_tree_each_level_at_its_position(max_nodes):
    run = make_run(max_nodes)
    for _ in range(20):
        run.take_step()
        columns = window_of(run).columns
        assert len(columns) == (max_nodes // 2 + 1) // (SIZE - 1)
        assert columns[0][0] == run.tokens[-1]
        for index, column in enumerate(columns):
            level_0 = [other[0] for other in columns[1 : index + 1]]
            path = [*level_0, *column[1:]]
            assert positions(run.tree, path) == list(range(1, index + SIZE - 1))


@pytest.mark.parametrize("cut", [all_of, random_cut(1)])
@pytest.mark.parametrize("max_nodes", [4, 7, 16, 40])
def test_each_column_moves_up_by_the_targets_own_token(max_nodes, cut):
    run = make_run(max_nodes, cut, order=4)
    completed = 0
    for _ in range(40):
        before, tokens, tree = [list(column) for column in window_of(run).columns], list(run.tokens), run.tree
        cut_tree = cut(tree)
        run.cut = lambda tree, cut_tree=cut_tree: cut_tree
        run.take_step()
        moved = len(run.tokens) - len(tokens)
        for index, column in enumerate(before):
            level_0 = [other[0] for other in before[1 : index + 1]]
            path = [*level_0, *column[1:]]
            if positions(cut_tree, path) is None:
                continue
            newest = run.target([*tokens, *path])
            ngram = (*column[1:], newest)
            stored = pool_of(run).starting_with(column[0])
            assert ngram in stored or len(stored) == MOST_PER_TOKEN
            completed += 1
            after = window_of(run).columns
            if 0 <= index - (moved - 1) < len(after):
                new = after[index - (moved - 1)]
                assert new[1:] == [*column[2:], newest]
                assert new[0] == (column[1] if index > moved - 1 else run.tokens[-1])
    assert completed > 10


def test_the_window_finds_what_was_never_seen():
    """No two tokens are ever the same here, so everything that is accepted was guessed in the window."""
    run = Run(LookaheadProposer(), lambda tokens: len(tokens) * 17 % 5003, 5003, [7], 64).begin()
    for _ in range(30):
        run.take_step()
    assert len(set(run.tokens)) == len(run.tokens)
    assert run.num_accepted > 60


def test_known_ngrams_are_verified():
    run = Run(LookaheadProposer(), lambda tokens: tokens[-6], VOCAB, list(PROMPT), 6).begin()
    for _ in range(20):
        run.take_step()
    assert run.num_accepted > 20


def test_the_window_survives_steps_without_drafts_and_steps_of_other_sizes():
    run = make_run(16)
    for max_nodes in [16, 0, 0, 16, 1, 64, 3, 16, 0, 30] * 4:
        run.max_nodes = max_nodes
        run.take_step()
        assert max_nodes == 0 or len(window_of(run).columns) == (max_nodes // 2 + 1) // (SIZE - 1)


@pytest.mark.parametrize("max_nodes", [1, 2, 3])
def test_with_little_room_there_are_still_ngrams(max_nodes):
    run = Run(LookaheadProposer(), lambda tokens: tokens[-3], 10, [1, 2, 3] * 4, max_nodes).begin()
    for _ in range(10):
        run.take_step()
    assert run.num_accepted > 0


def test_the_pool_keeps_the_newest_of_each_first_token():
    pool, added = Pool(), []
    for number in range(100):
        ngram = (number % 2, number % 11, number % 3, 0)
        pool.add(ngram)
        added = [ngram, *(other for other in added if other != ngram)]
        for first in (0, 1):
            expected = [other[1:] for other in added if other[0] == first][:MOST_PER_TOKEN]
            assert pool.starting_with(first) == expected
