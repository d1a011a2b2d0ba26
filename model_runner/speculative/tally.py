"""Counting what a method's drafts brought."""

from model_runner.draft_tree import DraftTree
from model_runner.info import SpeculationStats
from model_runner.speculative.verify import Verdict


class Tally:
    """Counts of one method since the start; see SpeculationStats."""

    def __init__(self) -> None:
        self._drafted = 0
        self._accepted_by_depth: list[int] = []
        self._verified_by_depth: list[int] = []
        self._steps = 0
        self._tokens = 0
        self.draft_s = 0.0
        self._verify_s = 0.0

    def count(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        """A choice's drafts were verified, in its share of the step's time."""
        accepted, deepest = len(verdict.nodes), max(tree.depths())
        self._drafted += len(tree)
        self._steps += 1
        self._tokens += len(verdict.tokens)
        self._verify_s += seconds
        for counts in (self._accepted_by_depth, self._verified_by_depth):
            counts.extend([0] * (deepest - len(counts)))
        for depth in range(accepted):
            self._accepted_by_depth[depth] += 1
        for depth in range(min(accepted + 1, deepest)):
            self._verified_by_depth[depth] += 1

    def stats(self, method: str) -> SpeculationStats:
        """The counts under the method's name."""
        return SpeculationStats(
            method=method,
            drafted=self._drafted,
            accepted_by_depth=tuple(self._accepted_by_depth),
            verified_by_depth=tuple(self._verified_by_depth),
            steps=self._steps,
            tokens=self._tokens,
            draft_s=self.draft_s,
            verify_s=self._verify_s,
        )
