"""Growing a draft tree, node by node, from whatever knows what may follow."""

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import TypeVar

from model_runner.draft_tree import ROOT, DraftTree

Place = TypeVar("Place")
Children = Callable[[Place], Iterable[tuple[int, float, Place]]]
"""From a place to what may follow there: distinct tokens, their probabilities, and the places after them."""


def grow_best_first(place: Place, children: Children[Place], max_nodes: int, least: float) -> DraftTree:
    """The tree of the `max_nodes` most probable nodes, most probable first; none is less probable than `least`.

    The probability of a node is the product of those on its path, so no node is more probable than its parent: taking
    the best of all known nodes, one after the other, finds the best tree.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    order = itertools.count()
    """Breaks ties, so that places are never compared: what came first, first."""
    open_nodes: list[tuple[float, int, int, int, float, Place]] = []

    def offer(parent: int, survival: float, parent_place: Place) -> None:
        for token, probability, child in children(parent_place):
            if survival * probability >= least:
                heapq.heappush(open_nodes, (-survival * probability, next(order), parent, token, probability, child))

    if max_nodes > 0:
        offer(ROOT, 1.0, place)
    while open_nodes and len(tokens) < max_nodes:
        survival, _, parent, token, probability, child = heapq.heappop(open_nodes)
        tokens.append(token)
        parents.append(parent)
        confidence.append(probability)
        if len(tokens) < max_nodes:
            offer(len(tokens) - 1, -survival, child)
    return DraftTree(tuple(tokens), tuple(parents), tuple(confidence))
