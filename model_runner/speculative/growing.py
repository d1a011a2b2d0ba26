"""Grows draft trees depth by depth from a network's predictions."""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.draft_tree import ROOT, DraftDistribution, DraftTree
from model_runner.sampling.noise import gumbels
from model_runner.speculative.proposer import ChoiceStep
from model_runner.speculative.verify import confidence_of_drawn

Place = TypeVar("Place")
Children = Callable[[Place], Iterable[tuple[int, float, Place]]]
"""Maps a place to its possible continuations: distinct tokens, their probabilities, and the places after them."""


def grow_best_first(place: Place, children: Children[Place], max_nodes: int, least: float) -> DraftTree:
    """The tree of the `max_nodes` most probable nodes, most probable first; all have at least the probability `least`.

    A node's probability is the product along its path, so no node is more probable than its parent. Taking the best of
    all known nodes, one after another, therefore finds the best tree.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    order = itertools.count()
    """Breaks ties in order of insertion, so that places are never compared."""
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


_NEVER = -30.0
"""A token with this log probability is never drawn."""


@dataclass(frozen=True, slots=True)
class GrowthLimits:
    """Limits on the growth of a tree."""

    max_depth: int
    branches: int = 3
    """Maximum number of children of a node."""
    front: int = 3
    """How many nodes of one depth are extended, the most probable ones."""
    least: float = 0.08
    """Minimum probability of a node; less probable nodes would not pay for their row."""
    followed: float = 0.2
    """Minimum probability of an extended node; the children of less probable nodes would not pay for finding them."""
    candidates: int = 32
    """How many of a node's most probable tokens are considered; other tokens count as impossible."""

    @property
    def num_extended(self) -> int:
        """Maximum number of nodes that a tree is extended from."""
        return self.front * (self.max_depth - 1)


@dataclass(frozen=True, slots=True)
class FrontierNode:
    """A node that a tree can be extended from."""

    step: ChoiceStep
    choice: int
    """Index of the choice in the step."""
    node: int
    """Number of the node in the choice's growing tree."""
    token: int
    parent: int
    depth: int


Extend = Callable[[Sequence[FrontierNode]], Tensor]
"""Returns logits [n, draft vocabulary] after each of these nodes; all have the same depth, and earlier parents."""


