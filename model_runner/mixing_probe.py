"""Startup check: a model may let tokens meet only in attention, and must take positions from the batch.

A step is one flat row of tokens of many choices. A model whose layers look at neighbouring tokens elsewhere, as a
convolution or a recurrence does, or whose positions follow the places in the row, would mix the choices. Inspection
cannot see that, so the loaded model is tried with its real weights.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from model_runner.contract import SamplingParams, ScheduledRequest
from model_runner.draft_tree import NO_DRAFT
from model_runner.state import RunnerState, RunningChoice
from model_runner.target import TargetModel

_LENGTH = 45
"""Tokens of the tried choice: more than a block."""
_OTHER_LENGTH = 11
"""Tokens of the choice next to it."""
_SPLIT = 18
"""Tokens of its first chunk."""
_CLOSE = {"fp8": 0.5}
_CLOSE_OTHERS = 0.03
"""Largest difference of logits where results need not be exact, as a share of the largest logit, by the type of rows.

It is eight roundings: one to bfloat16 changes a number by up to 0.4 %, one to e4m3 by up to 6 %."""


@dataclass(frozen=True, slots=True)
class ProbedCache:
    """The cache of a model, empty as it is at startup."""

    num_blocks: int
    block_size: int
    max_model_len: int


def mixes_tokens(
    target: TargetModel, state: RunnerState, cache: ProbedCache, vocab_size: int, tolerance: float
) -> bool:
    """Whether a choice gets other logits in two chunks next to another choice than alone in one step.

    Writes to the cache, so call it only at startup. Positions above 44 are not tried.

    Args:
        target: the model, on the cache.
        state: lays out the steps.
        cache: the cache; one with fewer than three blocks is too small for a trial.
        vocab_size: of the model.
        tolerance: largest difference of logits, as a share of the largest one; 0 for equal bits.
    """
    size = cache.block_size
    length = min(_LENGTH, cache.max_model_len, (cache.num_blocks - 1) * size)
    split, other = length * _SPLIT // _LENGTH, max(length * _OTHER_LENGTH // _LENGTH, 1)
    if split == 0:
        return False
    numbers = np.random.default_rng(0).integers(vocab_size, size=length + other).tolist()
    num_blocks = -(-length // size)
    tried = _Prompt(numbers[:length], array("i", range(num_blocks)))
    beside = _Prompt(numbers[length:], array("i", range(num_blocks, num_blocks - (-other // size))))

    whole = _logits(target, state, [(tried, 0, length)])
    first = _logits(target, state, [(beside, 0, other - 1), (tried, 0, split)] if other > 1 else [(tried, 0, split)])
    second = _logits(target, state, [(beside, other - 1, other), (tried, split, length)])
    return not _agree(torch.cat([first[-split:], second[1:]]), whole, tolerance)


@dataclass(frozen=True, slots=True)
class _Prompt:
    tokens: list[int]
    blocks: "array[int]"


def _logits(target: TargetModel, state: RunnerState, parts: Sequence[tuple[_Prompt, int, int]]) -> Tensor:
    """Float32 logits [T, vocab] of a step that computes the tokens from a start to an end of each prompt."""
    choices = [
        RunningChoice(slot, prompt.tokens[:end], len(prompt.tokens), start, SamplingParams(), blocks=prompt.blocks)
        for slot, (prompt, start, end) in enumerate(parts)
    ]
    scheduled = [ScheduledRequest(str(slot), end - start, ()) for slot, (_, start, end) in enumerate(parts)]
    batch = state.gather(choices, scheduled, [NO_DRAFT] * len(choices))
    return target.forward(replace(batch, logits_index=np.arange(len(batch.tokens)))).clone()


def tolerance_of(rows: str, *, exact: bool) -> float:
    """The tolerance for products whose rows are rounded to this type."""
    return 0.0 if exact else _CLOSE.get(rows, _CLOSE_OTHERS)


def _agree(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    if tolerance == 0:
        return torch.equal(found, expected)
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())
