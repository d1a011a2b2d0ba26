"""Predicted outputs: the client sends the expected output, for example when it asks for a small edit of a long text."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.speculative.growing import grow_best_first
from model_runner.speculative.proposer import NewChoice, Proposer, TargetStep, share_out

_MOST_PLACES = 3
"""Maximum number of guesses at a time of the output's place in the prediction."""
_LONGEST = 16
"""Maximum number of tokens compared to find the place."""
_NEAR = 32
"""A single token is searched only within this many tokens, because it could occur anywhere."""
_MOST_TRIED = 64
"""Maximum number of places compared with the output, nearest to the last mismatch."""
_SURE = 4
"""A place is certain after this many correct tokens. The start of the prediction is trusted as much."""
_LEAST = 0.05
"""Minimum probability of a node."""
INTAKE = 512
"""Maximum number of tokens indexed per step: 1.7 us each, so about a millisecond."""


class PredictionProposer(Proposer):
    """Drafts the next part of the prediction, even after the output has deviated from it.

    After a deviation, something was replaced, removed or inserted. The next place is then searched where the last
    tokens of the output occur in the prediction. Several possible places make a tree; the next tokens show which of
    them are right.
    """

    def __init__(self) -> None:
        self._choices: dict[int, _Follower] = {}

    def begin(self, choice: NewChoice) -> None:
        self._choices[choice.slot] = _Follower(choice.speculation.prediction, choice.num_prompt)

    def propose(self, step: TargetStep) -> list[DraftTree]:
        followers = [self._choices[choice.slot] for choice in step.choices]
        missing = [follower.missing(choice.tokens) for follower, choice in zip(followers, step.choices, strict=True)]
        trees = []
        for follower, choice, count in zip(followers, step.choices, share_out(missing, INTAKE), strict=True):
            follower.take_in(choice.tokens, count)
            trees.append(NO_DRAFT if follower.missing(choice.tokens) else follower.draft(choice.max_nodes))
        return trees

    def end(self, slot: int) -> None:
        del self._choices[slot]


class _Place(NamedTuple):
    """A possible place of the output in the prediction."""

    place: int
    """Index of the prediction's token that should come next."""
    streak: int
    """Number of tokens before the place that matched the output."""


_Places = tuple[_Place, ...]


class _Follower:
    """Follows one choice's output in its prediction, once both are indexed, the prediction first."""

    def __init__(self, prediction: tuple[int, ...], num_prompt: int) -> None:
        self._prediction = prediction
        self._num_prompt = num_prompt
        self._num_known = num_prompt
        self._places: _Places = (_Place(0, _SURE),)
        self._parted = 0
        """Place of the last mismatch in the prediction."""
        self._num_since = 0
        """Output tokens since the last mismatch."""
        self._after: dict[tuple[int, ...], list[int]] = {}
        """The places after each pair of tokens, in ascending order."""
        self._num_indexed = min(len(prediction), 1)
        """Leading tokens of the prediction whose pairs are indexed."""

    def missing(self, tokens: Sequence[int]) -> int:
        """Number of tokens of prediction and output that are not indexed yet."""
        return len(self._prediction) - self._num_indexed + max(len(tokens) - self._num_known, 0)

    def take_in(self, tokens: Sequence[int], count: int) -> None:
        """Index the next `count` tokens, first of the prediction, then of the output."""
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
        """The tree of what follows the current places."""
        return grow_best_first(self._places, self._children, max_nodes, _LEAST)

    def _advance(self, places: _Places, token: int) -> _Places:
        """The places that expected this token, moved past it."""
        return tuple(_Place(place + 1, streak + 1) for place, streak in places if self._token(place) == token)

    def _token(self, place: int) -> int | None:
        return self._prediction[place] if place < len(self._prediction) else None

    def _children(self, places: _Places) -> list[tuple[int, float, _Places]]:
        """Expected next tokens; the certainty depends on the longest streak among the places."""
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
        """Possible places after the last token of `output`, which no place expected."""
        for place, streak in self._places[:1]:
            if streak >= _SURE:
                self._parted, self._num_since = place, 0
        self._num_since += 1
        found: dict[int, _Place] = {}
        for candidate in self._candidates(output):
            found.setdefault(candidate.place, candidate)
        return tuple(found.values())[:_MOST_PLACES]

    def _candidates(self, output: Sequence[int]) -> Iterator[_Place]:
        """Best places first: by the length of the match before them, then the next one after the mismatch."""
        found = self._after.get(tuple(output[-2:]), [])
        middle = bisect_left(found, self._parted)
        near = found[max(middle - _MOST_TRIED // 2, 0) : middle + _MOST_TRIED // 2]
        places = [_Place(place, self._streak(place, output)) for place in near]
        yield from sorted(places, key=self._rank)[:_MOST_PLACES]
        window = self._prediction[self._parted : self._parted + _NEAR]
        if output[-1] in window:  # the tokens before it were removed
            yield _Place(self._parted + window.index(output[-1]) + 1, 1)
        yield _Place(self._parted + self._num_since, 0)  # as many tokens were replaced
        yield _Place(self._parted, 0)  # tokens were inserted

    def _rank(self, place: _Place) -> tuple[int, bool, int]:
        return -place.streak, place.place < self._parted, abs(place.place - self._parted)

    def _streak(self, place: int, output: Sequence[int]) -> int:
        """How many tokens before the place match the end of the output."""
        streak = 0
        while streak < min(place, len(output)) and self._prediction[place - 1 - streak] == output[-1 - streak]:
            streak += 1
        return streak
