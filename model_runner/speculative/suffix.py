"""SuffixDecoding: what followed the longest stretch of the last tokens, here and in earlier answers."""

from collections.abc import Sequence
from contextlib import suppress

from model_runner.draft_tree import DraftTree
from model_runner.models.features import Feature
from model_runner.speculative.intake import share_out
from model_runner.speculative.native_suffix import DEPTH, DraftCall, NativeChoice, SuffixLibrary
from model_runner.speculative.past_outputs import PastOutputs
from model_runner.speculative.proposer import ChoiceStep, NewChoice, TargetStep

INTAKE = 4096
"""Tokens of running choices that are taken in in a step at most: 0.15 us each, so half a millisecond; and ..."""
PAST_INTAKE = 2048
"""... tokens of past outputs."""


class SuffixProposer:
    """Drafts trees from suffix automata: one of the choice's own tokens, and those of past outputs with its salt.

    SuffixDecoding (Oliaro et al., arXiv:2411.04975): the more tokens match, the more are drafted; branches grow by
    their probability, which comes from counts; of several matches in several automata that with the most expected
    tokens wins. The paper takes the ratio of counts; here what was never seen has its share of the probability as well,
    so that one occurrence is no certainty. All that is native, in one call for all choices (kernels/suffix).

    A choice whose own tokens are not all taken in yet is drafted for from past outputs alone.
    """

    needs: frozenset[Feature] = frozenset()
    reads_step = False
    sees_all_steps = False

    def __init__(self, library: SuffixLibrary) -> None:
        self._library = library
        self._choices: dict[int, _Choice] = {}
        self._past = PastOutputs(library)

    def begin(self, choice: NewChoice) -> None:
        """See Proposer.begin."""
        self._choices[choice.slot] = _Choice(choice, self._library)

    def propose(self, step: TargetStep) -> list[DraftTree]:
        """See Proposer.propose."""
        self._past.take_in(PAST_INTAKE)
        choices = [self._choices[choice.slot] for choice in step.choices]
        call = DraftCall(self._library)
        shares = share_out([choice.num_missing for choice in choices], INTAKE)
        for choice, share, brought in zip(choices, shares, step.choices, strict=True):
            choice.join(call, brought, share, self._past)
        return call.trees()

    def end(self, slot: int) -> None:
        """See Proposer.end. What came since `begin` is kept for later choices: all of it was generated, by this choice
        and not by the one that it may have been before preemption.
        """
        choice = self._choices.pop(slot)
        with suppress(MemoryError):  # it only makes later answers faster
            self._past.add(choice.salt, *choice.generated())


class _Choice:
    """One choice's tokens, and how many of them its native side knows."""

    def __init__(self, new: NewChoice, library: SuffixLibrary) -> None:
        self.salt = new.cache_salt
        self._tokens = new.tokens
        self._native = NativeChoice(library, new.tokens)
        self._num_given = self._num_followed = len(new.tokens)
        self._stops = frozenset(new.sampling.stop_token_ids)
        self._end: int | None = None
        """After the first stop token of the output."""
        self._num_taken_in = 0

    @property
    def num_missing(self) -> int:
        """How many tokens its own automaton misses."""
        return len(self._tokens) - self._num_taken_in

    def join(self, call: DraftCall, step: ChoiceStep, share: int, past: PastOutputs) -> None:
        """Have so many more tokens taken in, and a tree drafted if the step is one of those that want one."""
        taken_in = self._tokens[self._num_taken_in : self._num_taken_in + share]
        self._num_taken_in += share
        if step.num_new:
            call.add_running(
                self._native,
                taken_in,
                self._new_output(),
                past.of_salt(self.salt),
                is_whole=not self.num_missing,
                max_nodes=step.max_nodes,
            )
        else:
            call.add(self._native, taken_in)

    def generated(self) -> tuple[Sequence[int], Sequence[int]]:
        """The context before, and the output since this began; what was drawn beyond a stop token is no output."""
        self._new_output()
        tokens, first = self._tokens, self._num_given
        return tokens[max(first - DEPTH, 0) : first], tokens[first : self._end]

    def _new_output(self) -> Sequence[int]:
        """What came since this was called last."""
        start, self._num_followed = self._num_followed, len(self._tokens)
        new = self._tokens[start:]
        if self._end is None and not self._stops.isdisjoint(new):
            self._end = start + 1 + next(place for place, token in enumerate(new) if token in self._stops)
        return new
