"""Best-first growth, compared with an exhaustive search."""

import random

import pytest

from model_runner.draft_tree import NO_DRAFT
from model_runner.speculative.growing import grow_best_first
from tests.model_runner.speculative.driving import check_tree

Path = tuple[int, ...]


def children(path: Path) -> list[tuple[int, float, Path]]:
    """Random children, to a depth of 4."""
    rng = random.Random(str(path))
    return [(token, rng.random(), (*path, token)) for token in range(rng.randint(0, 4))] if len(path) < 4 else []


def all_survivals(path: Path, survival: float) -> list[float]:
    found = []
    for _, probability, child in children(path):
        found += [survival * probability, *all_survivals(child, survival * probability)]
    return found


@pytest.mark.parametrize("root", range(20))
@pytest.mark.parametrize("least", [0.0, 0.2])
def test_the_most_probable_nodes_are_taken(root, least):
    best = sorted((value for value in all_survivals((root,), 1.0) if value >= least), reverse=True)
    for max_nodes in range(30):
        tree = grow_best_first((root,), children, max_nodes, least)
        check_tree(tree, max_nodes)
        assert tree.survival() == pytest.approx(best[:max_nodes])


def test_what_has_no_children_gives_no_draft():
    assert grow_best_first((), lambda place: [], 5, 0.0) == NO_DRAFT
