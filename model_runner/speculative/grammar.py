"""Drafts tokens that a grammar forces, which cost nothing to find."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from model_runner.draft_tree import NO_DRAFT, DraftTree, chain
from model_runner.speculative.proposer import ChoiceStep, Proposer, TargetStep

if TYPE_CHECKING:
    from model_runner.sampling.grammar import Matcher

_FORCED, _GUESSED = 0.9, 0.5
"""Initial confidences, until they are measured: where the text is certain (but not its tokens), and elsewhere."""
_TOKENS_BEFORE = 64
"""How many output tokens are context for choosing between spellings."""

MatcherOf = Callable[[int], "Matcher | None"]
"""Returns the matcher after the output of a slot; None for a slot without grammar."""


class GrammarProposer(Proposer):
    """Drafts text that must come next: jump-forward decoding (Zheng et al., arXiv:2312.07104).

    The target still decides, so answers never change. Drafts nothing without a grammar.
    """

    def __init__(self, matcher_of: MatcherOf) -> None:
        self._matcher_of = matcher_of

    def propose(self, step: TargetStep) -> list[DraftTree]:
        return [self._draft(choice) for choice in step.choices]

    def _draft(self, choice: ChoiceStep) -> DraftTree:
        matcher = self._matcher_of(choice.slot)
        if matcher is None or not choice.max_nodes:
            return NO_DRAFT
        before = choice.tokens[max(choice.num_prompt, len(choice.tokens) - _TOKENS_BEFORE) :]
        guess = matcher.guess(before, choice.max_nodes)
        return chain(guess.tokens, [_FORCED if is_forced else _GUESSED for is_forced in guess.is_forced])


def prune(tree: DraftTree, matcher: "Matcher") -> DraftTree:
    """The tree without nodes that the grammar does not allow.

    Drawn tokens stay: removing some of them because of their values would change the distribution of the others.
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
