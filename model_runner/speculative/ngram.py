"""Prompt lookup: what followed the last few tokens when they stood there before."""

from collections.abc import Sequence

from model_runner.draft_tree import NO_DRAFT, DraftTree, chain
from model_runner.models.features import Feature
from model_runner.speculative.intake import share_out
from model_runner.speculative.proposer import NewChoice, TargetStep

_LONGEST = 4
"""Tokens of context that are matched at most, and ..."""
_SHORTEST = 2
"""... at least: a single token says too little."""
_CONFIDENCE = {2: 0.4, 3: 0.6, 4: 0.8}
"""A first guess for each length of match, until it has been measured."""
INTAKE = 512
"""Tokens that are indexed in a step at most: 2.3 us each, so about a millisecond."""


class NgramProposer:
    """Continues as the most recent place continued that ends in the same n tokens, n as large as can be.

    Saxena, Prompt Lookup Decoding, 2023. Places are indexed as tokens come, so a step costs no search. What is not
    indexed yet is not found.
    """

    needs: frozenset[Feature] = frozenset()
    reads_step = False
    sees_all_steps = False

    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}

    def begin(self, choice: NewChoice) -> None:
        """See Proposer.begin."""
        self._indices[choice.slot] = _Index()

    def propose(self, step: TargetStep) -> list[DraftTree]:
        """See Proposer.propose."""
        indices = [self._indices[choice.slot] for choice in step.choices]
        missing = [index.missing(choice.tokens) for index, choice in zip(indices, step.choices, strict=True)]
        trees = []
        for index, choice, count in zip(indices, step.choices, share_out(missing, INTAKE), strict=True):
            index.extend(choice.tokens, count)
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

    def missing(self, tokens: Sequence[int]) -> int:
        return max(len(tokens) - 1 - self._num_indexed, 0)

    def extend(self, tokens: Sequence[int], count: int) -> None:
        for end in range(self._num_indexed, self._num_indexed + count):
            for size in range(_SHORTEST, min(_LONGEST, end + 1) + 1):
                self._ends[tuple(tokens[end + 1 - size : end + 1])] = end
        self._num_indexed += count

    def continuation(self, tokens: Sequence[int], count: int) -> DraftTree:
        for size in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            end = self._ends.get(tuple(tokens[-size:]))
            if end is not None:
                following = tokens[end + 1 : end + 1 + count]
                return chain(following, [_CONFIDENCE[size]] * len(following))
        return NO_DRAFT
