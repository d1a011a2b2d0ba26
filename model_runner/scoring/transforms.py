"""Scores that mix the model's distribution with another one: between its logits and the processors."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_runner.batch import Batch
from model_runner.contract import Contrastive, DoLa, SamplingParams
from model_runner.kernels.row_sums import entropies, row_log_softmax
from model_runner.models.early_exit import EarlyExit
from model_runner.models.features import Feature, entering
from model_runner.models.target import TargetModel
from model_runner.sampling.fused_sampling import FusedSamplingPlan


@dataclass(frozen=True, slots=True)
class RawStep:
    """What the model said in a step."""

    batch: Batch
    sampling: Sequence[SamplingParams]
    """Of each choice of the batch."""
    logits: Tensor  # [rows, vocab] float32
    features: Mapping[Feature, Tensor]
    """[T, width] each: at least what the transforms need of the step."""
    plan: FusedSamplingPlan | None = None
    """Which tokens are found in the logits already."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a step that a transform changes: all rows from which these choices draw tokens, drafts included."""

    choices: tuple[int, ...]
    """Indices in the batch, ascending."""
    rows: Tensor  # [n] int64: rows of the step's logits, none while a prompt is being computed
    sampling: tuple[SamplingParams, ...]
    """For each row."""


class ScoreTransform(Protocol):
    """Changes the scores of the choices whose settings ask for it.

    Guarantee: a row's scores depend on the tokens that lead to it and on the settings of its choice, on nothing else.
    """

    def is_asked_by(self, sampling: SamplingParams) -> bool:
        """Whether a choice with these settings uses it."""
        ...

    def needs(self, sampling: SamplingParams) -> Collection[Feature]:
        """The model's hidden states that it reads for such a choice."""
        ...

    def __call__(self, step: RawStep, share: Share) -> Tensor:
        """The scores [n, vocab] float32 of the share's rows, for every step that computes tokens of its choices.

        -inf rules a token out; a row without a finite score, or with NaN or +inf, fails its choice. Which tokens are
        plausible enough is no matter of scores: see SamplingParams.least_share.
        """
        ...

    def warm_up(self, batch: Batch) -> None:
        """Do once what a step does. Raises NotImplementedError if a model cannot be run exactly."""
        ...


class Scoring:
    """All transforms of a runner. They exclude each other, so each gets the model's own logits."""

    def __init__(self, transforms: Sequence[ScoreTransform] = ()) -> None:
        self._transforms = tuple(transforms)

    def needs(self, sampling: Sequence[SamplingParams]) -> frozenset[Feature]:
        """The hidden states that a step with these choices has to keep."""
        return frozenset(
            need
            for transform in self._transforms
            for params in sampling
            if transform.is_asked_by(params)
            for need in transform.needs(params)
        )

    def __call__(self, step: RawStep) -> Tensor:
        """The scores [rows, vocab]: the logits themselves if no choice asks for others, which are left as they are."""
        scores = step.logits
        for transform in self._transforms:
            choices = [index for index, params in enumerate(step.sampling) if transform.is_asked_by(params)]
            if choices:
                share = _share(step, choices)
                scores = scores.index_copy(0, share.rows, transform(step, share))
        return scores

    def warm_up(self, batch: Batch) -> None:
        for transform in self._transforms:
            transform.warm_up(batch)


def _share(step: RawStep, choices: Sequence[int]) -> Share:
    samples = [sample for sample in step.batch.samples if sample.choice in choices]
    rows = [row for sample in samples for row in sample.rows]
    return Share(
        choices=tuple(choices),
        rows=torch.tensor(rows, dtype=torch.int64, device=step.logits.device),
        sampling=tuple(step.sampling[sample.choice] for sample in samples for _ in sample.rows),
    )


class ContrastiveDecoding:
    """Li et al., arXiv:2210.15097; O'Brien and Lewis, arXiv:2309.09117. See contract.Contrastive for the formula.

    The amateur computes the same tokens, at the same places, as the model does for these choices, and has keys and
    values of its own in blocks of the same numbers. So blocks computed for other choices are of no use to these: the
    scheduler does not share them.
    """

    def __init__(self, amateur: TargetModel) -> None:
        """The amateur has a cache of its own."""
        self._amateur = amateur

    def is_asked_by(self, sampling: SamplingParams) -> bool:
        return sampling.contrastive is not None

    def needs(self, sampling: SamplingParams) -> Collection[Feature]:
        return ()

    def __call__(self, step: RawStep, share: Share) -> Tensor:
        """See ScoreTransform. The amateur runs for prompts as well, where no scores are wanted yet."""
        amateur = self._amateur.forward(step.batch.only(share.choices))
        settings = [sampling.contrastive for sampling in share.sampling if sampling.contrastive is not None]
        return contrast(step.logits.index_select(0, share.rows), amateur, settings)

    def warm_up(self, batch: Batch) -> None:
        self._amateur.forward(batch)
        self._amateur.settle()


def contrast(expert: Tensor, amateur: Tensor, settings: Sequence[Contrastive]) -> Tensor:
    """Scores [n, vocab] from the logits of both models, by the settings of each row.

    Models with the same tokens may have logits of different widths, filled up with tokens that nobody uses: what only
    one of them has cannot be chosen.
    """
    weights = [(s.expert_weight, s.amateur_weight / s.temperature) for s in settings]
    of_expert, of_amateur = torch.tensor(weights, device=expert.device).view(-1, 2, 1).unbind(1)
    common = min(expert.shape[1], amateur.shape[1])
    scores = torch.full_like(expert, -torch.inf)
    scores[:, :common] = of_expert * expert[:, :common] - of_amateur * amateur[:, :common]
    return scores.masked_fill_(expert == -torch.inf, -torch.inf)


