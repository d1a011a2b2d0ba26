"""Predicted outputs: correct, with changes, and useless."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree
from model_runner.speculative.prediction import PredictionProposer
from tests.model_runner.speculative.driving import Run, draft, new_choice

PROMPT = [1, 2, 3]
PREDICTION = random.Random(4).choices(range(1000), k=200)


def follow(output: list[int], prediction: list[int], max_nodes: int = 8) -> Run:
    """Generate the output with the prediction."""
    text = [*PROMPT, *output]
    run = Run(
        PredictionProposer(), lambda tokens: text[len(tokens)] if len(tokens) < len(text) else 1000, 1001,
        list(PROMPT), max_nodes,
    ).begin(prediction=prediction)  # fmt: skip
    while len(run.tokens) < len(text):
        run.take_step()
    assert run.tokens[: len(text)] == text
    return run


def best_chain(tree: DraftTree) -> list[int]:
    """The most probable way down."""
    survival, node, chain = tree.survival(), ROOT, []
    while children := [child for (parent, _), child in tree.children().items() if parent == node]:
        node = max(children, key=lambda child: survival[child])
        chain.append(tree.tokens[node])
    return chain


def drafted_after(output: list[int], prediction: list[int] = PREDICTION, max_nodes: int = 8) -> DraftTree:
    proposer, choice = PredictionProposer(), new_choice([*PROMPT, *output], len(PROMPT), prediction=prediction)
    proposer.begin(choice)
    return draft(proposer, choice, max_nodes)


@pytest.mark.parametrize("max_nodes", [1, 4, 16])
def test_a_right_prediction_is_accepted_as_a_whole(max_nodes):
    run = follow(PREDICTION, PREDICTION, max_nodes)
    assert run.num_steps == 1 + -(-(200 - 1) // (max_nodes + 1))


@pytest.mark.parametrize("known", [0, 1, 50, 190, 199, 200])
def test_the_draft_is_what_comes_next(known):
    assert best_chain(drafted_after(PREDICTION[:known])) == PREDICTION[known : known + 8]


@pytest.mark.parametrize(
    ("output", "place"),
    [
        ([*PREDICTION[:50], 1000, *PREDICTION[51:53]], 53),  # replaced
        ([*PREDICTION[:50], *PREDICTION[60:62]], 62),  # left out
        ([*PREDICTION[:50], *range(2000, 2040), *PREDICTION[50:52]], 52),  # added
        ([*PREDICTION[:50], *range(2000, 2040), *PREDICTION[58:60]], 60),  # replaced by more
        ([*PREDICTION[:50], *PREDICTION[10:14]], 14),  # back to an earlier place
        ([*PREDICTION, *PREDICTION[10:14]], 14),  # beyond the end
    ],
)
def test_after_a_difference_the_next_place_is_found(output, place):
    assert best_chain(drafted_after(output))[:4] == PREDICTION[place : place + 4]


def test_of_equal_places_the_next_one_is_taken():
    block = [7, 8, 9]
    prediction = [*block, 10, 50, 51, 52, 53, *block, 20, 54, *block, 30]
    assert best_chain(drafted_after([*block, 10, 50, 51, 60, *block], prediction))[0] == 20


def test_right_after_a_difference_there_are_several_guesses():
    tree = drafted_after([*PREDICTION[:50], 1000])
    first = {tree.tokens[node] for node, parent in enumerate(tree.parents) if parent == ROOT}
    assert {PREDICTION[50], PREDICTION[51]} <= first  # something was added, or replaced


@pytest.mark.parametrize("rate", [100, 30, 10])
def test_small_changes_cost_little(rate):
    rng, output = random.Random(rate), []
    for token in PREDICTION * 3:
        kind = rng.randrange(3) if rng.randrange(rate) == 0 else 3
        output += [[], [rng.randrange(1000)], [rng.randrange(1000), token], [token]][kind]
    run = follow(output, PREDICTION * 3)
    num_changes = 600 / rate
    assert run.num_steps < 600 / 9 + 3 * num_changes + 5


def test_a_wrong_prediction_is_soon_doubted():
    output = random.Random(5).choices(range(1000), k=300)
    run = follow(output, [token + 2000 for token in PREDICTION])
    assert run.num_accepted == 0
    assert max(run.tree.survival(), default=0) < 0.5


def test_without_a_prediction_there_is_no_draft():
    assert drafted_after([5, 6], []) == NO_DRAFT


tokens = st.lists(st.integers(0, 3), max_size=30)


@given(tokens, tokens, st.integers(0, 30), st.integers(0, 9))
def test_a_resumed_choice_drafts_as_if_it_had_gone_on(prediction, output, known, max_nodes):
    proposer, text = PredictionProposer(), [*PROMPT, *output[:known]]
    choice = new_choice(text, len(PROMPT), prediction=prediction)
    proposer.begin(choice)
    for token in output[known:]:
        draft(proposer, choice, max_nodes)
        text.append(token)
    assert draft(proposer, choice, max_nodes) == drafted_after(output, prediction, max_nodes)
