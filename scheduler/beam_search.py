"""Beam search: which candidates go on, which sequences are finished, and when no better ones can come.

The rules are those of transformers' `generate(num_beams=...)`. In a step each beam offers its most probable next
tokens. All offers compete by the sum of their log-probabilities: the best `width` of those that do not end become the
next beams; those that end and are among the best `width` are finished. A finished sequence's score is its sum divided
by (number of generated tokens) ** length_penalty; the best `width` of these are kept.

Diverse beam search (Vijayakumar et al., arXiv:1610.02424): groups of beams search one after the other in each step,
and a token costs `diversity_penalty` for each beam of an earlier group that has just taken it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from model_runner.contract import Candidate, SharedList, TokenLogprobs
from scheduler.interface import BeamSearch, FinishReason, TextWatch


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of generated tokens."""

    tokens: SharedList[int] = field(default_factory=SharedList)
    reports: SharedList[TokenLogprobs] = field(default_factory=SharedList)
    """One for each token, if logprobs were asked for."""
    logprob: float = 0.0
    """Sum over the tokens."""
    total: float = 0.0
    """The same, less what diversity cost: what beams compete by."""
    watch: TextWatch | None = None
    """Has seen the text, if there are stop strings."""

    def extended(self, candidate: Candidate, cost: float) -> "Beam":
        """With one more token, which the watch has not seen yet."""
        return replace(
            self,
            tokens=self.tokens.appended(candidate.token_id),
            reports=self.reports if candidate.report is None else self.reports.appended(candidate.report),
            logprob=self.logprob + candidate.logprob,
            total=self.total + candidate.logprob - cost,
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence that has ended."""

    beam: Beam
    score: float
    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A new beam: the row of the old one that it extends, and by which token."""

    row: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Rules:
    """What all groups of a search share."""

    search: BeamSearch
    stop_token_ids: tuple[int, ...]
    max_tokens: int

    @property
    def num_beams(self) -> int:
        """Of a group."""
        return self.search.width // self.search.groups

    @property
    def num_candidates(self) -> int:
        """How many offers each beam has to make, so that enough of them do not end.

        Those that other groups make dearer may fall behind the next ones.
        """
        others = self.search.width - self.num_beams if self.search.diversity_penalty else 0
        return max(2 * self.num_beams, self.num_beams + len(self.stop_token_ids)) + others

    def score(self, beam: Beam, length: int) -> float:
        """Of a beam as if it had so many tokens."""
        return float(beam.total / length**self.search.length_penalty)


class BeamGroup:
    """Beams that compete with each other."""

    def __init__(self, rules: Rules, first: Beam) -> None:
        self._rules = rules
        self.beams = [first]
        """Under way, the best first; none when the search is over."""
        self.finished: list[Finished] = []
        """The best first."""

    def advance(self, offers: Sequence[Sequence[Candidate]], taken: Mapping[int, int]) -> list[int]:
        """Make new beams; returns which of the old ones each of them extends.

        Args:
            offers: of each of `beams`, one token longer than these.
            taken: how often earlier groups took a token in this step.
        """
        going: list[tuple[int, Beam]] = []
        for rank, (parent, offer) in enumerate(self._best(offers, taken)):
            if len(going) == self._rules.num_beams and rank >= self._rules.num_beams:
                break
            beam, ended = self._judge(offer)
            if ended is None:
                going.append((parent, beam))
            elif rank < self._rules.num_beams:
                self.finished.append(ended)
        self.finished.sort(key=lambda ended: -ended.score)
        del self.finished[self._rules.num_beams :]
        del going[self._rules.num_beams :]
        if going and self._is_over(going[0][1]):
            going.clear()
        self.beams = [beam for _, beam in going]
        return [parent for parent, _ in going]

    def _best(self, offers: Sequence[Sequence[Candidate]], taken: Mapping[int, int]) -> Iterator[tuple[int, Beam]]:
        """The offers as (old beam, new beam), the best first; among equals that of the better old beam."""
        penalty = self._rules.search.diversity_penalty
        ranked = sorted(
            (taken.get(candidate.token_id, 0) * penalty - candidate.logprob - beam.total, parent, rank)
            for parent, (beam, of_beam) in enumerate(zip(self.beams, offers, strict=True))
            for rank, candidate in enumerate(of_beam)
        )
        for _, parent, rank in ranked:
            candidate = offers[parent][rank]
            yield parent, self.beams[parent].extended(candidate, taken.get(candidate.token_id, 0) * penalty)

    def _judge(self, beam: Beam) -> tuple[Beam, Finished | None]:
        """The beam with its last token seen, and how it ends if it does."""
        token = beam.tokens[-1]
        if token in self._rules.stop_token_ids:
            return beam, self._end(beam, FinishReason.STOP, token)
        if beam.watch is not None:
            watch = beam.watch.fork()
            beam = replace(beam, watch=watch)
            if watch.push(token):
                return beam, self._end(beam, FinishReason.STOP)
        if len(beam.tokens) == self._rules.max_tokens:
            return beam, self._end(beam, FinishReason.LENGTH)
        return beam, None

    def _end(self, beam: Beam, reason: FinishReason, stop_token_id: int | None = None) -> Finished:
        return Finished(beam, self._rules.score(beam, len(beam.tokens)), reason, stop_token_id)

    def _is_over(self, best: Beam) -> bool:
        """Whether no beam, of which this is the best, is expected to displace a finished sequence."""
        if len(self.finished) < self._rules.num_beams:
            return False
        search = self._rules.search
        if search.early_stopping is True:
            return True
        patient = search.early_stopping == "never" and search.length_penalty > 0
        length = self._rules.max_tokens if patient else len(best.tokens)
        return self._rules.score(best, length) <= self.finished[-1].score


class BeamSearcher:
    """A whole search. Its first step has one row, the prompt's, and later ones a row for each beam."""

    def __init__(self, rules: Rules, watch: TextWatch | None = None) -> None:
        self._groups = [BeamGroup(rules, Beam(watch=watch)) for _ in range(rules.search.groups)]
        self._rows = [[0] for _ in self._groups]

    def advance(self, offers: Sequence[Sequence[Candidate]]) -> list[Continuation]:
        """Take a step; returns the new beams, which are the rows of the next one. None: the search is over."""
        taken: Counter[int] = Counter()
        continuations: list[Continuation] = []
        for number, (group, rows) in enumerate(zip(self._groups, self._rows, strict=True)):
            parents = group.advance([offers[row] for row in rows], taken) if rows else []
            tokens = [beam.tokens[-1] for beam in group.beams]
            first = len(continuations)
            self._rows[number] = list(range(first, first + len(parents)))
            continuations += [Continuation(rows[parent], token) for parent, token in zip(parents, tokens, strict=True)]
            taken.update(tokens)
        return continuations

    def finished(self) -> list[Finished]:
        """What has ended so far and may be the answer, the best first."""
        return sorted(chain.from_iterable(group.finished for group in self._groups), key=lambda ended: -ended.score)

    def common(self, since: int) -> Beam:
        """The beginning that all sequences share which may still be the answer, from token number `since` on.

        The first `since` are known to be shared. Its sums mean nothing.
        """
        beams = [beam for group in self._groups for beam in group.beams]
        beams += [ended.beam for ended in self.finished()]
        end, most = since, min(len(beam.tokens) for beam in beams)
        while end < most and len({beam.tokens[end] for beam in beams}) == 1:
            end += 1
        return Beam(SharedList(beams[0].tokens[since:end]), SharedList(beams[0].reports[since:end]))
