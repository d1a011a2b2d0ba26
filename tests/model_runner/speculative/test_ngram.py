"""Prompt lookup against searching the text from its end."""

from hypothesis import given
from hypothesis import strategies as st

from model_runner.speculative.ngram import NgramProposer
from tests.model_runner.speculative.driving import draft, new_choice


def search(text: list[int], count: int) -> tuple[int, ...]:
    """What followed the most recent place that ends like the text, for the longest end of 4, 3 or 2 tokens."""
    for size in (4, 3, 2):
        for end in range(len(text) - 1, size - 1, -1):
            if len(text) >= size and text[end - size : end] == text[-size:]:
                return tuple(text[end : end + count])
    return ()


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=8), st.integers(0, 9))
def test_the_place_is_that_of_brute_force(pieces, max_nodes):
    proposer, tokens = NgramProposer(), list(pieces[0])
    choice = new_choice(tokens)
    proposer.begin(choice)
    for piece in [[], *pieces[1:]]:
        tokens += piece
        tree = draft(proposer, choice, max_nodes)
        assert tree.tokens == search(tokens, max_nodes)
        assert tree.parents == tuple(range(-1, len(tree) - 1))
