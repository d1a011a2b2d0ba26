"""Predicted outputs: the client says what it expects to get back, as when it asks for a small change to a long text."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.models.features import Feature
from model_runner.speculative.growing import grow_best_first
from model_runner.speculative.proposer import NewChoice, TargetStep, share_out

_MOST_PLACES = 3
"""Guesses at once of where the output stands in the prediction, best first."""
_LONGEST = 16
"""Tokens that are compared to find out, at most."""
_NEAR = 32
"""A single token is found again only so many tokens ahead: it could stand anywhere."""
_MOST_TRIED = 64
"""Places that are compared with the output, at most, where it may stand at many: those around the last parting."""
_SURE = 4
"""So many tokens that came as predicted prove a place. The beginning is trusted like this from the start."""
_LEAST = 0.05
"""Nodes that are less probable than this are left out."""
INTAKE = 512
"""Tokens of predictions and outputs that are taken in in a step at most: 1.7 us each, so about a millisecond."""


class PredictionProposer:
    """Drafts the part of the prediction that comes next, also after output and prediction have parted.

    Where they differ, something was replaced, left out or added. So the next place is sought where the last tokens of
    the output stand in the prediction, and the output is guessed to go on from there. Several guesses make a tree; the
    tokens that come tell which are right.
    """

    needs: frozenset[Feature] = frozenset()
    reads_step = False
    sees_all_steps = False

    def __init__(self) -> None:
        self._choices: dict[int, _Follower] = {}

    def begin(self, choice: NewChoice) -> None:
        """See Proposer.begin."""
        self._choices[choice.slot] = _Follower(choice.speculation.prediction, choice.num_prompt)

    def propose(self, step: TargetStep) -> list[DraftTree]:
        """See Proposer.propose."""
        followers = [self._choices[choice.slot] for choice in step.choices]
        missing = [follower.missing(choice.tokens) for follower, choice in zip(followers, step.choices, strict=True)]
        trees = []
        for follower, choice, count in zip(followers, step.choices, share_out(missing, INTAKE), strict=True):
            follower.take_in(choice.tokens, count)
            trees.append(NO_DRAFT if follower.missing(choice.tokens) else follower.draft(choice.max_nodes))
        return trees

    def end(self, slot: int) -> None:
        """See Proposer.end."""
        del self._choices[slot]


class _Place(NamedTuple):
    """A guess of where the output stands."""

    place: int
    """The token of the prediction that should come next."""
    streak: int
    """How many tokens came as they stand before it."""


_Places = tuple[_Place, ...]


class _Follower:
    """Where one choice's output stands in its prediction; known once both are taken in, the prediction first."""

    def __init__(self, prediction: tuple[int, ...], num_prompt: int) -> None:
        self._prediction = prediction
        self._num_prompt = num_prompt
        self._num_known = num_prompt
        self._places: _Places = (_Place(0, _SURE),)
        self._parted = 0
        """Where output and prediction parted last, and ..."""
        self._num_since = 0
        """... how many tokens of output came since."""
        self._after: dict[tuple[int, ...], list[int]] = {}
        """The places that follow each pair of tokens, in ascending order."""
        self._num_indexed = min(len(prediction), 1)
        """Leading tokens of the prediction whose pairs are there."""

    def missing(self, tokens: Sequence[int]) -> int:
        """Tokens of prediction and output that are not taken in yet."""
        return len(self._prediction) - self._num_indexed + max(len(tokens) - self._num_known, 0)

    def take_in(self, tokens: Sequence[int], count: int) -> None:
        """Take in so many more, those of the prediction first."""
        num_indexed = min(self._num_indexed + count, len(self._prediction))
        count -= num_indexed - self._num_indexed
        for place in range(self._num_indexed + 1, num_indexed + 1):
            self._after.setdefault(self._prediction[place - 2 : place], []).append(place)
        self._num_indexed = num_indexed
        for known in range(self._num_known, self._num_known + count):
            agreed = self._advance(self._places, tokens[known])
            if not agreed:
                agreed = self._seek(tokens[max(self._num_prompt, known + 1 - _LONGEST) : known + 1])
            self._places = agreed
        self._num_known += count

    def draft(self, max_nodes: int) -> DraftTree:
        """What comes next if the places are right."""
        return grow_best_first(self._places, self._children, max_nodes, _LEAST)

    def _advance(self, places: _Places, token: int) -> _Places:
        """The places that expected this token, after it."""
        return tuple(_Place(place + 1, streak + 1) for place, streak in places if self._token(place) == token)

    def _token(self, place: int) -> int | None:
        return self._prediction[place] if place < len(self._prediction) else None

    def _children(self, places: _Places) -> list[tuple[int, float, _Places]]:
        """The tokens that the places expect: together the more certain the longer the best of them was right."""
        tokens = {token for place in places if (token := self._token(place.place)) is not None}
        total = sum(place.streak + 1 for place in places)
        best = max((place.streak for place in places), default=0)
        children = []
        for token in sorted(tokens):
            after = self._advance(places, token)
            certainty = (best + 1) / (best + 2)  # the rule of succession
            children.append((token, certainty * sum(place.streak for place in after) / total, after))
        return children

    def _seek(self, output: Sequence[int]) -> _Places:
        """Where the output may stand after a token, the last of `output`, that no place expected."""
        for place, streak in self._places[:1]:
            if streak >= _SURE:
                self._parted, self._num_since = place, 0
        self._num_since += 1
        found: dict[int, _Place] = {}
        for candidate in self._candidates(output):
            found.setdefault(candidate.place, candidate)
        return tuple(found.values())[:_MOST_PLACES]

    def _candidates(self, output: Sequence[int]) -> Iterator[_Place]:
        """The best first: those with the most of the output before them; of equals, the next one after the parting."""
        found = self._after.get(tuple(output[-2:]), [])
        middle = bisect_left(found, self._parted)
        near = found[max(middle - _MOST_TRIED // 2, 0) : middle + _MOST_TRIED // 2]
        places = [_Place(place, self._streak(place, output)) for place in near]
        yield from sorted(places, key=self._rank)[:_MOST_PLACES]
        window = self._prediction[self._parted : self._parted + _NEAR]
        if output[-1] in window:  # what stands before it was left out
            yield _Place(self._parted + window.index(output[-1]) + 1, 1)
        yield _Place(self._parted + self._num_since, 0)  # as many tokens were replaced
        yield _Place(self._parted, 0)  # tokens were added

    def _rank(self, place: _Place) -> tuple[int, bool, int]:
        return -place.streak, place.place < self._parted, abs(place.place - self._parted)

    def _streak(self, place: int, output: Sequence[int]) -> int:
        """How many tokens before the place are the last ones of the output."""
        streak = 0
        while streak < min(place, len(output)) and self._prediction[place - 1 - streak] == output[-1 - streak]:
            streak += 1
        return streak
