"""The native truncations keep the logits that those in torch keep, with the same bits.

The two sum in different orders, so a bound that differs from a probability by a few bits of a double may divide them.
A server uses one of the two: it has native kernels or not.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model_runner.contract import Mirostat, SamplingParams, Xtc
from model_runner.kernels.library import Kernels
from model_runner.sampling.truncations import NativeTruncations, truncate

from ..sampling import oracle
from ..sampling.harness import Case, random_logits, rows_of

SETTINGS = {
    "temperature": SamplingParams(temperature=0.6),
    "cold": SamplingParams(temperature=1e-320),
    "hot": SamplingParams(temperature=1e30),
    "top_n_sigma": SamplingParams(top_n_sigma=1.1),
    "typical_p": SamplingParams(typical_p=0.83),
    "typical_p low": SamplingParams(typical_p=0.05),
    "typical_p high": SamplingParams(typical_p=0.999999),
    "epsilon_cutoff": SamplingParams(epsilon_cutoff=0.002),
    "epsilon_cutoff high": SamplingParams(epsilon_cutoff=0.99),
    "eta_cutoff": SamplingParams(eta_cutoff=0.01),
    "top_k": SamplingParams(top_k=7),
    "top_k 1": SamplingParams(top_k=1),
    "top_k high": SamplingParams(top_k=900),
    "top_p": SamplingParams(top_p=0.87),
    "top_p 0": SamplingParams(top_p=0.0),
    "top_p high": SamplingParams(top_p=0.9999999),
    "min_p": SamplingParams(min_p=0.07),
    "min_p 1": SamplingParams(min_p=1.0),
    "xtc": SamplingParams(xtc=Xtc(1.0, 0.02)),
    "xtc 0": SamplingParams(xtc=Xtc(1.0, 0.0)),
    "mirostat": SamplingParams(mirostat=Mirostat(2.3)),
    "mirostat narrow": SamplingParams(mirostat=Mirostat(0.0)),
    "all": SamplingParams(
        temperature=1.7,
        top_n_sigma=3.0,
        typical_p=0.95,
        epsilon_cutoff=0.003,
        eta_cutoff=0.002,
        top_k=12,
        top_p=0.93,
        min_p=0.03,
        xtc=Xtc(1.0, 0.3),
        mirostat=Mirostat(1.5),
    ),
    "other way round": SamplingParams(
        temperature=0.7,
        top_k=300,
        top_p=0.95,
        typical_p=0.9,
        xtc=Xtc(1.0, 0.01),
        sampler_order=("xtc", "top_k", "xtc", "top_p", "xtc", "typical_p", "temperature"),
    ),
}


def both(kernels: Kernels, logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits that kernel and torch keep."""
    rows = rows_of([Case(one) for one in params], logits.shape[1])
    result = NativeTruncations(kernels)(logits, rows)
    expected = truncate(logits, rows)
    assert torch.equal(result, expected)
    return result


def kinds_of_logits(num_rows: int, size: int) -> list[Tensor]:
    """Logits of all scales, with ties, with banned tokens, and like language models'."""
    of_scales = [random_logits(num_rows, size, seed=1, scale=scale) for scale in (0.0, 0.1, 1.0, 4.0, 1e4, 1e30)]
    tied = (random_logits(num_rows, size, seed=2) * 2).round() / 2
    banned = random_logits(num_rows, size, seed=3)
    banned[::2, 1::2] = -math.inf
    banned[1, : size - 1] = -math.inf
    generator = torch.Generator().manual_seed(4)
    ranks = torch.stack([torch.randperm(size, generator=generator) for _ in range(num_rows)])
    return [*of_scales, tied, banned, -1.6 * (ranks + 1.0).log() + random_logits(num_rows, size, 5, 1.0)]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("size", [1, 2, 63, 64, 1003])
def test_leaves_what_torch_leaves(kernels: Kernels, size: int, name: str) -> None:
    for logits in kinds_of_logits(12, size):
        both(kernels, logits, [SETTINGS[name]] * 12)


