"""All substrings of some token sequences, with how often each occurs, built as tokens come."""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_NONE = -1
_EMPTY = 0
"""The state of the empty string."""


class Match(NamedTuple):
    """A string that occurs in an automaton."""

    state: int = _EMPTY
    length: int = 0


class SuffixAutomaton:
    """The smallest automaton that accepts every substring (Blumer et al. 1985), over any number of sequences.

    A state stands for all strings that end at the same places; its link leads to the longest suffix of these that
    ends at more. A token costs O(1) amortised to add or to match, and the counting at most `depth` steps more, as
    occurrences are counted for strings of at most `depth` tokens. There are at most 2n states and 3n edges for n
    tokens; most states have one edge, so that one lies in arrays: about 130 bytes a token, measured.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._length = array("i")
        """Of the longest string of each state."""
        self._link = array("i")
        self._count = array("i")
        self._token = array("i")
        """Of each state's first edge, and ..."""
        self._target = array("i")
        """... where it leads."""
        self._more: dict[int, dict[int, int]] = {}
        """The other edges of the states that have several."""
        self._add_state(0)

    def __len__(self) -> int:
        """How many states there are."""
        return len(self._length)

    # -- reading -------------------------------------------------------------------------------------------------------

    def advance(self, match: Match, token: int) -> Match:
        """The longest string that occurs and ends the match and the token, of at most `depth` tokens."""
        state, length = self._state_of(match), match.length
        while (target := self._follow(state, token)) == _NONE:
            if state == _EMPTY:
                return Match()
            state = self._link[state]
            length = self._length[state]
        return self._cut(Match(target, length + 1), self._depth)

    def shorter(self, match: Match) -> Match:
        """The longest suffix of a match that occurs at more places; the empty string has none."""
        state = self._link[self._state_of(match)]
        return Match(state, self._length[state])

    def count(self, match: Match) -> int:
        """How often the string occurs, if it is not longer than `depth`."""
        return self._count[self._state_of(match)]

    def following(self, match: Match) -> list[tuple[int, int, Match]]:
        """The tokens that follow a string somewhere, how often each does, and the string with the token at its end.

        A string of `depth` tokens is taken without its first one: what is longer is not counted.
        """
        match = self._cut(match, self._depth - 1)
        edges = ((token, target, self._count[target]) for token, target in self._edges(self._state_of(match)))
        return [(token, count, Match(target, match.length + 1)) for token, target, count in edges if count]

    def num_following(self, match: Match) -> int:
        """How many different tokens follow the string."""
        state = self._state_of(match)
        return 0 if self._target[state] == _NONE else 1 + len(self._more.get(state, ()))

    def _state_of(self, match: Match) -> int:
        """The state that has the string now: since the match was made, its state may have been split."""
        state = match.state
        while state != _EMPTY and match.length <= self._length[self._link[state]]:
            state = self._link[state]
        return state

    def _cut(self, match: Match, length: int) -> Match:
        """The match, or its suffix if it is longer."""
        if match.length <= length:
            return match
        return Match(self._state_of(Match(match.state, length)), length)

    # -- writing -------------------------------------------------------------------------------------------------------

    def append(self, last: int, token: int) -> int:
        """Add a sequence plus one token; `last` is the sequence's own state, and the result that of the longer one."""
        target = self._follow(last, token)
        if target != _NONE:
            return self._exact(last, token, target)
        new = self._add_state(self._length[last] + 1)
        state = last
        while state != _NONE and self._follow(state, token) == _NONE:
            self._set_edge(state, token, new)
            state = self._link[state]
        if state != _NONE:
            self._link[new] = self._exact(state, token, self._follow(state, token))
        else:
            self._link[new] = _EMPTY
        return new

    def _exact(self, state: int, token: int, target: int) -> int:
        """The state whose longest string is that of `state` plus the token: `target`, or what is split from it."""
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        split = self._add_state(length)
        self._link[split], self._link[target] = self._link[target], split
        self._count[split] = self._count[target]
        self._token[split], self._target[split] = self._token[target], self._target[target]
        if target in self._more:
            self._more[split] = self._more[target].copy()
        while state != _NONE and self._follow(state, token) == target:
            self._set_edge(state, token, split)
            state = self._link[state]
        return split

    def count_up(self, match: Match) -> None:
        """A string and all its suffixes occur once more."""
        state = self._state_of(match)
        while state != _EMPTY:
            self._count[state] += 1
            state = self._link[state]

    def _add_state(self, length: int) -> int:
        self._length.append(length)
        self._link.append(_NONE)
        self._count.append(0)
        self._token.append(0)
        self._target.append(_NONE)
        return len(self._length) - 1

    # -- edges ---------------------------------------------------------------------------------------------------------

    def _follow(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return _NONE if more is None else more.get(token, _NONE)

    def _set_edge(self, state: int, token: int, target: int) -> None:
        if self._target[state] == _NONE or self._token[state] == token:
            self._token[state], self._target[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target

    def _edges(self, state: int) -> Iterator[tuple[int, int]]:
        if self._target[state] != _NONE:
            yield self._token[state], self._target[state]
            yield from self._more.get(state, {}).items()


class Writer:
    """Adds one sequence to an automaton, token by token; several can take turns."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self._automaton = automaton
        self._last = _EMPTY
        self.end = Match()
        """The last tokens of the sequence, `depth` of them at most."""

    def extend(self, tokens: Sequence[int], *, counted: bool = True) -> None:
        """Add tokens; if they are only context, strings that end in them are not counted as occurrences."""
        automaton = self._automaton
        for token in tokens:
            self._last = automaton.append(self._last, token)
            self.end = automaton.advance(self.end, token)
            if counted:
                automaton.count_up(self.end)