@dataclass(slots=True)
class _Growth:
    """The growing tree of one choice."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    probability: list[float] = field(default_factory=list)
    """Probability of each node to be accepted: the product of confidences along its path."""
    drawn_from: dict[int, DraftDistribution] = field(default_factory=dict)
    """The distributions of `DraftTree.drawn_from`; empty if the tokens were not drawn."""

    def add(self, parent: int, token: int, confidence: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.confidence.append(confidence)
        self.probability.append(confidence * (1.0 if parent == ROOT else self.probability[parent]))
        return len(self.tokens) - 1

    def floor(self, count: int) -> float:
        """The probability that a new node must exceed to be among the best `count`."""
        return heapq.nlargest(count, self.probability)[-1] if len(self.probability) >= count else 0.0

    def best(self, count: int) -> DraftTree:
        """The tree of the most probable nodes; parents are never less probable and come first."""
        order = sorted(range(len(self.tokens)), key=lambda node: -self.probability[node])[:count]
        columns = tuple(self.tokens), tuple(self.parents), tuple(self.confidence)
        return DraftTree(*columns, self.drawn_from or None).take(order)


def grow(
    steps: Sequence[ChoiceStep],
    first: Tensor,
    extend: Extend,
    draft_ids: NDArray[np.int64] | None,
    limits: GrowthLimits,
) -> list[DraftTree]:
    """A tree for each choice, most probable nodes first (EAGLE-2's dynamic trees, arXiv:2406.16858).

    For choices that sample, children are drawn with the target's own noise: if draft and target agree on the
    distribution, they agree on the token (arXiv:2408.07978). If drafts are tested by rejection, the same noise draws
    children without replacement (Gumbel top-k, arXiv:1903.06059), and the shape of the tree does not depend on tokens.

    A child is at most as probable as its parent, so nodes that cannot lead to one of the `max_nodes` best are not
    extended. This does not change the tree.

    Args:
        steps: the choices; a choice with `max_nodes` 0 gets no tree.
        first: [choices, draft vocabulary] logits of each choice's first draft token.
        extend: returns the logits of all further tokens.
        draft_ids: the target's ids of the draft vocabulary; None if they are the same.
        limits: limits of every tree.
    """
    growths = [_Growth() for _ in steps]
    frontier = [FrontierNode(step, index, ROOT, -1, ROOT, 0) for index, step in enumerate(steps) if step.max_nodes]
    logits = first[[leaf.choice for leaf in frontier]] if len(frontier) < len(steps) else first
    while frontier:
        grown = _sprout(frontier, logits, growths, draft_ids, limits)
        frontier = _leading([leaf for leaf in grown if leaf.depth < limits.max_depth], growths, limits)
        if frontier:
            logits = extend(frontier)
    return [growth.best(step.max_nodes) for growth, step in zip(growths, steps, strict=True)]


def _sprout(
    frontier: Sequence[FrontierNode],
    logits: Tensor,
    growths: Sequence[_Growth],
    draft_ids: NDArray[np.int64] | None,
    limits: GrowthLimits,
) -> list[FrontierNode]:
    """Add children to each leaf; returns them."""
    values, columns = logits.topk(min(limits.candidates, logits.shape[-1]), -1)
    scores = values.double().cpu().numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # the temperature may be tiny, and logits may be infinite
        scores = (scores - scores[:, :1]) / [[leaf.step.sampling.temperature or 1.0] for leaf in frontier]
        log_probs = scores - np.logaddexp.reduce(scores, -1, keepdims=True)
    tokens = columns.cpu().numpy() if draft_ids is None else draft_ids[columns.cpu().numpy()]
    grown = []
    for leaf, of_draft, ids in zip(frontier, log_probs, tokens, strict=True):
        if np.isnan(of_draft[0]):
            continue
        growth = growths[leaf.choice]
        above = 1.0 if leaf.node == ROOT else growth.probability[leaf.node]
        if leaf.step.draws:
            growth.drawn_from[leaf.node] = DraftDistribution(torch.from_numpy(ids), torch.from_numpy(np.exp(of_draft)))
        for token, confidence in _children(leaf, of_draft, ids, limits):
            if above * confidence < limits.least:
                break
            node = growth.add(leaf.node, token, confidence)
            grown.append(FrontierNode(leaf.step, leaf.choice, node, token, leaf.node, leaf.depth + 1))
    return grown


def _children(
    leaf: FrontierNode, log_probs: NDArray[np.float64], ids: NDArray[np.int64], limits: GrowthLimits
) -> list[tuple[int, float]]:
    """Tokens and confidences of the leaf's children, best first, from these log probabilities."""
    scores = log_probs
    if leaf.step.sampling.temperature:
        scores = log_probs + gumbels(leaf.step.noise_key(leaf.depth + 1), ids)
    best = (-scores).argsort(kind="stable")[: limits.branches]
    if leaf.step.draws:
        possible = int((log_probs > _NEVER).sum())
        return [(int(ids[place]), confidence_of_drawn(elders)) for elders, place in enumerate(best[:possible])]
    total = np.logaddexp.reduce(scores)
    return [(int(ids[place]), float(np.exp(scores[place] - total))) for place in best]


def _leading(grown: Sequence[FrontierNode], growths: Sequence[_Growth], limits: GrowthLimits) -> list[FrontierNode]:
    """The nodes of each choice that are worth extending."""
    followed: list[FrontierNode] = []
    for choice, of_choice in itertools.groupby(grown, key=lambda leaf: leaf.choice):
        frontier = list(of_choice)
        growth = growths[choice]
        floor = growth.floor(frontier[0].step.max_nodes)
        by_probability = [(growth.probability[leaf.node], leaf) for leaf in frontier]
        best = heapq.nlargest(limits.front, by_probability, key=lambda pair: pair[0])
        followed += [leaf for probability, leaf in best if probability >= limits.followed and probability > floor]
    return followed


def to_array(draft_ids: Tensor | None) -> NDArray[np.int64] | None:
    """Convert a draft vocabulary for `grow`."""
    return None if draft_ids is None else draft_ids.cpu().numpy()