_SPAN = 20
"""In models of more than twice as many layers, a half is so many of them."""
_ROWS = 64
"""Rows worked on at a time, to bound the memory."""


class LayerContrast:
    """Decoding by contrasting layers (Chuang et al., arXiv:2309.03883). See contract.DoLa for the formula.

    The premature layer is chosen for each row on its own; the authors' code chooses one for a whole batch, so that an
    answer would depend on the others.
    """

    def __init__(self, early_exit: EarlyExit, *, ties_embeddings: bool) -> None:
        """`ties_embeddings`: whether the head is the embedding."""
        self._exit = early_exit
        self._ties_embeddings = ties_embeddings

    def is_asked_by(self, sampling: SamplingParams) -> bool:
        return sampling.dola is not None

    def needs(self, sampling: SamplingParams) -> Collection[Feature]:
        return [entering(layer) for layer in self._candidates(sampling)]

    def __call__(self, step: RawStep, share: Share) -> Tensor:
        scores = step.logits.new_empty(len(share.rows), step.logits.shape[1])
        for start in range(0, len(scores), _ROWS):
            piece = slice(start, start + _ROWS)
            candidates = [self._candidates(sampling) for sampling in share.sampling[piece]]
            scores[piece] = self._scores(step, share.rows[piece], candidates)
        return scores

    def _scores(self, step: RawStep, of_step: Tensor, candidates: Sequence[Sequence[int]]) -> Tensor:
        """[n, vocab] of these rows of the step, each of which asks its own layers."""
        logits = step.logits.index_select(0, of_step)
        tokens = torch.from_numpy(step.batch.logits_index).to(of_step.device).index_select(0, of_step)
        mature = row_log_softmax(logits.double())
        premature = torch.full_like(mature, torch.nan)  # stays where no distance is a number, and fails the row
        farthest = mature.new_full((len(mature),), -torch.inf)
        for layer in sorted({layer for of_row in candidates for layer in of_row}):
            asking = [row for row, of_row in enumerate(candidates) if layer in of_row]
            rows = torch.tensor(asking, device=logits.device)
            hidden = step.features[entering(layer)].index_select(0, tokens[rows])
            early = row_log_softmax(self._exit(hidden).double())
            distance = divergence(mature[rows], early)
            is_farther = distance > farthest[rows]  # among equals the lower layer stays
            farthest[rows[is_farther]] = distance[is_farther]
            premature[rows[is_farther]] = early[is_farther]
        return (mature - premature).float().masked_fill_(logits == -torch.inf, -torch.inf)

    def warm_up(self, batch: Batch) -> None:
        """See ScoreTransform.warm_up."""

    def _candidates(self, sampling: SamplingParams) -> Sequence[int]:
        assert sampling.dola is not None
        return candidate_layers(sampling.dola, self._exit.num_layers, ties_embeddings=self._ties_embeddings)


def candidate_layers(dola: DoLa, num_layers: int, *, ties_embeddings: bool) -> Sequence[int]:
    """The layers before which the model is asked; the choice of the paper, as transformers has written it down.

    The lower half begins with the embedding, or with layer 2 if the head is the embedding: then it would only say the
    last token again.
    """
    if isinstance(dola.layers, tuple):
        return dola.layers
    is_deep = num_layers > 2 * _SPAN
    if dola.layers == "high":
        return range(num_layers - _SPAN if is_deep else num_layers // 2, num_layers, 2)
    first = min(2, num_layers - 1) if ties_embeddings else 0
    return range(first, _SPAN if is_deep else num_layers // 2, 2) or (first,)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen and Shannon's, [n], of distributions given as log-probabilities [n, vocab] in float64."""
    p, q = p.exp(), q.exp()
    return _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2


def _entropy(probs: Tensor) -> Tensor:
    return entropies(probs).squeeze(1)


class Guidance:
    """Sanchez et al., arXiv:2306.17806. See SamplingParams.guidance for the formula.

    The guide is a choice of its own in the same step, with blocks of its own.
    """

    def is_asked_by(self, sampling: SamplingParams) -> bool:
        return sampling.guidance is not None

    def needs(self, sampling: SamplingParams) -> Collection[Feature]:
        return ()

    def __call__(self, step: RawStep, share: Share) -> Tensor:
        scales = [[sampling.guidance] for sampling in share.sampling]
        ready = [step.batch.guides[choice] for choice in share.choices if choice in step.batch.guides]
        guides = [row for guide in ready for row in guide.rows]
        own = step.logits.index_select(0, share.rows)
        other = step.logits.index_select(0, torch.tensor(guides, dtype=torch.int64, device=own.device))
        base = row_log_softmax(other)
        scale = torch.tensor(scales, dtype=base.dtype, device=base.device).view(-1, 1)
        scores = base + scale * (row_log_softmax(own) - base)
        return scores.masked_fill_(own == -torch.inf, -torch.inf)

    def warm_up(self, batch: Batch) -> None:
        """See ScoreTransform.warm_up."""
