"""Shared helpers: rows made from settings, and statistics."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.contract import SamplingParams
from model_runner.sampling.rows import EarlySamplingPlan, EarlyTokens, SamplingRows, SamplingState
from model_runner.sampling.sampler import constrained
from model_runner.sampling.truncations import truncate

from . import oracle

CPU = torch.device("cpu")
ALPHA = 1e-4


@dataclass(frozen=True)
class Case:
    params: SamplingParams
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


def rows_of(cases: Sequence[Case], vocab_size: int, device: torch.device = CPU) -> SamplingRows:
    state = SamplingState(len(cases), vocab_size, device)
    for slot, case in enumerate(cases):
        state.admit(slot, case.params, case.prompt, case.output)
    return state.rows(range(len(cases)))


def processed(logits: Tensor, cases: Sequence[Case]) -> Tensor:
    """The logits after all constraints and truncations."""
    rows = rows_of(cases, logits.shape[-1])
    return truncate(constrained(logits, rows), rows)


def picks_of(logits: Tensor, plan: EarlySamplingPlan) -> EarlyTokens:
    """Tokens that a kernel pre-samples with this plan."""
    of_rows = zip(logits.numpy(), plan.keys.tolist(), plan.temperatures.tolist(), strict=True)
    return EarlyTokens([oracle.pick(*of_row) for of_row in of_rows], plan.choices)


def random_logits(num_rows: int, vocab_size: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def chi_square_p(tokens: Sequence[int], probs: NDArray[np.float64]) -> float:
    """How likely draws at least this far from `probs` are, if they come from there; 0 if one is outside the support."""
    from scipy import stats  # noqa: PLC0415  (a machine for tests on a GPU need not have it)

    observed = np.bincount(tokens, minlength=len(probs)).astype(np.float64)
    if observed[probs == 0].any():
        return 0.0
    expected = probs * observed.sum()
    rare = expected < 10
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if len(expected) == 1 or expected[-1] == 0:
        observed, expected = observed[expected > 0], expected[expected > 0]
    return float(stats.chisquare(observed, expected).pvalue) if len(expected) > 1 else 1.0
