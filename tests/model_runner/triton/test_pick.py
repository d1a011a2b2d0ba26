"""The kernel that picks tokens against the definition in float64, and the sampler with it against the one in torch."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model_runner.contract import SamplingParams
from model_runner.kernels.triton.pick import pick
from model_runner.sampling.noise import Stream, noise_key
from model_runner.sampling.rows import NO_TOKEN, EarlySamplingPlan
from model_runner.sampling.sampler import Picks, Sampler
from model_runner.sampling.triton_draw import TritonDraw
from tests.model_runner.kernels.test_gumbel_max import RARE_HASHES, key_with, near_pairs
from tests.model_runner.oracles.draw import GumbelMax, TorchDraw, gumbel
from tests.model_runner.sampling import oracle
from tests.model_runner.sampling.cases import OUTPUT, PROMPT, SETTINGS
from tests.model_runner.sampling.harness import CPU, Case, random_logits, rows_of

from .hopper import compiled_in

SIZES = (1, 5, 1000, 2048, 2049, 5000)
TEMPERATURES = (0.0, 1.0, 0.1, 0.7, 1.3, 5.0)
EXTREME = (1e-3, 1e-30, 1e-320, 1e30)


def keys_of(count: int, seed: int = 0) -> list[int]:
    return [noise_key(seed * 7919 + row, row % 5, Stream.TARGET, row * row) for row in range(count)]


def picked(device: torch.device, logits: Tensor, keys: list[int], temperatures: list[float]) -> list[int]:
    """By the kernel."""
    as_signed = torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64))
    settings = as_signed.to(device), torch.tensor(temperatures, dtype=torch.float64, device=device)
    tokens: list[int] = pick(logits.to(device), *settings).tolist()
    return tokens


def defined(logits: Tensor, keys: list[int], temperatures: list[float]) -> list[int]:
    return [oracle.pick(*row) for row in zip(logits.numpy(), keys, temperatures, strict=True)]


@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_those_of_the_definition(device: torch.device, size: int) -> None:
    for seed, scale in enumerate((0.0, 3.0, 1e4)):
        logits, keys = random_logits(6, size, seed, scale), keys_of(6, seed)
        logits[1::3, 1::2] = -math.inf
        logits[2::3] = logits[2::3].round()
        expected = defined(logits, keys, list(TEMPERATURES))
        assert picked(device, logits, keys, list(TEMPERATURES)) == expected
        assert NO_TOKEN not in expected


def test_many_rows_get_what_torch_draws(device: torch.device) -> None:
    count = 60
    logits, keys = random_logits(count, 1003, seed=5), keys_of(count)
    expected = GumbelMax(1003, CPU)(logits, keys)
    assert picked(device, logits, keys, [1.0] * count) == expected
    assert picked(device, logits, keys[::-1], [1.0] * count) != expected


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, in the interpreter
def test_extreme_temperatures_and_logits_so_far_apart_that_their_difference_is_no_float(device: torch.device) -> None:
    for logits in (random_logits(12, 33, seed=6), random_logits(12, 33, 7).sign() * torch.finfo(torch.float32).max):
        temperatures = [*EXTREME, *EXTREME, *TEMPERATURES[:4]]
        assert picked(device, logits, keys_of(12), temperatures) == defined(logits, keys_of(12), temperatures)


def test_greedy_takes_the_lowest_of_equals_in_one_chunk_or_in_many(device: torch.device) -> None:
    logits = torch.full((5, 5000), -1.0)
    logits[0, [4999, 77, 3000]] = 2.0
    logits[1, [4999, 4000]] = 0.5
    logits[2, 4097] = -0.5
    logits[3] = torch.where(torch.arange(5000) % 2 == 0, -0.0, 0.0)
    logits[4] = -math.inf
    logits[4, 2048] = -1e38
    assert picked(device, logits, [0] * 5, [0.0] * 5) == [77, 4000, 4097, 0, 2048]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_are_not_finite_have_no_token(device: torch.device, temperature: float) -> None:
    logits = random_logits(9, 2100, seed=8)
    logits[1, 24], logits[2, 2099], logits[3], logits[4, 0] = math.nan, math.inf, -math.inf, -math.nan
    logits[5, 3], logits[6, 2:4] = -math.inf, torch.tensor([math.inf, math.nan])
    tokens = picked(device, logits, keys_of(9), [temperature] * 9)
    assert tokens == defined(logits, keys_of(9), [temperature] * 9)
    assert [row for row, token in enumerate(tokens) if token == NO_TOKEN] == [1, 2, 3, 4, 6]


def test_the_last_column_is_the_end_of_a_row(device: torch.device) -> None:
    """The memory behind it is the next row or unused."""
    wide = random_logits(4, 2500, seed=9)
    wide[:, 2100:] = 100.0
    for temperatures in ([0.0] * 4, [1.0] * 4):
        tokens = picked(device, wide[:, :2100], keys_of(4), temperatures)
        assert tokens == defined(wide[:, :2100].contiguous(), keys_of(4), temperatures)
    settings = torch.zeros(33, dtype=torch.int64), torch.zeros(33, dtype=torch.float64)
    with pytest.raises(ValueError, match="side by side"):
        pick(torch.zeros(4, 33).T, *settings)


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    logits, keys, temperatures = random_logits(6, 2100, seed=10), keys_of(6), list(TEMPERATURES)
    alone = [
        picked(device, logits[row : row + 1], keys[row : row + 1], temperatures[row : row + 1])[0] for row in range(6)
    ]
    logits[4] = math.nan
    assert picked(device, logits, keys, temperatures) == [*alone[:4], NO_TOKEN, alone[5]]


def test_the_result_goes_where_it_is_wanted_and_there_may_be_no_rows(device: torch.device) -> None:
    settings = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(3, dtype=torch.float64, device=device)
    out = torch.full((5,), 7, device=device)
    assert pick(torch.eye(3, device=device), *settings, out=out[1:4]) is not None
    assert out.tolist() == [7, 0, 1, 2, 7]
    nothing = pick(torch.empty(0, 33, device=device), *(setting[:0] for setting in settings))
    assert (nothing.dtype, nothing.tolist()) == (torch.int64, [])


def test_noise_that_no_search_would_find(device: torch.device) -> None:
    """Among it the highest that there is: a bound that is too low would lose the token."""
    token, size = 70, 150
    keys = [key_with(token, word) for word in RARE_HASHES]
    for margin in (-1e-5, 1e-5):
        logits = torch.zeros(len(keys), size)
        for row, key in enumerate(keys):
            noise = [gumbel(key, other) for other in range(size)]
            rival = max(value for other, value in enumerate(noise) if other != token)
            logits[row, token] = rival - noise[token] + margin
        tokens = picked(device, logits, keys, [1.0] * len(keys))
        assert [token == 70 for token in tokens] == [margin > 0] * len(keys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="scores are equal by the host's logarithm only")
def test_equal_scores_go_to_the_lowest_token(device: torch.device) -> None:
    """Where the noise of two tokens differs by what is a float, that logit makes their scores equal."""
    size, (key,) = 60_000, keys_of(1)
    pairs, rows = [], []
    for low, high in near_pairs(key, size):
        difference = gumbel(key, low) - gumbel(key, high)
        if float(np.float32(difference)) != difference or difference + gumbel(key, high) != gumbel(key, low):
            continue
        pairs.append((low, high))
        logits = torch.full((size,), -math.inf)
        logits[low], logits[high] = 0.0, difference
        rows.append(logits)
    assert picked(device, torch.stack(rows), [key] * len(rows), [1.0] * len(rows)) == [min(pair) for pair in pairs]
    assert {low < high for low, high in pairs} == {True, False}


def both(device: torch.device, logits: Tensor, cases: list[Case], divides: bool = True) -> Picks:
    """Samples with either draw."""
    size, mode = logits.shape[1], "raw" if divides else "processed"
    logits, rows = logits.to(device), rows_of(cases, size, device)
    picks = Sampler(TritonDraw(divides), mode)(logits, rows)
    assert picks == Sampler(TorchDraw(size, device), mode)(logits, rows)
    return picks


@pytest.mark.parametrize("divides", [True, False])
def test_a_sampler_draws_the_same_tokens(device: torch.device, divides: bool) -> None:
    kinds = [*SETTINGS.values(), SamplingParams(), SamplingParams(temperature=0.8)]
    cases = [
        Case(replace(kind, seed=seed, logprobs=seed % 4 or None), PROMPT, OUTPUT) for seed, kind in enumerate(kinds)
    ]
    both(device, random_logits(len(cases), 1003, seed=11), cases, divides)
    plain = [Case(SamplingParams(temperature=0.8, seed=seed)) for seed in range(6)]
    both(device, random_logits(1, 1003, seed=12).expand(6, -1), plain, divides)
    both(device, random_logits(1003, 6, seed=13).T, plain, divides)
    both(device, random_logits(6, 1003, seed=14).bfloat16(), plain, divides)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_sampler_finds_the_same_failures(device: torch.device, poison: float) -> None:
    logits = random_logits(2, 100, seed=15)
    logits[1] = poison
    for kinds in itertools.product((SamplingParams(temperature=0.8), SamplingParams(top_p=0.9)), repeat=2):
        assert both(device, logits, [Case(kind) for kind in kinds]).errors[1] is not None


def test_what_is_found_beforehand_is_what_is_sampled(device: torch.device) -> None:
    cases = [Case(SamplingParams(temperature=temperature, seed=7)) for temperature in TEMPERATURES]
    plan = EarlySamplingPlan.greedy(len(cases))
    plan.keys[:], plan.temperatures[:] = noise_key(7, 0, Stream.TARGET, 0), TEMPERATURES
    logits = random_logits(len(cases), 1003, seed=16).to(device)
    keys, temperatures = (torch.from_numpy(array).to(device) for array in plan.arrays)
    sampled = Sampler(TritonDraw(divides=True))(logits, rows_of(cases, 1003, device))
    assert pick(logits, keys, temperatures).tolist() == list(sampled.tokens)


@pytest.mark.hopper
def test_it_compiles_for_hopper_without_spilling() -> None:
    compiled = compiled_in("tests.model_runner.triton.compile_pick")
    assert {kernel.name for kernel in compiled} == {"_find_leaders", "_draw_from_chunks", "_merge"}
    assert all(kernel.spilled == 0 and kernel.registers <= 128 for kernel in compiled)
