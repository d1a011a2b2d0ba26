"""Trees of drafts, cut and put in another order."""

import torch

from model_runner.draft_tree import NO_DRAFT, ROOT, DraftDistribution, DraftTree, Fork


def distribution() -> DraftDistribution:
    return DraftDistribution(torch.arange(3), torch.ones(3))


DRAWN_FROM = {ROOT: distribution(), 0: distribution(), 1: distribution()}
DRAWN = DraftTree((7, 8, 9, 7, 6), (ROOT, ROOT, 1, 0, 1), (0.5, 0.4, 0.3, 0.2, 0.1), DRAWN_FROM)


def test_forks_name_the_children_in_the_order_of_the_nodes() -> None:
    assert DRAWN.fork(ROOT) == Fork((7, 8), DRAWN_FROM[ROOT])
    assert DRAWN.fork(1) == Fork((9, 6), DRAWN_FROM[1])
    assert DRAWN.fork(2) == Fork((), None)
    assert NO_DRAFT.fork(ROOT) == Fork((), None)


def test_what_nodes_were_drawn_from_goes_with_them() -> None:
    taken = DRAWN.take([1, 2, 0, 3])
    assert (taken.tokens, taken.parents, taken.confidence) == ((8, 9, 7, 7), (ROOT, 0, ROOT, 2), (0.4, 0.3, 0.5, 0.2))
    assert taken.fork(0) == Fork((9,), DRAWN_FROM[1])
    assert taken.fork(2) == Fork((7,), DRAWN_FROM[0])
    assert DRAWN.first(1).fork(ROOT) == Fork((7,), DRAWN_FROM[ROOT])
    assert not DRAWN.first(0)
