"""Common properties of proposers without a model: valid drafts of every size, and no trace of ended choices."""

import pickle
from collections.abc import Callable

import pytest

from model_runner.draft_tree import NO_DRAFT
from model_runner.speculative.lookahead import LookaheadProposer
from model_runner.speculative.prediction import PredictionProposer
from model_runner.speculative.proposer import Proposer
from tests.model_runner.speculative.automata import suffix_proposer
from tests.model_runner.speculative.driving import Run, all_of, markov, new_choice, random_cut

MAKERS = [LookaheadProposer, PredictionProposer, suffix_proposer]
makers = pytest.mark.parametrize("make", MAKERS)


def expected(seed: int) -> list[int]:
    """The target's tokens after the prompt, with some changes."""
    tokens, target = [1, 2, 3], markov(seed, 12)
    for place in range(60):
        tokens.append(place % 12 if place % 15 == 14 else target(tokens))
    return tokens[3:]


@makers
@pytest.mark.parametrize("max_nodes", [0, 1, 2, 5, 16, 64])
@pytest.mark.parametrize("cut", [all_of, random_cut(2)])
def test_drafts_are_trees_of_the_asked_size_and_help(make: Callable[[], Proposer], max_nodes, cut):
    accepted = 0
    for seed in range(4):
        run = Run(make(), markov(seed, 12), 12, [1, 2, 3], max_nodes, cut).begin(prediction=expected(seed))
        for _ in range(40):
            run.take_step()
        accepted += run.num_accepted
    assert (accepted > 0) == (max_nodes > 0)


@makers
def test_nothing_is_drafted_while_the_prompt_is_computed(make: Callable[[], Proposer]):
    run = Run(make(), markov(1, 12), 12, [1, 2, 3, 4] * 20, 8).begin(prediction=[1, 2, 3])
    run.read_prompt(16)
    run.take_step()


@makers
def test_choices_do_not_mix(make: Callable[[], Proposer]):
    """Two choices in turn get the same drafts as each alone."""
    trees = []
    for companions in (1, 2):
        proposer = make()
        runs = [
            Run(proposer, markov(seed, 12), 12, [seed, 2, 3], 6).begin(slot=seed, prediction=expected(seed))
            for seed in range(companions)
        ]
        for _ in range(30):
            for run in runs:
                run.take_step()
        trees.append(runs[0].tree)
    assert trees[0] == trees[1]


@makers
def test_a_slot_is_free_after_the_end(make: Callable[[], Proposer]):
    proposer = make()
    for _ in range(3):
        run = Run(proposer, markov(1, 12), 12, [1, 2, 3], 4).begin()
        for _ in range(5):
            run.take_step()
        proposer.end(0)
    with pytest.raises(KeyError):
        proposer.end(0)


@pytest.mark.parametrize("make", [maker for maker in MAKERS if maker is not suffix_proposer])
def test_nothing_is_left_of_a_choice_that_ended(make: Callable[[], Proposer]):
    """For a choice that the suffix method followed, only what it learnt is left."""
    proposer = make()
    run = Run(proposer, markov(1, 12), 12, [1, 2, 3], 4).begin(prediction=expected(1))
    for _ in range(20):
        run.take_step()
    assert pickle.dumps(proposer) != pickle.dumps(make())
    proposer.end(0)
    assert pickle.dumps(proposer) == pickle.dumps(make())


@makers
def test_an_end_right_after_the_beginning_is_fine(make: Callable[[], Proposer]):
    proposer = make()
    proposer.begin(new_choice([1, 2, 3]))
    proposer.end(0)


@makers
def test_drafts_begin_anew_after_preemption(make: Callable[[], Proposer]):
    proposer = make()
    run = Run(proposer, markov(1, 12), 12, [1, 2, 3], 6).begin(prediction=expected(1))
    for life in range(5):
        for _ in range(6):
            run.take_step()
        proposer.end(0)
        run = Run(proposer, run.target, 12, list(run.tokens), 6).begin(num_prompt=3, prediction=expected(1))
        assert run.tree == NO_DRAFT
        run.read_prompt(4 + life)
