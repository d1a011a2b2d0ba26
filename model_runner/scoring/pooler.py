"""Pooling: embeddings, token logits and class scores, made of a step's hidden states and logits.

Results depend only on the choice's tokens. Hidden states do by themselves. A mean adds them as integers, whose sum is
exact in any order and so independent of how the prompt is split into steps. Everything else is computed per choice, in
float64 and in a fixed order.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_runner.batch import IntArray, PooledRows
from model_runner.contract import Failure, Pooling, SamplingParams
from model_runner.features import LAST, Feature
from model_runner.refusal import UnsupportedModelError, classifies
from model_runner.scoring.transforms import RawStep
from model_runner.spec.model_folder import HEAD_NAMES, open_checkpoint
from model_runner.speculative.verify import Verdict
from model_runner.state import RunningChoice

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FloatArray = npt.NDArray[np.float64]

_FIXED_POINT = 2.0**28
"""Fixed-point units per 1.0. Hidden states are rounded to this before they are added."""
_LARGEST = 2.0**17
"""Hidden states are clamped to this magnitude, so that the sum of 2**17 tokens stays below 2**63."""
_ROWS = 256
"""Hidden states converted to integers at a time, to bound memory."""
SHORTEST_NORM = 1e-12
"""Smallest norm to divide by, as in torch's `normalize`."""
NOT_FINITE = Failure("the model's hidden states are not finite")


class ClassificationHead:
    """Scores of the classes, from the last token's hidden state."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Weight [classes, hidden], and bias [classes] or None."""
        self._weight: FloatArray = weight.double().numpy()
        self._bias: FloatArray = np.zeros(len(weight)) if bias is None else bias.double().numpy()

    def __call__(self, hidden: FloatArray) -> FloatArray:
        """Hidden state [hidden] -> scores [classes]."""
        scores: FloatArray = (self._weight * hidden).cumsum(-1)[:, -1] + self._bias
        return scores


def load_classification_head(folder: Path, config: "PretrainedConfig") -> ClassificationHead | None:
    """None for other kinds of models. Raises UnsupportedModelError if a classifier's checkpoint has no such head."""
    if not classifies(config.architectures):
        return None
    checkpoint = open_checkpoint(folder)
    names = () if checkpoint is None else checkpoint.shapes
    weight, bias = (checkpoint.tensor(name) if checkpoint and name in names else None for name in HEAD_NAMES)
    hidden = config.get_text_config().hidden_size
    if weight is None or weight.dim() != 2 or weight.shape[1] != hidden:
        raise UnsupportedModelError(f"{folder} is a classifier, but has no weight score.weight of [classes, {hidden}]")
    return ClassificationHead(weight, bias)


class Pooler:
    """Computes the pooled results of all choices whose last token a step computes."""

    def __init__(self, head: ClassificationHead | None = None) -> None:
        self._head = head

    def needs(self, sampling: Sequence[SamplingParams]) -> frozenset[Feature]:
        """The hidden states that a step with these choices must keep."""
        asked = {params.pooling.by for params in sampling if params.pooling is not None}
        return frozenset({LAST}) if asked - {"logits"} else frozenset()

    @torch.inference_mode()
    def __call__(self, step: RawStep, choices: Sequence[RunningChoice]) -> dict[int, Verdict]:
        """The result or the error of each finished choice, by index in the batch.

        Also adds to the sums of choices that ask for a mean, unless an exception is raised.
        """
        sums = {rows.choice: _sum(step.features[LAST][rows.tokens]) for rows in step.batch.pooled if _is_mean(rows)}
        found = {rows.choice: self._vector(step, rows) for rows in step.batch.pooled if not _is_mean(rows)}
        for rows in step.batch.pooled:
            if _is_mean(rows):
                found[rows.choice] = _mean(choices[rows.choice], rows, sums[rows.choice])
        return {rows.choice: verdict_of(found[rows.choice], rows.pooling) for rows in step.batch.pooled if rows.is_last}

    def _vector(self, step: RawStep, rows: PooledRows) -> FloatArray:
        """The vector that depends only on the last token; empty until that token is computed."""
        if not rows.is_last:
            return np.zeros(0)
        if rows.row is not None:
            tokens = torch.tensor(rows.pooling.tokens, device=step.logits.device)
            return _to_host(step.logits[rows.row].index_select(0, tokens))
        hidden = _to_host(step.features[LAST][rows.tokens][-1])
        if rows.pooling.by == "classes":
            assert self._head is not None, "the model has a classification head"
            return self._head(hidden)
        return hidden


def _is_mean(rows: PooledRows) -> bool:
    return rows.pooling.by == "mean"


def _sum(hidden: Tensor) -> IntArray | None:
    """Fixed-point sum [hidden] of rows [n, hidden], or None if a value is not finite."""
    total = torch.zeros(hidden.shape[1], dtype=torch.int64, device=hidden.device)
    for start in range(0, len(hidden), _ROWS):
        part = hidden[start : start + _ROWS].double()
        if not part.isfinite().all():
            return None
        total += (part.clamp(-_LARGEST, _LARGEST) * _FIXED_POINT).round().long().sum(0)
    array: IntArray = total.cpu().numpy()
    return array


def _mean(choice: RunningChoice, rows: PooledRows, added: IntArray | None) -> FloatArray:
    """The mean over all tokens so far. The choice keeps the sum."""
    if added is None:
        choice.hidden_sum = None
        return np.full(1, np.nan)
    known = choice.hidden_sum if choice.num_computed else np.zeros_like(added)
    if known is None:  # an earlier chunk was not finite
        return np.full(1, np.nan)
    choice.hidden_sum = known + added
    return choice.hidden_sum / (_FIXED_POINT * rows.num_tokens)


def verdict_of(vector: FloatArray, pooling: Pooling) -> Verdict:
    """The result for a pooled vector, shortened and then normalised; an error if it is not finite."""
    kept = vector[: pooling.dimensions]
    if not np.isfinite(kept).all():
        return Verdict(error=NOT_FINITE)
    if pooling.normalizes:
        kept = kept / max(float(np.sqrt(np.square(kept).cumsum()[-1])), SHORTEST_NORM)
    return Verdict(pooled=kept.astype("<f4").tobytes())


def _to_host(values: Tensor) -> FloatArray:
    array: FloatArray = values.double().cpu().numpy()
    return array
