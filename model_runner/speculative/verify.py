"""Which drafts stand: the target walks along each tree for as long as the next token is there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from model_runner.batch import SampleRows
from model_runner.contract import Candidate, Failure, TokenLogprobs, Verification
from model_runner.draft_tree import ROOT
from model_runner.sampling.draw import Draw
from model_runner.sampling.picks import NO_PICKS, NO_TOKEN, PickAllowed, Prepicks
from model_runner.sampling.rows import SamplingState
from model_runner.sampling.sampler import NOT_FINITE, Sampler
from model_runner.speculative.rejection import RejectionDraw
from model_runner.speculative.typical import TypicalDraw

_DRAWS: Final[Mapping[Verification, type[RejectionDraw | TypicalDraw]]] = {
    "rejection": RejectionDraw,
    "typical": TypicalDraw,
}


@dataclass(slots=True)
class Verdict:
    """What a step decided for one choice."""

    tokens: list[int] = field(default_factory=list)
    """The new tokens. All but the last were drafts: they are computed."""
    nodes: list[int] = field(default_factory=list)
    """The draft nodes that these tokens stand at, from the root's child on: one fewer than tokens."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    candidates: tuple[Candidate, ...] = ()
    """In place of tokens, if the choice asks for them."""
    sampler_state: float | None = None
    """The sampler's after these tokens."""
    error: Failure | None = None
    pooled: bytes = b""
    """See ChoiceResult."""


@dataclass(frozen=True, slots=True)
class _StepRows:
    """See Verifier.__call__."""

    scores: Tensor
    raw: Tensor | None


@dataclass(slots=True)
class _Walk:
    sample: SampleRows
    slot: int
    children: dict[tuple[int, int], int]
    verdict: Verdict
    node: int | None = ROOT
    """Where the walk stands; None at its end."""


class Verifier:
    """Finds the next tokens of all choices, one level of all trees at a time; those of some were found beforehand.

    Each token comes from the logits after all tokens before it, with penalties, bans and noise for exactly these. A
    choice's mode decides how. In `match` the target draws it as it would without drafts, and a draft only decides
    whether the next one is known already: so the tokens are the same with any draft or none (sample and match; Chen and
    Sarathi's coupling, arXiv:2408.07978). See RejectionDraw and TypicalDraw for the others. At temperature 0 all modes
    are the same.
    """

    def __init__(self, sampling: SamplingState, sampler: Sampler, pick_allowed: PickAllowed | None = None) -> None:
        """`pick_allowed` is quicker than the sampler where only a grammar has a say in a token."""
        self._sampling = sampling
        self._sampler = sampler
        self._pick_allowed = pick_allowed

    def __call__(
        self,
        scores: Tensor,
        samples: Sequence[SampleRows],
        slots: Sequence[int],
        raw: Tensor | None = None,
        picks: Prepicks = NO_PICKS,
    ) -> list[Verdict]:
        """One verdict for each of `samples`, whose choices have these slots; tokens go to the slots' histories.

        Args:
            scores: [rows, vocab] of the step, from which tokens are drawn.
            samples: the choices that are ready.
            slots: of the same choices.
            raw: the model's own logits, for raw logprobs; None where they are the scores.
            picks: tokens of some of the choices, found as SamplingState.plan_picks says.
        """
        step = _StepRows(scores, None if raw is scores else raw)
        walks = [
            _Walk(sample, slot, sample.tree.children(), Verdict()) for sample, slot in zip(samples, slots, strict=True)
        ]
        self._follow_picks(scores, [walk for walk in walks if walk.sample.choice in picks.choices], picks.tokens)
        going = [walk for walk in walks if walk.node is not None]
        for mode in dict.fromkeys(walk.sample.verify for walk in going):
            of_mode = [walk for walk in going if walk.sample.verify == mode]
            while of_mode:
                self._take_step(step, of_mode, mode)
                of_mode = [walk for walk in of_mode if walk.node is not None]
        return [walk.verdict for walk in walks]

    def _follow_picks(self, scores: Tensor, walks: Sequence[_Walk], tokens: Sequence[int]) -> None:
        """Go on for as long as a token was found beforehand or can be picked from what a grammar allows.

        A row in which none was found has failed. It must not be looked at again: if the next step was launched
        meanwhile, its logits may stand where those of this step were, and it has gone on from no token of the target.
        """
        while walks:
            for walk in walks:
                self._follow_known(walk, tokens)
            barred = [walk for walk in walks if walk.node is not None]
            if not barred or self._pick_allowed is None:
                return
            slots = [walk.slot for walk in barred]
            self._sampling.fill_masks(slots)
            picked = self._pick_allowed(scores, self._sampling.masked([_row(walk) for walk in barred], slots))
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

    def _take_step(self, step: _StepRows, walks: Sequence[_Walk], mode: Verification) -> None:
        nodes = [walk.node for walk in walks if walk.node is not None]
        rows = [_row(walk) for walk in walks]
        draw: Draw | None = None
        if mode != "match":
            forks = [walk.sample.tree.fork(node) for walk, node in zip(walks, nodes, strict=True)]
            draw = _DRAWS[mode](forks, self._sampler.draw)
        slots = [walk.slot for walk in walks]
        self._sampling.fill_masks(slots)
        raw = None if step.raw is None else _take(step.raw, rows)
        picks = self._sampler(_take(step.scores, rows), self._sampling.rows(slots), draw, raw)
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
    """At the last known token the choice has failed. At a draft it has not got there yet: the next step will tell."""
    if walk.node == ROOT:
        walk.verdict.error = error
    else:
        walk.verdict.nodes.pop()
    walk.node = None


def _take(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows, which are in ascending order; not a copy if they stand one after the other."""
    first, end = rows[0], rows[-1] + 1
    if end - first == len(rows):
        return logits[first:end]
    return logits.index_select(0, torch.tensor(rows, device=logits.device))
