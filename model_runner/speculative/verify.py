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
from model_runner.sampling.picks import NO_PICKS, NO_TOKEN, Prepicks
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

    def __init__(self, sampling: SamplingState, sampler: Sampler) -> None:
        self._sampling = sampling
        self._sampler = sampler

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
        for walk in walks:
            if walk.sample.choice in picks.choices:
                self._look_up(walk, picks.tokens)
        others = [walk for walk in walks if walk.sample.choice not in picks.choices]
        for mode in dict.fromkeys(walk.sample.verify for walk in others):
            going = [walk for walk in others if walk.sample.verify == mode]
            while going:
                self._take_step(step, going, mode)
                going = [walk for walk in going if walk.node is not None]
        return [walk.verdict for walk in walks]

    def _look_up(self, walk: _Walk, tokens: Sequence[int]) -> None:
        """Go all the way, as every row's token is known."""
        while walk.node is not None:
            token = tokens[walk.sample.row_of(walk.node)]
            if token == NO_TOKEN:
                _give_up(walk, NOT_FINITE)
            else:
                self._follow(walk, token)

    def _take_step(self, step: _StepRows, walks: Sequence[_Walk], mode: Verification) -> None:
        nodes = [walk.node for walk in walks if walk.node is not None]
        rows = [walk.sample.row_of(node) for walk, node in zip(walks, nodes, strict=True)]
        draw: Draw | None = None
        if mode != "match":
            forks = [walk.sample.tree.fork(node) for walk, node in zip(walks, nodes, strict=True)]
            draw = _DRAWS[mode](forks, self._sampler.draw)
        raw = None if step.raw is None else _take(step.raw, rows)
        picks = self._sampler(_take(step.scores, rows), self._sampling.rows([walk.slot for walk in walks]), draw, raw)
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
