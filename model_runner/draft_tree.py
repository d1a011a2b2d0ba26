"""The one form that drafts of every method have: a tree of tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

ROOT = -1
"""Stands for the last known token, from which the tree grows."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftDistribution:
    """What guesses were drawn from. Tokens not named, as outside a draft's vocabulary, have no chance."""

    tokens: Tensor  # [n] int64, all different
    weights: Tensor  # [n] floats, at least 0: the probabilities, but for a common factor


@dataclass(frozen=True, slots=True)
class Fork:
    """The guesses for one token."""

    tokens: tuple[int, ...]
    drawn_from: DraftDistribution | None
    """See DraftTree."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Guessed continuations of a choice. A chain is a tree without forks, no guess a tree without nodes.

    Nodes are in topological order, so the first n of them are a tree as well. Children of a node differ in their
    tokens.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """For each node, a node before it, or ROOT."""
    confidence: tuple[float, ...] = ()
    """For each node, its proposer's guess of the probability that it follows its parent, 0 to 1."""
    drawn_from: Mapping[int, DraftDistribution] | None = None
    """None if the tokens were chosen: they follow from what is known, or from the noise of the target's draws. If they
    were drawn at random, then for each node with children, and the ROOT, what these were drawn from: without
    replacement, in the order of the nodes. The shape of such a tree must not depend on what was drawn."""

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> list[int]:
        """For each node, how many tokens it is ahead of the last known one; at least 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def survival(self, probability: Sequence[float] | None = None) -> list[float]:
        """For each node, the probability to become output, from those to follow the parent; None takes `confidence`."""
        survival: list[float] = []
        for parent, value in zip(self.parents, self.confidence if probability is None else probability, strict=True):
            survival.append(value if parent == ROOT else survival[parent] * value)
        return survival

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child to this node, itself included."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def children(self) -> dict[tuple[int, int], int]:
        """The node for each (parent, token)."""
        return {edge: node for node, edge in enumerate(zip(self.parents, self.tokens, strict=True))}

    def fork(self, node: int) -> Fork:
        """What is guessed after a node, or the ROOT."""
        tokens = tuple(token for parent, token in zip(self.parents, self.tokens, strict=True) if parent == node)
        return Fork(tokens, self.drawn_from.get(node) if self.drawn_from else None)

    def first(self, count: int) -> "DraftTree":
        """The tree of the first nodes."""
        return self if count >= len(self) else self.take(range(count))

    def take(self, nodes: Sequence[int]) -> "DraftTree":
        """The tree of some of the nodes in another topological order; each node's parent must be among those before.

        If the tokens were drawn, siblings must stay in their order, and only the last of them may be left out.
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
