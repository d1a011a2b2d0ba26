"""Verification of drafts: the target walks along each tree while its next token is a node there."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from model_runner.batch import SampleRows
from model_runner.contract import BeamCandidate, Failure, TokenLogprobs, Verification
from model_runner.draft_tree import ROOT, DraftTree, Fork
from model_runner.kernels.row_sums import entropies, row_softmax, row_sums
from model_runner.sampling.noise import Stream, uniform
from model_runner.sampling.rows import (
    NO_EARLY_TOKENS,
    NO_TOKEN,
    EarlyTokens,
    SampleAllowed,
    SamplingRows,
    SamplingState,
)
from model_runner.sampling.sampler import NOT_FINITE, Draw, Sampler


@dataclass(slots=True)
class Verdict:
    """Decision of a step for one choice."""

    tokens: list[int] = field(default_factory=list)
    """The new tokens. All except the last were drafts, so they are already computed."""
    nodes: list[int] = field(default_factory=list)
    """The accepted draft nodes from the root's child on: one for each of `tokens` except the last."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    candidates: tuple[BeamCandidate, ...] = ()
    """Replaces tokens in beam search."""
    sampler_state: float | None = None
    """The sampler's state after these tokens."""
    error: Failure | None = None
    pooled: bytes = b""
    """Numbers for a pooling request (`ChoiceResult.pooled`)."""


@dataclass(slots=True)
class _Walk:
    sample: SampleRows
    slot: int
    children: dict[tuple[int, int], int]
    verdict: Verdict
    node: int | None = ROOT
    """The current node; None after the end."""


class Verifier:
    """Finds the next tokens of all choices, one level of all trees at a time; kernels may already have sampled some.

    Each token comes from the logits after all tokens before it, with the penalties, bans and noise for exactly these.
    The choice's mode decides how. In `match` the target draws the token as it would without drafts; a draft only
    decides whether the next logits are already known. So tokens are the same with any draft or none (sample and match;
    Chen and Sarathi's coupling, arXiv:2408.07978). RejectionDraw and TypicalDraw implement the other modes. At
    temperature 0 all modes are the same.
    """

    def __init__(self, sampling: SamplingState, sampler: Sampler, sample_allowed: SampleAllowed | None = None) -> None:
        """`sample_allowed` replaces the sampler where only a grammar restricts tokens, because it is faster."""
        self._sampling = sampling
        self._sampler = sampler
        self._sample_allowed = sample_allowed

    def __call__(
        self,
        scores: Tensor,
        samples: Sequence[SampleRows],
        slots: Sequence[int],
        raw: Tensor | None = None,
        early: EarlyTokens = NO_EARLY_TOKENS,
    ) -> list[Verdict]:
        """A verdict for each of `samples`, whose choices have these slots; also appends tokens to the slots' histories.

        Args:
            scores: [rows, vocab] of the step, from which tokens are drawn.
            samples: the choices that are ready.
            slots: slots of the same choices.
            raw: the model's own logits, for raw logprobs; None if they equal the scores.
            early: sampled tokens of some choices, from SamplingState.plan_early_sampling.
        """
        raw = None if raw is scores else raw
        walks = [
            _Walk(sample, slot, sample.tree.children(), Verdict()) for sample, slot in zip(samples, slots, strict=True)
        ]
        self._follow_early(scores, [walk for walk in walks if walk.sample.choice in early.choices], early.tokens)
        going = [walk for walk in walks if walk.node is not None]
        for mode in dict.fromkeys(walk.sample.verify for walk in going):
            of_mode = [walk for walk in going if walk.sample.verify == mode]
            while of_mode:
                self._take_step(scores, raw, of_mode, mode)
                of_mode = [walk for walk in of_mode if walk.node is not None]
        return [walk.verdict for walk in walks]

    def _follow_early(self, scores: Tensor, walks: Sequence[_Walk], tokens: Sequence[int]) -> None:
        """Advance walks while tokens are already sampled or can be sampled by a grammar alone.

        A row without a sampled token has failed and must not be read again. If the next step was already launched, its
        logits may have overwritten this step's, and it continued from an arbitrary token.
        """
        while walks:
            for walk in walks:
                self._follow_known(walk, tokens)
            barred = [walk for walk in walks if walk.node is not None]
            if not barred or self._sample_allowed is None:
                return
            slots = [walk.slot for walk in barred]
            self._sampling.fill_masks(slots)
            picked = self._sample_allowed(scores, self._sampling.masked([_row(walk) for walk in barred], slots))
            walks = []
            for walk, token in zip(barred, picked, strict=True):
                if token != NO_TOKEN:
                    self._follow(walk, token)
                    walks.append(walk)

    def _follow_known(self, walk: _Walk, tokens: Sequence[int]) -> None:
        while walk.node is not None:
            token = tokens[_row(walk)]
            if token == NO_TOKEN:
                _give_up(walk, NOT_FINITE)
            elif self._sampling.allows(walk.slot, token):
                self._follow(walk, token)
            else:
                return

    def _take_step(self, scores: Tensor, raw: Tensor | None, walks: Sequence[_Walk], mode: Verification) -> None:
        nodes = [walk.node for walk in walks if walk.node is not None]
        rows = [_row(walk) for walk in walks]
        draw: Draw | None = None
        if mode != "match":
            forks = [walk.sample.tree.fork(node) for walk, node in zip(walks, nodes, strict=True)]
            draw = _DRAWS[mode](forks, self._sampler.draw)
        slots = [walk.slot for walk in walks]
        self._sampling.fill_masks(slots)
        raw = None if raw is None else _take(raw, rows)
        picks = self._sampler(_take(scores, rows), self._sampling.rows(slots), draw, raw)
        of_walks = zip(walks, picks.tokens, picks.logprobs, picks.errors, picks.surprises, strict=True)
        for row, (walk, token, logprobs, error, surprise) in enumerate(of_walks):
            if error is not None:
                _give_up(walk, error)
            elif row in picks.candidates:
                walk.verdict.candidates = picks.candidates[row]
                walk.node = None
            else:
                self._follow(walk, token, logprobs, surprise)

    def _follow(
        self, walk: _Walk, token: int, logprobs: TokenLogprobs | None = None, surprise: float | None = None
    ) -> None:
        assert walk.node is not None
        walk.verdict.tokens.append(token)
        if logprobs is not None:
            walk.verdict.logprobs.append(logprobs)
        self._sampling.commit(walk.slot, token, surprise)
        walk.verdict.sampler_state = self._sampling.sampler_state(walk.slot)
        walk.node = walk.children.get((walk.node, token))
        if walk.node is not None:
            walk.verdict.nodes.append(walk.node)


