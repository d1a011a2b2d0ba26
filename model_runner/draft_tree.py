"""Draft trees: the form in which every speculation method returns its drafts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

ROOT = -1
"""Parent of the tree's first nodes: the last known token."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftDistribution:
    """The distribution that drafts were drawn from. Tokens that are not listed have probability 0."""

    tokens: Tensor  # [n] int64, all different
    weights: Tensor  # [n] floats, at least 0: unnormalised probabilities


@dataclass(frozen=True, slots=True)
class Fork:
    """The drafts of one position."""

    tokens: tuple[int, ...]
    drawn_from: DraftDistribution | None
    """The distribution that these tokens were drawn from; None if they were not drawn at random."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Drafted continuations of a choice. A chain is a tree without forks; a tree without nodes means no draft.

    Nodes are in topological order, so the first n of them also form a tree. Children of a node have different tokens.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """For each node, the index of an earlier node, or ROOT."""
    confidence: tuple[float, ...] = ()
    """For each node, its proposer's estimate of the probability that it follows its parent, 0 to 1."""
    drawn_from: Mapping[int, DraftDistribution] | None = None
    """None if the tokens were not drawn at random, but follow from what is known or from the noise of the target's
    draws. Otherwise, for ROOT and each node with children, the distribution that the children were drawn from, without
    replacement and in node order. The shape of such a tree must not depend on the draws."""

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> list[int]:
        """For each node, its distance from the last known token, at least 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def survival(self, probability: Sequence[float] | None = None) -> list[float]:
        """For each node, the probability that its whole path is accepted.

        `probability` gives each node's probability to follow its parent; it defaults to `confidence`.
        """
        survival: list[float] = []
        for parent, value in zip(self.parents, self.confidence if probability is None else probability, strict=True):
            survival.append(value if parent == ROOT else survival[parent] * value)
        return survival

    def path(self, node: int) -> list[int]:
        """The nodes from ROOT's child to this node, inclusive."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def children(self) -> dict[tuple[int, int], int]:
        """The node for each (parent, token)."""
        return {edge: node for node, edge in enumerate(zip(self.parents, self.tokens, strict=True))}

    def fork(self, node: int) -> Fork:
        """The drafts after a node, or after ROOT."""
        tokens = tuple(token for parent, token in zip(self.parents, self.tokens, strict=True) if parent == node)
        return Fork(tokens, self.drawn_from.get(node) if self.drawn_from else None)

    def first(self, count: int) -> "DraftTree":
        """The tree of the first `count` nodes."""
        return self if count >= len(self) else self.take(range(count))

    def take(self, nodes: Sequence[int]) -> "DraftTree":
        """The tree of some of the nodes, in another topological order: each node's parent must come before it.

        If the tokens were drawn at random, siblings must keep their order, and only the last ones may be dropped.
        """
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
        drawn_from = self.drawn_from
        if drawn_from is not None:
            drawn_from = {place[node]: of for node, of in drawn_from.items() if node in place}
        return DraftTree(
            tuple(self.tokens[node] for node in nodes),
            tuple(place[self.parents[node]] for node in nodes),
            tuple(self.confidence[node] for node in nodes),
            drawn_from,
        )


NO_DRAFT = DraftTree()


def chain(tokens: Sequence[int], confidence: Sequence[float]) -> DraftTree:
    """A tree without forks."""
    return DraftTree(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), tuple(confidence))