def test_a_whole_vocabulary(kernels: Kernels) -> None:
    params = [replace(one, seed=seed) for seed, one in enumerate(SETTINGS.values())]
    for logits in kinds_of_logits(len(params), 49_152)[1::3]:
        both(kernels, logits, params)


def test_long_flat_tails(kernels: Kernels) -> None:
    """Most of what is kept is far less probable than the head, or the mass needs nearly all of a flat row."""
    logits = torch.full((4, 100_001), math.log(0.1 / 100_000))
    logits[:, 7] = math.log(0.9)
    logits[2:] = 0.5
    params = [SamplingParams(typical_p=0.95), SamplingParams(top_p=0.95)] * 2
    kept = both(kernels, logits, params).isfinite().sum(-1).tolist()
    assert kept[0] == kept[2] == 100_001
    assert kept[1:4:2] == [pytest.approx(50_001, abs=2), pytest.approx(95_001, abs=2)]


def test_probabilities_that_are_the_mass_together_are_enough(kernels: Kernels) -> None:
    logits = torch.full((3, 70), -math.inf)
    logits[:, :40:10] = 0.0  # four, of a quarter each
    kept = both(kernels, logits, [SamplingParams(top_p=mass) for mass in (0.25, 0.5, 0.75)])
    assert kept.isfinite().sum(-1).tolist() == [1, 2, 3]


def test_a_cutoff_removes_what_is_less_probable_by_the_last_bits_of_a_double(kernels: Kernels) -> None:
    """Against probabilities with more bits. The preselection, which compares logits, must not decide."""
    logits = -31 * torch.rand(1, 1000, generator=torch.Generator().manual_seed(8))
    powers = np.exp(logits[0].numpy().astype(np.longdouble))
    probs = powers / powers.sum()
    tokens = [token for token in range(200) if token != int(powers.argmax())]  # the most probable one always stays
    for factor, stays in ((1 - 5e-16, True), (1 + 5e-16, False)):
        params = [SamplingParams(epsilon_cutoff=float(probs[token] * np.longdouble(factor))) for token in tokens]
        rows = rows_of([Case(one) for one in params], 1000)
        kept = NativeTruncations(kernels)(logits.expand(len(tokens), -1), rows).isfinite()
        assert [kept[row, token].item() for row, token in enumerate(tokens)] == [stays] * len(tokens)


def test_rows_without_steps_are_copied_and_others_left_alone(kernels: Kernels, kernels_library: Path) -> None:
    logits = random_logits(9, 999, seed=6)
    logits[4] = math.nan  # a greedy row, of whatever numbers
    before = logits.clone()
    params = [SamplingParams(top_p=0.8), SamplingParams(), SamplingParams(temperature=0.7, top_k=5)] * 3
    params[4] = SamplingParams(temperature=0)
    rows = rows_of([Case(one) for one in params], 999)
    for threads in (1, 2, 3):
        together = NativeTruncations(Kernels(kernels_library, threads, kernels.isa))(logits, rows)
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
        assert together[4].isnan().all()
        for row, one in enumerate(params):
            alone = NativeTruncations(kernels)(logits[row : row + 1], rows_of([Case(one)], 999))
            assert torch.equal(alone.nan_to_num(), together[row : row + 1].nan_to_num())
    plain = rows_of([Case(SamplingParams())] * 9, 999)
    assert NativeTruncations(kernels)(logits, plain) is logits


@pytest.mark.parametrize("name", ["typical_p", "eta_cutoff", "top_k", "top_p", "top_n_sigma", "all"])
def test_keeps_what_the_definitions_keep(kernels: Kernels, name: str) -> None:
    """Against another truth than torch."""
    logits = random_logits(6, 501, seed=7)
    result = NativeTruncations(kernels)(logits, rows_of([Case(SETTINGS[name])] * 6, 501))
    for row, mine in enumerate(result):
        truth = oracle.final(logits[row].double().numpy(), SETTINGS[name])
        np.testing.assert_array_equal(np.isfinite(mine.numpy()), np.isfinite(truth))
        assert 0 < np.isfinite(truth).sum() < 501