def _row(walk: _Walk) -> int:
    assert walk.node is not None
    return walk.sample.row_of(walk.node)


def _give_up(walk: _Walk, error: Failure) -> None:
    """End a walk. At the last known token the choice has failed; at a draft, the next step will tell."""
    if walk.node == ROOT:
        walk.verdict.error = error
    else:
        walk.verdict.nodes.pop()
    walk.node = None


def _take(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows, in ascending order; a view if they are consecutive."""
    first, end = rows[0], rows[-1] + 1
    if end - first == len(rows):
        return logits[first:end]
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


_FIRST_BORN = 0.6
_NEXT_BORN = 0.4


class _DraftTest(ABC):
    """A draw that accepts one of a row's drafts, or passes the row to another draw."""

    divides = False
    _stream: Stream | None = None
    """The noise of rows without an accepted draft; None for the usual one."""

    def __init__(self, forks: Sequence[Fork], draw: Draw) -> None:
        """Tests drafts before drawing.

        Args:
            forks: the drafts for each row's token.
            draw: draws rows without an accepted draft.
        """
        self._forks = forks
        self._draw = draw

    def __call__(self, scores: Tensor, rows: SamplingRows) -> dict[int, int]:
        drawn = sorted((*rows.whole, *rows.truncated))
        tested = [row for row in drawn if self._forks[row].tokens]
        tokens, scores = self._accept(scores, rows, tested) if tested else ({}, scores)
        others = tuple(row for row in drawn if row not in tokens)
        if others:
            stream = self._stream or rows.stream
            tokens |= self._draw(scores, replace(rows, whole=(), truncated=others, stream=stream))
        return tokens

    @abstractmethod
    def _accept(self, scores: Tensor, rows: SamplingRows, tested: Sequence[int]) -> tuple[dict[int, int], Tensor]:
        """The accepted drafts of the tested rows, and the scores from which the others are drawn."""


class RejectionDraw(_DraftTest):
    """Accepts a draft x with probability min(1, p(x) / q(x)); if none is accepted, draws from the rest of p.

    Leviathan (arXiv:2211.17192) and Chen (arXiv:2302.01318) for chains, recursively for siblings that were drawn
    without replacement (Sequoia, arXiv:2402.12374): after a rejection p becomes max(p - q, 0), q loses the token, and
    both are normalised again. A draft that was not drawn at random has q = 1 (SpecInfer, arXiv:2305.09781).

    Tokens have the target's distribution for any drafts, because q is the drafts' distribution and this test uses its
    own noise streams. The tokens themselves depend on the drafts.
    """

    _stream = Stream.RESIDUAL

    def _accept(self, scores: Tensor, rows: SamplingRows, tested: Sequence[int]) -> tuple[dict[int, int], Tensor]:
        index = torch.tensor(tested, device=scores.device)
        test = _Test([self._forks[row] for row in tested], scores[index])
        accepted = test.run([rows.key(row, Stream.ACCEPT) for row in tested])
        tokens = {tested[place]: token for place, token in accepted.items()}
        return tokens, scores.index_copy(0, index, test.left.log().float())


class _Test:
    """The drafts of several rows, each tested against the target's scores."""

    def __init__(self, forks: Sequence[Fork], scores: Tensor) -> None:
        self._forks = forks
        self.left = row_softmax(scores.double())
        """[n, vocab] p after the rejections so far."""
        self._guess = _drawn_from(
            forks, self.left
        )  # [n, vocab] q after the rejections so far; 0 for drafts that were not drawn

    def run(self, keys: Sequence[int]) -> dict[int, int]:
        """The accepted token of each row that has one; `keys` are the rows' noise keys."""
        accepted: dict[int, int] = {}
        for rank in range(max(len(fork.tokens) for fork in self._forks)):
            going = [
                (place, fork.tokens[rank])
                for place, fork in enumerate(self._forks)
                if place not in accepted and rank < len(fork.tokens)
            ]
            if going:
                noise = [uniform(keys[place], rank) for place, _ in going]
                stands = self._test(going, noise)
                accepted |= {place: token for (place, token), good in zip(going, stands, strict=True) if good}
        return accepted

    def _test(self, drafts: Sequence[tuple[int, int]], noise: Sequence[float]) -> list[bool]:
        """Whether each (row, token) is accepted; updates the other rows for their next test."""
        device = self.left.device
        places, tokens = torch.tensor(drafts, device=device).unbind(1)
        is_chosen = [self._forks[place].drawn_from is None for place, _ in drafts]
        chosen = torch.tensor(is_chosen, device=device)
        self._guess[places[chosen], tokens[chosen]] = 1.0
        chance = torch.tensor(noise, dtype=torch.float64, device=device)
        stands = chance * self._guess[places, tokens] < self.left[places, tokens]
        self._reject(places[~stands], tokens[~stands])
        result: list[bool] = stands.tolist()
        return result

    def _reject(self, places: Tensor, tokens: Tensor) -> None:
        if len(places) == 0:
            return
        left, guess = self.left[places], self._guess[places]
        rest = (left - guess).clamp_(min=0)
        guess[torch.arange(len(places), device=guess.device), tokens] = 0.0
        self._guess[places] = _normalised(guess, guess)
        self.left[places] = _normalised(rest, left)  # p = q is only rejected through rounding, and leaves nothing


def confidence_of_drawn(elders: int) -> float:
    """The confidence of a drawn node with `elders` siblings before it, for any token."""
    return _FIRST_BORN * _NEXT_BORN**elders


def blind_confidence(tree: DraftTree) -> tuple[float, ...]:
    """Confidences that depend only on the number of earlier siblings, not on what was drawn."""
    elders = dict.fromkeys((ROOT, *range(len(tree))), 0)
    confidence = []
    for parent in tree.parents:
        confidence.append(confidence_of_drawn(elders[parent]))
        elders[parent] += 1
    return tuple(confidence)


def _drawn_from(forks: Sequence[Fork], like: Tensor) -> Tensor:
    """The distributions of the rows' drafts, [n, vocab] like `like`; zeros where they were not drawn."""
    guess = torch.zeros_like(like)
    drawn = [(place, fork.drawn_from) for place, fork in enumerate(forks) if fork.drawn_from is not None]
    for place, distribution in drawn:
        guess[place, distribution.tokens.to(guess.device)] = distribution.weights.to(guess)
    return _normalised(guess, guess)


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Normalise rows to 1; rows without weight are replaced from `otherwise`."""
    total = row_sums(weights)
    return torch.where(total > 0, weights / total, otherwise)


EPSILON = 0.09
DELTA = 0.3


class TypicalDraw(_DraftTest):
    """Accepts the most probable draft x if p(x) > min(EPSILON, DELTA * exp(-H(p))), H the entropy; else draws from p.

    Medusa (arXiv:2401.10774, section 2.3.1), with the thresholds of its code. It shifts the distribution towards the
    drafts: the more uncertain the target is, the less probable a draft may be. There are two differences from Medusa's
    code. Drafts are compared level by level instead of by the longest path. If none is accepted, the token is drawn as
    without speculation, instead of taking the most probable one.
    """

    def _accept(self, scores: Tensor, rows: SamplingRows, tested: Sequence[int]) -> tuple[dict[int, int], Tensor]:
        probs = row_softmax(scores[torch.tensor(tested, device=scores.device)].double())
        entropy = entropies(probs).squeeze(1)
        thresholds = (DELTA * (-entropy).exp()).clamp(max=EPSILON).tolist()
        tokens = {}
        for row, of_row, threshold in zip(tested, probs, thresholds, strict=True):
            drafts = self._forks[row].tokens
            chances: list[float] = of_row[torch.tensor(drafts, device=probs.device)].tolist()
            highest = max(chances)
            if highest > threshold:
                tokens[row] = drafts[chances.index(highest)]
        return tokens, scores


_DRAWS: Final[Mapping[Verification, type[RejectionDraw | TypicalDraw]]] = {
    "rejection": RejectionDraw,
    "typical": TypicalDraw,
}
