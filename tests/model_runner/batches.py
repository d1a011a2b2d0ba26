"""Builds batches by hand, for tests below the runner."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model_runner.batch import Batch, TreePaths


@dataclass(frozen=True)
class Chunk:
    """Tokens of one choice, the first at position `start`: consecutive ones, or a tree."""

    tokens: Sequence[int]
    start: int
    blocks: list[int]
    parents: Sequence[int] | None = None
    """For a tree: index of each token's parent, which comes earlier; -1 for the choice's last token before the tree."""

    def paths(self) -> list[list[int]]:
        """For each token, the path from the tree's root to it; empty without a tree."""
        paths: list[list[int]] = []
        for token, parent in enumerate(self.parents or ()):
            paths.append([*(paths[parent] if parent >= 0 else ()), token])
        return paths or [[] for _ in self.tokens]

    def positions(self) -> list[int]:
        """A token of a tree follows its parent."""
        if self.parents is None:
            return list(range(self.start, self.start + len(self.tokens)))
        return [self.start + len(path) - 1 for path in self.paths()]

    def places(self) -> range:
        """Where keys and values are stored: one after the other in any case."""
        return range(self.start, self.start + len(self.tokens))


def make_batch(chunks: Sequence[Chunk], block_size: int) -> Batch:
    """A batch of the chunks with logits for every token."""
    positions = np.array([p for c in chunks for p in c.positions()], dtype=np.int64)
    places = np.array([p for c in chunks for p in c.places()], dtype=np.int64)
    paths = [[c.start + token for token in path] for c in chunks for path in c.paths()]
    blocks = [c.blocks[place // block_size] for c in chunks for place in c.places()]
    return Batch(
        tokens=np.array([token for c in chunks for token in c.tokens]),
        positions=positions,
        choice_of=np.repeat(np.arange(len(chunks)), [len(c.tokens) for c in chunks]),
        block_tables=[c.blocks for c in chunks],
        block_of=np.array(blocks, dtype=np.int64),
        offset_of=places % block_size,
        logits_index=np.arange(len(positions)),
        samples=[],
        prompt_rows=[],
        paths=tree_paths(paths, positions) if any(c.parents is not None for c in chunks) else None,
    )


def tree_paths(paths: Sequence[Sequence[int]], positions: np.ndarray) -> TreePaths:
    """The paths of tokens, each given by its places."""
    lengths = np.array([len(path) for path in paths])
    return TreePaths(
        start=positions + 1 - lengths,
        first=np.concatenate([[0], np.cumsum(lengths)]),
        places=np.array([place for path in paths for place in path], dtype=np.int64),
    )
