"""Score transforms: contrastive decoding, DoLa and guidance, applied between the model's logits and the sampler."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runner.batch import Batch
from model_runner.contract import Contrastive, DoLa, SamplingParams
from model_runner.features import Feature, layer_input
from model_runner.kernels.row_sums import entropies, row_log_softmax
from model_runner.sampling.rows import EarlySamplingPlan
from model_runner.scoring.early_exit import EarlyExit
from model_runner.target import TargetModel


@dataclass(frozen=True, slots=True)
class RawStep:
    """The model's results for a step."""

    batch: Batch
    sampling: Sequence[SamplingParams]
    """One per choice of the batch."""
    logits: Tensor  # [rows, vocab] float32
    features: Mapping[Feature, Tensor]
    """[T, width] each; includes at least what the transforms need."""
    plan: EarlySamplingPlan
    """The plan of tokens that were already sampled from these logits."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a step that one transform changes: all sampled rows of these choices, including drafts."""

    choices: tuple[int, ...]
    """Indices in the batch, ascending."""
    rows: Tensor  # [n] int64: rows of the step's logits; empty while a prompt is being computed
    sampling: tuple[SamplingParams, ...]
    """One per row."""


class ScoreTransform(ABC):
    """Replaces the scores of choices whose settings ask for it.

    Guarantee: a row's scores depend only on the tokens that lead to it and on the settings of its choice.
    """

    @abstractmethod
    def is_asked_by(self, sampling: SamplingParams) -> bool:
        """Whether a choice with these settings uses the transform."""

    def needs(self, sampling: SamplingParams) -> Collection[Feature]:
        """The hidden states it reads for such a choice."""
        return ()

    @abstractmethod
    def __call__(self, step: RawStep, share: Share) -> Tensor:
        """The scores [n, vocab] float32 of the share's rows. Called for every step that computes tokens of its choices.

        -inf bans a token. A row without a finite score, or with NaN or +inf, fails its choice. Plausibility is not
        decided here but by SamplingParams.least_share.
        """

    def warm_up(self, batch: Batch) -> None:  # noqa: B027
        """Run once what a step runs. Raises NotImplementedError if a model cannot be run exactly."""


class Scoring:
    """All transforms of a runner. A choice uses at most one of them, so each gets the model's own logits."""

    def __init__(self, transforms: Sequence[ScoreTransform] = ()) -> None:
        self._transforms = tuple(transforms)

    def needs(self, sampling: Sequence[SamplingParams]) -> frozenset[Feature]:
        """The hidden states that a step with these choices must keep."""
        return frozenset(
            need
            for transform in self._transforms
            for params in sampling
            if transform.is_asked_by(params)
            for need in transform.needs(params)
        )

    def __call__(self, step: RawStep) -> Tensor:
        """The scores [rows, vocab]: the logits themselves if no choice uses a transform. Logits are not modified."""
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


class ContrastiveDecoding(ScoreTransform):
    """Contrastive decoding (Li et al., arXiv:2210.15097; O'Brien and Lewis, arXiv:2309.09117).

    contract.Contrastive has the formula. The amateur computes the same tokens as the model at the same positions, and
    keeps its own KV in blocks of the same ids. Blocks computed for other choices lack that KV, so the scheduler does
    not share them.
    """

    def __init__(self, amateur: TargetModel) -> None:
        """The amateur must have its own KV cache."""
        self._amateur = amateur

    def is_asked_by(self, sampling: SamplingParams) -> bool:
        return sampling.contrastive is not None

    def __call__(self, step: RawStep, share: Share) -> Tensor:
        """Runs the amateur for prompt chunks too, although they need no scores yet, to fill its cache."""
        amateur = self._amateur.forward(step.batch.only(share.choices))
        settings = [sampling.contrastive for sampling in share.sampling if sampling.contrastive is not None]
        return contrast(step.logits.index_select(0, share.rows), amateur, settings)

    def warm_up(self, batch: Batch) -> None:
        self._amateur.forward(batch)
        self._amateur.settle()


def contrast(expert: Tensor, amateur: Tensor, settings: Sequence[Contrastive]) -> Tensor:
    """Scores [n, vocab] from the logits of both models, with the settings of each row.

    Models with the same tokenizer may pad their vocabulary to different widths. Tokens that only one of them has are
    banned.
    """
    weights = [(s.expert_weight, s.amateur_weight / s.temperature) for s in settings]
    of_expert, of_amateur = torch.tensor(weights, device=expert.device).view(-1, 2, 1).unbind(1)
    common = min(expert.shape[1], amateur.shape[1])
    scores = torch.full_like(expert, -torch.inf)
    scores[:, :common] = of_expert * expert[:, :common] - of_amateur * amateur[:, :common]
    return scores.masked_fill_(expert == -torch.inf, -torch.inf)


