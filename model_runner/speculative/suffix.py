"""SuffixDecoding: what followed the longest stretch of the last tokens, here and in earlier answers."""

from collections.abc import Iterator, Sequence
from functools import partial

from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.models.features import Feature
from model_runner.speculative.best_first import grow_best_first
from model_runner.speculative.intake import share_out
from model_runner.speculative.past_outputs import PastOutputs
from model_runner.speculative.proposer import ChoiceStep, NewChoice, TargetStep
from model_runner.speculative.suffix_automaton import Match, SuffixAutomaton, Writer

DEPTH = 64
"""Tokens of context that are looked at, at most, those of the draft included."""
_FACTOR = 2.0
"""A draft has at most so many nodes for each token of the match that it starts from, ..."""
_OFFSET = 1
"""... and so many more."""
_LEAST = 0.1
"""Nodes that are less probable than this are left out."""
_TRIES = 2
"""Matches from which drafts are grown in each automaton, the longest first."""
_MANY = 32
"""What is followed by more different tokens than this says little about the next one."""
_NOVELTY = 2.6
"""The weight of all that was never seen to follow, times the length of the match. This and the formula it is in fit how
text and source code repeat themselves."""
INTAKE = 256
"""Tokens of running choices that are taken in in a step at most: 5 us each, so about a millisecond; and ..."""
PAST_INTAKE = 128
"""... tokens of past outputs."""


class SuffixProposer:
    """Drafts trees from suffix automata: one of the choice's own tokens, and those of past outputs with its salt.

    SuffixDecoding (Oliaro et al., arXiv:2411.04975): the more tokens match, the more are drafted; branches grow by
    their probability, which comes from counts; of several matches in several automata that with the most expected
    tokens wins. The paper takes the ratio of counts; here what was never seen has its share of the probability as well,
    so that one occurrence is no certainty.

    A choice whose own tokens are not all taken in yet is drafted for from past outputs alone.
    """

    needs: frozenset[Feature] = frozenset()
    reads_step = False
    sees_all_steps = False

    def __init__(self) -> None:
        self._choices: dict[int, _Choice] = {}
        self._past = PastOutputs(DEPTH)

    def begin(self, choice: NewChoice) -> None:
        """See Proposer.begin."""
        self._choices[choice.slot] = _Choice(choice)

    def propose(self, step: TargetStep) -> list[DraftTree]:
        """See Proposer.propose."""
        missing = [self._choices[choice.slot].num_missing for choice in step.choices]
        for choice, count in zip(step.choices, share_out(missing, INTAKE), strict=True):
            self._choices[choice.slot].take_in(count)
        self._past.take_in(PAST_INTAKE)
        return [self._propose(choice) for choice in step.choices]

    def end(self, slot: int) -> None:
        """See Proposer.end. What came since `begin` is kept for later choices: all of it was generated, by this choice
        and not by the one that it may have been before preemption.
        """
        choice = self._choices.pop(slot)
        self._past.add(choice.new.cache_salt, *choice.generated())

    def _propose(self, step: ChoiceStep) -> DraftTree:
        if not step.num_new:
            return NO_DRAFT
        choice = self._choices[step.slot]
        choice.follow(self._past.of_salt(choice.new.cache_salt))
        best, best_score = NO_DRAFT, 0.0
        for automaton, match in choice.matches():
            max_nodes = min(step.max_nodes, int(_FACTOR * match.length + _OFFSET))
            if max_nodes > best_score:  # otherwise even certain drafts would not be better
                tree = grow_best_first(match, partial(_children, automaton), max_nodes, _LEAST)
                score = sum(tree.survival())
                best, best_score = (tree, score) if score > best_score else (best, best_score)
        return best


class _Choice:
    """One choice's tokens, and where the last of them stand in the automata."""

    def __init__(self, new: NewChoice) -> None:
        self.new = new
        self._num_given = self._num_followed = len(new.tokens)
        self._stops = frozenset(new.sampling.stop_token_ids)
        self._end: int | None = None
        """After the first stop token of the output."""
        self._num_taken_in = 0
        self._own = SuffixAutomaton(DEPTH)
        self._writer = Writer(self._own)
        self._past: list[tuple[SuffixAutomaton, Match]] = []

    @property
    def num_missing(self) -> int:
        """How many tokens its own automaton misses."""
        return len(self.new.tokens) - self._num_taken_in

    def take_in(self, count: int) -> None:
        """Add so many tokens to its own automaton."""
        self._writer.extend(self.new.tokens[self._num_taken_in : self._num_taken_in + count])
        self._num_taken_in += count

    def follow(self, past: Sequence[SuffixAutomaton]) -> None:
        """Go on in past outputs with the tokens that are new."""
        new = self._new_output()
        matches = {id(automaton): match for automaton, match in self._past}
        context = self.new.tokens[-DEPTH:]
        self._past = [
            (automaton, _advance(automaton, matches[id(automaton)], new))
            if id(automaton) in matches
            else (automaton, _advance(automaton, Match(), context))
            for automaton in past
        ]

    def matches(self) -> Iterator[tuple[SuffixAutomaton, Match]]:
        """Where drafts may start: ends of the known tokens, as long as can be, that something follows."""
        own = [] if self.num_missing else [(self._own, self._writer.end)]
        for automaton, match in [*own, *self._past]:
            tries = 0
            shorter = match
            while shorter.length and tries < _TRIES:
                if 0 < automaton.num_following(shorter) <= _MANY:
                    yield automaton, shorter
                    tries += 1
                shorter = automaton.shorter(shorter)

    def generated(self) -> tuple[Sequence[int], Sequence[int]]:
        """The context before, and the output since this began; what was drawn beyond a stop token is no output."""
        self._new_output()
        tokens, first = self.new.tokens, self._num_given
        return tokens[max(first - DEPTH, 0) : first], tokens[first : self._end]

    def _new_output(self) -> Sequence[int]:
        """What came since this was called last."""
        start, self._num_followed = self._num_followed, len(self.new.tokens)
        new = self.new.tokens[start:]
        if self._end is None:
            self._end = next((place + 1 for place, token in enumerate(new, start) if token in self._stops), None)
        return new


def _advance(automaton: SuffixAutomaton, match: Match, tokens: Sequence[int]) -> Match:
    for token in tokens:
        match = automaton.advance(match, token)
    return match


def _children(automaton: SuffixAutomaton, match: Match) -> list[tuple[int, float, Match]]:
    """What followed the match, each with its probability: its share of the counts, less where there are rivals."""
    following = automaton.following(match)
    weight = sum(count for _, count, _ in following) + _NOVELTY / match.length
    rivals = int(len(following) > 1)
    return [(token, count / weight * count / (count + rivals), child) for token, count, child in following]
