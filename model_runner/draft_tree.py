"""The one form that drafts of every method have: a tree of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

ROOT = -1
"""Stands for the last known token, from which the tree grows."""


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

    def first(self, count: int) -> "DraftTree":
        """The tree of the first nodes."""
        return self if count >= len(self) else self.take(range(count))

    def take(self, nodes: Sequence[int]) -> "DraftTree":
        """The tree of some of the nodes in another topological order; each node's parent must be among those before."""
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
        return DraftTree(
            tuple(self.tokens[node] for node in nodes),
            tuple(place[self.parents[node]] for node in nodes),
            tuple(self.confidence[node] for node in nodes),
        )


NO_DRAFT = DraftTree()


def chain(tokens: Sequence[int], confidence: Sequence[float]) -> DraftTree:
    """A tree without forks."""
    return DraftTree(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), tuple(confidence))