_SPAN = 20
"""In models with more than twice this many layers, each half has this many candidate layers."""
_ROWS = 64
"""Rows processed at a time, to bound memory."""


class LayerContrast(ScoreTransform):
    """DoLa, decoding by contrasting layers (Chuang et al., arXiv:2309.03883).

    contract.DoLa has the formula. The premature layer is chosen for each row. The authors' code chooses one for the
    whole batch, which would make an answer depend on other requests.
    """

    def __init__(self, early_exit: EarlyExit, *, ties_embeddings: bool) -> None:
        """`ties_embeddings` says whether the head is the embedding matrix."""
        self._exit = early_exit
        self._ties_embeddings = ties_embeddings

    def is_asked_by(self, sampling: SamplingParams) -> bool:
        return sampling.dola is not None

    def needs(self, sampling: SamplingParams) -> Collection[Feature]:
        return [layer_input(layer) for layer in self._candidates(sampling)]

    def __call__(self, step: RawStep, share: Share) -> Tensor:
        scores = step.logits.new_empty(len(share.rows), step.logits.shape[1])
        for start in range(0, len(scores), _ROWS):
            piece = slice(start, start + _ROWS)
            candidates = [self._candidates(sampling) for sampling in share.sampling[piece]]
            scores[piece] = self._scores(step, share.rows[piece], candidates)
        return scores

    def _scores(self, step: RawStep, of_step: Tensor, candidates: Sequence[Sequence[int]]) -> Tensor:
        """Scores [n, vocab] of these rows of the step, each with its own candidate layers."""
        logits = step.logits.index_select(0, of_step)
        tokens = torch.from_numpy(step.batch.logits_index).to(of_step.device).index_select(0, of_step)
        mature = row_log_softmax(logits.double())
        premature = torch.full_like(mature, torch.nan)  # stays NaN if no distance is a number, and fails the row
        farthest = mature.new_full((len(mature),), -torch.inf)
        for layer in sorted({layer for of_row in candidates for layer in of_row}):
            asking = [row for row, of_row in enumerate(candidates) if layer in of_row]
            rows = torch.tensor(asking, device=logits.device)
            hidden = step.features[layer_input(layer)].index_select(0, tokens[rows])
            early = row_log_softmax(self._exit(hidden).double())
            distance = divergence(mature[rows], early)
            is_farther = distance > farthest[rows]  # among equals the lower layer wins
            farthest[rows[is_farther]] = distance[is_farther]
            premature[rows[is_farther]] = early[is_farther]
        return (mature - premature).float().masked_fill_(logits == -torch.inf, -torch.inf)

    def _candidates(self, sampling: SamplingParams) -> Sequence[int]:
        assert sampling.dola is not None
        return candidate_layers(sampling.dola, self._exit.num_layers, ties_embeddings=self._ties_embeddings)


def candidate_layers(dola: DoLa, num_layers: int, *, ties_embeddings: bool) -> Sequence[int]:
    """The layers whose input is a candidate, chosen as in the paper and in transformers.

    The lower half begins with the embedding, or with layer 2 if the head is tied to the embedding: the embedding would
    then only predict the last token again.
    """
    if isinstance(dola.layers, tuple):
        return dola.layers
    is_deep = num_layers > 2 * _SPAN
    if dola.layers == "high":
        return range(num_layers - _SPAN if is_deep else num_layers // 2, num_layers, 2)
    first = min(2, num_layers - 1) if ties_embeddings else 0
    return range(first, _SPAN if is_deep else num_layers // 2, 2) or (first,)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence [n] in nats of distributions given as log-probabilities [n, vocab] in float64."""
    p, q = p.exp(), q.exp()
    return _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2


def _entropy(probs: Tensor) -> Tensor:
    return entropies(probs).squeeze(1)


class Guidance(ScoreTransform):
    """Classifier-free guidance (Sanchez et al., arXiv:2306.17806). SamplingParams.guidance has the formula.

    The guide runs as a separate choice of the same step, with its own blocks.
    """

    def is_asked_by(self, sampling: SamplingParams) -> bool:
        return sampling.guidance is not None

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
