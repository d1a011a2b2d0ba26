"""What a grammar leaves no choice about is a draft that costs nothing to find."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from model_runner.draft_tree import NO_DRAFT, DraftTree, chain
from model_runner.models.features import Feature
from model_runner.speculative.proposer import ChoiceStep, NewChoice, TargetStep

if TYPE_CHECKING:
    from model_runner.sampling.grammar import Matcher

_FORCED, _GUESSED = 0.9, 0.5
"""First guesses, until it has been measured: where the text is certain (but not how it is spelled), and elsewhere."""
_TOKENS_BEFORE = 64
"""Of the output, in whose manner it goes on."""

MatcherOf = Callable[[int], "Matcher | None"]
"""What follows the output of a slot that has a grammar."""


class GrammarProposer:
    """Drafts the keys and marks that must come next: jump-forward decoding (Zheng et al., arXiv:2312.07104), but the
    target still decides, so that it never changes the answer. Drafts nothing without a grammar.
    """

    needs: frozenset[Feature] = frozenset()
    reads_step = False
    sees_all_steps = False

    def __init__(self, matcher_of: MatcherOf) -> None:
        self._matcher_of = matcher_of

    def begin(self, choice: NewChoice) -> None:
        """See Proposer.begin."""

    def propose(self, step: TargetStep) -> list[DraftTree]:
        """See Proposer.propose."""
        return [self._draft(choice) for choice in step.choices]

    def end(self, slot: int) -> None:
        """See Proposer.end."""

    def _draft(self, choice: ChoiceStep) -> DraftTree:
        matcher = self._matcher_of(choice.slot)
        if matcher is None or not choice.max_nodes:
            return NO_DRAFT
        before = choice.tokens[max(choice.num_prompt, len(choice.tokens) - _TOKENS_BEFORE) :]
        guess = matcher.guess(before, choice.max_nodes)
        return chain(guess.tokens, [_FORCED if is_forced else _GUESSED for is_forced in guess.is_forced])


def prune(tree: DraftTree, matcher: "Matcher") -> DraftTree:
    """The tree without the nodes that the grammar does not allow, which would be computed for nothing.

    Drawn tokens stay: leaving out some of them for what they are would change the distribution of the rest.
    """
    if tree.drawn_from is not None:
        return tree
    fitting: set[int] = set()
    for leaf in _leaves(tree):
        path = tree.path(leaf)
        fitting.update(path[: matcher.fitting([tree.tokens[node] for node in path])])
    return tree if len(fitting) == len(tree) else tree.take(sorted(fitting))


def _leaves(tree: DraftTree) -> Sequence[int]:
    parents = set(tree.parents)
    return [node for node in range(len(tree)) if node not in parents]
