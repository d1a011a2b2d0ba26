"""Prompt lookup: what followed the last few tokens when they stood there before."""

from collections.abc import Sequence

from model_runner.draft_tree import NO_DRAFT, DraftTree, chain
from model_runner.models.features import Feature
from model_runner.speculative.proposer import NewChoice, TargetStep

_LONGEST = 4
"""Tokens of context that are matched at most, and ..."""
_SHORTEST = 2
"""... at least: a single token says too little."""
_CONFIDENCE = {2: 0.4, 3: 0.6, 4: 0.8}
"""A first guess for each length of match, until it has been measured."""


class NgramProposer:
    """Continues as the most recent place continued that ends in the same n tokens, n as large as can be.

    Saxena, Prompt Lookup Decoding, 2023. Places are indexed as tokens come, so a step costs no search.
    """

    needs: frozenset[Feature] = frozenset()
    reads_step = False

    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}

    def begin(self, choice: NewChoice) -> None:
        """See Proposer.begin."""
        self._indices[choice.slot] = _Index()

    def propose(self, step: TargetStep) -> list[DraftTree]:
        """See Proposer.propose."""
        trees = []
        for choice in step.choices:
            index = self._indices[choice.slot]
            index.extend(choice.tokens)
            trees.append(index.continuation(choice.tokens, choice.max_nodes))
        return trees

    def end(self, slot: int) -> None:
        """See Proposer.end."""
        del self._indices[slot]


class _Index:
    """Where each n-gram of one choice's tokens ended last; not the one that ends with the last token."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        for end in range(self._num_indexed, len(tokens) - 1):
            for size in range(_SHORTEST, min(_LONGEST, end + 1) + 1):
                self._ends[tuple(tokens[end + 1 - size : end + 1])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)

    def continuation(self, tokens: Sequence[int], count: int) -> DraftTree:
        for size in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            end = self._ends.get(tuple(tokens[-size:]))
            if end is not None:
                following = tokens[end + 1 : end + 1 + count]
                return chain(following, [_CONFIDENCE[size]] * len(following))
        return NO_DRAFT
