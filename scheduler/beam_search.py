"""Beam search: which candidates continue, which sequences are finished, and when the search can stop.

The rules follow transformers' `generate(num_beams=...)`. In each step every beam proposes its most probable next
tokens, and all proposals compete by the sum of their log-probabilities. The best `width` that do not end become the
next beams. Proposals that end and are among the best `width` are finished. A finished sequence's score is its sum
divided by (number of generated tokens) ** length_penalty; the best `width` are kept.

Diverse beam search (Vijayakumar et al., arXiv:1610.02424): groups of beams search one after the other in each step,
and a token costs `diversity_penalty` for each beam of an earlier group that has just taken it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from model_runner.contract import BeamCandidate, TokenLogprobs
from model_runner.shared_list import SharedList
from scheduler.interface import BeamSearch, FinishReason, TextWatch


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of generated tokens."""

    tokens: SharedList[int] = field(default_factory=SharedList)
    reports: SharedList[TokenLogprobs] = field(default_factory=SharedList)
    """One entry per token, if logprobs were requested."""
    logprob: float = 0.0
    """Sum of the tokens' log-probabilities."""
    total: float = 0.0
    """`logprob` minus diversity penalties: the value that beams compete by."""
    watch: TextWatch | None = None
    """Searches the text for stop strings, if there are any."""

    def extended(self, candidate: BeamCandidate, cost: float) -> "Beam":
        """A copy with one more token, which `watch` has not seen yet."""
        return replace(
            self,
            tokens=self.tokens.appended(candidate.token_id),
            reports=self.reports if candidate.report is None else self.reports.appended(candidate.report),
            logprob=self.logprob + candidate.logprob,
            total=self.total + candidate.logprob - cost,
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished sequence."""

    beam: Beam
    score: float
    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A new beam: the row of the old beam it extends, and the token it adds."""

    row: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Rules:
    """Parameters shared by all groups of a search."""

    search: BeamSearch
    stop_token_ids: tuple[int, ...]
    max_tokens: int

    @property
    def num_beams(self) -> int:
        """Beams per group."""
        return self.search.width // self.search.groups

    @property
    def num_candidates(self) -> int:
        """How many candidates each beam must propose so that enough of them do not end.

        With a diversity penalty more are needed, because penalised candidates may fall behind.
        """
        others = self.search.width - self.num_beams if self.search.diversity_penalty else 0
        return max(2 * self.num_beams, self.num_beams + len(self.stop_token_ids)) + others

    def score(self, beam: Beam, length: int) -> float:
        """The score of a beam if it had `length` tokens."""
        return float(beam.total / length**self.search.length_penalty)


class BeamGroup:
    """Beams that compete with each other."""

    def __init__(self, rules: Rules, first: Beam) -> None:
        self._rules = rules
        self.beams = [first]
        """Unfinished beams, best first. Empty when the search is over."""
        self.finished: list[Finished] = []
        """Best first."""

    def advance(self, offers: Sequence[Sequence[BeamCandidate]], taken: Mapping[int, int]) -> list[int]:
        """Advance by one token. Returns, for each new beam, the index of the old beam it extends.

        Args:
            offers: the candidates of each of `beams`.
            taken: how often earlier groups took each token in this step.
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

    def _best(self, offers: Sequence[Sequence[BeamCandidate]], taken: Mapping[int, int]) -> Iterator[tuple[int, Beam]]:
        """All candidates as (old beam, new beam), best first. Ties go to the better old beam."""
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
        """Check the last token. Returns the beam and, if it ends here, its finished form."""
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
        """Whether no beam can be expected to displace a finished sequence, given the best beam."""
        if len(self.finished) < self._rules.num_beams:
            return False
        search = self._rules.search
        if search.early_stopping is True:
            return True
        patient = search.early_stopping == "never" and search.length_penalty > 0
        length = self._rules.max_tokens if patient else len(best.tokens)
        return self._rules.score(best, length) <= self.finished[-1].score


class BeamSearcher:
    """A complete search. Its first step has one row for the prompt; later steps have a row per beam."""

    def __init__(self, rules: Rules, watch: TextWatch | None = None) -> None:
        self._groups = [BeamGroup(rules, Beam(watch=watch)) for _ in range(rules.search.groups)]
        self._rows = [[0] for _ in self._groups]

    def advance(self, offers: Sequence[Sequence[BeamCandidate]]) -> list[Continuation]:
        """Advance by one token. Returns the new beams, which are the next step's rows; none if the search is over."""
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
        """All finished sequences that may be the answer, best first."""
        return sorted(chain.from_iterable(group.finished for group in self._groups), key=lambda ended: -ended.score)

    def common(self, since: int) -> Beam:
        """Tokens from position `since` on that all remaining sequences share. Its sums are meaningless.

        The first `since` tokens must be known to be shared.
        """
        beams = [beam for group in self._groups for beam in group.beams]
        beams += [ended.beam for ended in self.finished()]
        end, most = since, min(len(beam.tokens) for beam in beams)
        while end < most and len({beam.tokens[end] for beam in beams}) == 1:
            end += 1
        return Beam(SharedList(beams[0].tokens[since:end]), SharedList(beams[0].reports[since:end]))
