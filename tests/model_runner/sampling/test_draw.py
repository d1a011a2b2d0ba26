"""The sampler with native kernels against the sampler without: the same tokens, errors and logprobs."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runner.contract import SamplingParams
from model_runner.kernels.library import Kernels
from model_runner.sampling.rows import SamplingState
from model_runner.sampling.sampler import NO_TOKEN, NativeDraw, Picks, Sampler
from model_runner.sampling.truncations import NativeTruncations
from tests.model_runner.oracles.draw import TorchDraw

from .cases import OUTPUT, PROMPT, SETTINGS
from .harness import CPU, Case, random_logits, rows_of

VOCAB = 1003
MODES = ("raw", "processed")
COOL = SamplingParams(temperature=0.8)


@pytest.fixture(scope="module")
def kernels(kernels_library: Path) -> Kernels:
    return Kernels(kernels_library, threads=2)


def both(kernels: Kernels, logits: Tensor, cases: list[Case], mode: str = "raw") -> Picks:
    """Samples of kernel and torch, which must be equal."""
    size = logits.shape[1]
    native = Sampler(NativeDraw(kernels, divides=mode == "raw"), mode, NativeTruncations(kernels))
    picks = native(logits, rows_of(cases, size))
    assert picks == Sampler(TorchDraw(size, CPU), mode)(logits, rows_of(cases, size))
    return picks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SETTINGS)
def test_rows_of_one_kind(kernels: Kernels, name: str, mode: str) -> None:
    cases = [Case(replace(SETTINGS[name], seed=seed, logprobs=2), PROMPT, OUTPUT) for seed in range(60)]
    for scale in (0.0, 1.0, 4.0):
        both(kernels, random_logits(60, VOCAB, seed=1, scale=scale), cases, mode)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_all_kinds_together(kernels: Kernels, mode: str) -> None:
    kinds = [*SETTINGS.values(), COOL, SamplingParams()] * 6
    cases = [
        Case(replace(params, seed=seed, choice=seed % 3, logprobs=seed % 4), PROMPT, OUTPUT)
        for seed, params in enumerate(kinds)
    ]
    logits = random_logits(len(cases), VOCAB, seed=2)
    crowd = both(kernels, logits, cases, mode)
    alone = [both(kernels, logits[row : row + 1], [case], mode) for row, case in enumerate(cases)]
    assert crowd.tokens == tuple(pick.tokens[0] for pick in alone)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite(kernels: Kernels, poison: float, mode: str) -> None:
    logits = random_logits(4, VOCAB, seed=3)
    logits[1] = poison
    logits[2, 500] = poison
    for kinds in itertools.product((COOL, SamplingParams(top_p=0.9)), repeat=4):
        picks = both(kernels, logits, [Case(replace(params, logprobs=1)) for params in kinds], mode)
        assert picks.tokens[1] == NO_TOKEN
        assert picks.errors[2] == (None if poison < 0 else picks.errors[1])
        assert picks.errors[0] is None


def test_views_half_precision_and_no_rows(kernels: Kernels) -> None:
    cases = [Case(replace(COOL, temperature=1.0, seed=seed)) for seed in range(50)]
    logits = random_logits(1, VOCAB, seed=4)
    both(kernels, logits.expand(50, -1), cases)
    both(kernels, random_logits(VOCAB, 50, seed=5).T, cases)
    both(kernels, random_logits(50, VOCAB, seed=6).bfloat16(), cases)
    nothing = SamplingState(1, VOCAB, CPU).rows([])
    assert Sampler(NativeDraw(kernels, divides=True))(torch.empty(0, VOCAB), nothing) == Picks((), (), (), ())


def test_logits_are_left_as_they_are(kernels: Kernels) -> None:
    logits = random_logits(2, VOCAB, seed=7)
    before = logits.clone()
    both(kernels, logits, [Case(COOL), Case(replace(COOL, top_k=5))])
    assert torch.equal(logits, before)
