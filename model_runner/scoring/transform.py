"""What stands between the model's logits and the scores that tokens are chosen by."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_runner.batch import Batch
from model_runner.contract import SamplingParams
from model_runner.models.features import Feature
from model_runner.sampling.picks import PickPlan


@dataclass(frozen=True, slots=True)
class RawStep:
    """What the model said in a step."""

    batch: Batch
    sampling: Sequence[SamplingParams]
    """Of each choice of the batch."""
    logits: Tensor  # [rows, vocab] float32
    features: Mapping[Feature, Tensor]
    """[T, width] each: at least what the transforms need of the step."""
    plan: PickPlan | None = None
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
        """See ScoreTransform.warm_up."""
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
